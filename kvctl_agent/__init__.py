"""The library embedded in each prefill and decode worker; importing it alone is light (no torch, no engine)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvctl_agent.agent import Agent
    from kvctl_agent.contract.states import RoomState
    from kvctl_agent.memory.pool import KVPool
    from kvctl_agent.rank import Rank

_WHERE = {
    "Agent": "kvctl_agent.agent",
    "KVPool": "kvctl_agent.memory.pool",
    "Rank": "kvctl_agent.rank",
    "RoomState": "kvctl_agent.contract.states",
}

__all__ = ["Agent", "KVPool", "Rank", "RoomState"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
