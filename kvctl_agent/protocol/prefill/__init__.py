"""The state machine of a prefill rank.

`machine` builds the parts; `send_room` has the data of a room, `rooms` its states, `dispatch` the engine's calls and
the ready parts, `admission` the handshake and the opening of rooms.
"""

from __future__ import annotations

from kvctl_agent.protocol.prefill.machine import PrefillMachine

__all__ = ["PrefillMachine"]
