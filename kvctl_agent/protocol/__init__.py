"""The agent-to-agent protocol as state machines that do no I/O.

Events go in, actions come out, and `runtime/` executes them. `messages` and `codec` define the control channel, `tag`
the tag of a write, `ring` the staging ring, `peer` the peers and their liveness. `prefill` and `decode` are the two
machines, each composed of parts around the context and the dispatch tables of `machine`.
"""

from __future__ import annotations
