"""Which classes a machine's state consists of: those that change and are copied, and those that do not.

Of this package all, so that a new one is not forgotten; of others those that are listed. Nothing else is ever written
into a checkpoint or made from one.
"""

from __future__ import annotations

import pkgutil
from enum import Enum
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import msgspec
import numpy as np

import kvctl_agent.protocol as package
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.local_shard import LocalShard
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape, Plane, Segment, StateShape
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.telemetry.busy_time import BusyTime
from kvctl_agent.telemetry.room_records import RoomRecord

TOMBSTONES_KEPT = 4096

_ATOMS: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes, np.ndarray, range, frozenset})
_LEAVES: frozenset[type] = frozenset(
    {
        RoomState,
        Chunk,
        RankCoord,
        LocalShard,
        ModelShape,
        Plane,
        PlanInputs,
        Segment,
        TransferSlice,
        ParallelConfig,
        StateShape,
    }
)
_STATES: frozenset[type] = frozenset({RoomRecord, BusyTime})

# Of what is remembered for people, only what the machines count on in.
KEPT: dict[type, tuple[str, ...]] = {
    RoomRecord: (
        "key",
        "landed",
        "nonce",
        "opened_at",
        "pages",
        "parked",
        "planned",
        "room",
        "scattered",
        "sent",
    )
}


class Classes(NamedTuple):
    """`leaves` do not change and are kept by reference, with all that they hold; `states` do, by name."""

    leaves: frozenset[type]
    states: dict[str, type]


@lru_cache(maxsize=1)
def classes() -> Classes:
    """All of them; the first call imports the whole package."""
    leaves, states = {*_ATOMS, *_LEAVES}, set(_STATES)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for kind in vars(import_module(found.name)).values():
            if not isinstance(kind, type) or kind.__module__ != found.name or issubclass(kind, BaseException):
                continue
            immutable = issubclass(kind, msgspec.Struct | Enum) or (
                issubclass(kind, tuple) and hasattr(kind, "_fields")
            )
            (leaves if immutable else states).add(kind)
    return Classes(frozenset(leaves), {kind.__name__: kind for kind in states})


@lru_cache(maxsize=256)
def names_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a class that changes; empty where each object says, None for a class that is none of ours."""
    if classes().states.get(kind.__name__) is not kind:
        return None
    if kind in KEPT:
        return KEPT[kind]
    return tuple(sorted(name for each in kind.__mro__ for name in getattr(each, "__slots__", ())))
