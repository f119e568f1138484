"""KV transfer library embedded in prefill and decode workers.

Names are imported on first use: `import kvctl_agent` alone loads neither torch nor a transfer engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvctl_agent.agent import Agent
    from kvctl_agent.contract.states import RoomState
    from kvctl_agent.errors import KvctlError, LayoutError
    from kvctl_agent.integrations.engine_agent import EngineAgent
    from kvctl_agent.layout.layer_grouping import ForwardInfo
    from kvctl_agent.layout.parallel import ParallelConfig, local_shards
    from kvctl_agent.layout.shape import KVGroup, ModelShape, StateShape
    from kvctl_agent.memory.pool import Buffer, DraftKV, GroupTensors, KVPool, StateTensors
    from kvctl_agent.rank import Rank, rank_name
    from kvctl_agent.request_id import prompt_digest, room_number
    from kvctl_agent.runtime.handles import Receive, Send

_MODULES = {
    "Agent": "kvctl_agent.agent",
    "Buffer": "kvctl_agent.memory.pool",
    "DraftKV": "kvctl_agent.memory.pool",
    "EngineAgent": "kvctl_agent.integrations.engine_agent",
    "ForwardInfo": "kvctl_agent.layout.layer_grouping",
    "GroupTensors": "kvctl_agent.memory.pool",
    "KVGroup": "kvctl_agent.layout.shape",
    "KVPool": "kvctl_agent.memory.pool",
    "KvctlError": "kvctl_agent.errors",
    "LayoutError": "kvctl_agent.errors",
    "ModelShape": "kvctl_agent.layout.shape",
    "ParallelConfig": "kvctl_agent.layout.parallel",
    "Rank": "kvctl_agent.rank",
    "Receive": "kvctl_agent.runtime.handles",
    "RoomState": "kvctl_agent.contract.states",
    "Send": "kvctl_agent.runtime.handles",
    "StateShape": "kvctl_agent.layout.shape",
    "StateTensors": "kvctl_agent.memory.pool",
    "local_shards": "kvctl_agent.layout.parallel",
    "prompt_digest": "kvctl_agent.request_id",
    "rank_name": "kvctl_agent.rank",
    "room_number": "kvctl_agent.request_id",
}

__all__ = [
    "Agent",
    "Buffer",
    "DraftKV",
    "EngineAgent",
    "ForwardInfo",
    "GroupTensors",
    "KVGroup",
    "KVPool",
    "KvctlError",
    "LayoutError",
    "ModelShape",
    "ParallelConfig",
    "Rank",
    "Receive",
    "RoomState",
    "Send",
    "StateShape",
    "StateTensors",
    "local_shards",
    "prompt_digest",
    "rank_name",
    "room_number",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
