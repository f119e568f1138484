"""The prefill rank's machine and the parts that it is composed of.

`machine` has the tables; `staging`, `rooms`, `dispatch`, `admission`, `forwards` and `readers` are the parts, each of
which knows some of those before it.
"""

from __future__ import annotations

from kvctl_agent.protocol.prefill.machine import PrefillMachine

__all__ = ["PrefillMachine"]
