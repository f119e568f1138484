"""Observer of SGLang's own transfer backends (KVCTL_SGLANG=observe): serves them on kvctl's admin socket, read only."""

from __future__ import annotations

from kvctl_agent.integrations.sglang.observe.observer import install, observe

__all__ = ["install", "observe"]
