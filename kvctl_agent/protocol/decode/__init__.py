"""The state machine of a decode rank.

`machine` builds the parts; `rooms` has the coverage and states of rooms, `landing` grants and arrivals, `reclaim` the
memory of failed rooms, `admission` the opening of rooms and the handshake.
"""

from __future__ import annotations

from kvctl_agent.protocol.decode.machine import DecodeMachine

__all__ = ["DecodeMachine"]
