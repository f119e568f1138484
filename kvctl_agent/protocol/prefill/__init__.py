"""The state machine of a prefill rank.

`machine` maps events and messages to handlers; `send_room` contains the data of a room, `rooms` changes the states of
rooms, `dispatch` handles the engine's calls and queues ready parts, `admission` performs the handshake and opens rooms.
"""

from __future__ import annotations

from kvctl_agent.protocol.prefill.machine import PrefillMachine

__all__ = ["PrefillMachine"]
