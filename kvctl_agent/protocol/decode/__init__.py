"""The decode rank's machine and the parts that it is composed of.

`machine` has the tables; `rooms`, `grants`, `landing`, `reclaim`, `admission` and `instances` are the parts, each of
which knows some of those before it.
"""

from __future__ import annotations

from kvctl_agent.protocol.decode.machine import DecodeMachine

__all__ = ["DecodeMachine"]
