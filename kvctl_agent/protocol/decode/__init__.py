"""The state machine of a decode rank.

`machine` maps events and messages to handlers; `rooms` tracks the coverage and state of each room, `landing` handles
grants and arrivals, `reclaim` frees the memory of failed rooms, `instances` knows and forgets prefill instances,
`admission` opens rooms and performs the handshake.
"""

from __future__ import annotations

from kvctl_agent.protocol.decode.machine import DecodeMachine

__all__ = ["DecodeMachine"]
