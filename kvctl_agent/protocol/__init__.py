"""The agent-to-agent protocol as state machines that do no I/O.

A machine takes events and returns actions, which `runtime/` executes. `messages` and `codec` define the control
channel, `tag` the tag of a write, `ring` the staging ring, `peer` the peers and their liveness. `prefill` and `decode`
contain the two machines, which share the context and the dispatch tables of `machine`.
"""

from __future__ import annotations
