"""Which classes a machine's state consists of: those that change and are copied, and those that do not.

A class that is missing here fails the first checkpoint that meets it, in tests and not in the field: `test_checkpoint`
takes machines through whole histories.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.holding import Held
from kvctl_agent.layout.inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape, Plane, Segment, StateShape
from kvctl_agent.layout.share import Share
from kvctl_agent.layout.side import Coord, Side
from kvctl_agent.protocol.events import Fence, SendPages
from kvctl_agent.protocol.gate import Gate
from kvctl_agent.protocol.ledger import Ledger
from kvctl_agent.protocol.local import Local, Timing
from kvctl_agent.protocol.messages import Grant, Introduction, RoomOpen
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.prefill_rooms import Ended
from kvctl_agent.protocol.recv_room import RecvRoom, WriterLeg
from kvctl_agent.protocol.ring import Position, Region, Ring
from kvctl_agent.protocol.send_room import Final, Leg, Part, PartState, SendRoom
from kvctl_agent.protocol.staging import Holding, RegionState, StagingBook
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.protocol.tombstones import RoomKey
from kvctl_agent.telemetry.rooms import RoomRecord
from kvctl_agent.telemetry.spans import Spans

TOMBSTONES_KEPT = 4096

ATOMS: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})
ENUMS: tuple[type, ...] = (RoomState, PartState, PeerState, RegionState, PartKind)
TUPLES: tuple[type, ...] = (Chunk, Coord, Ended, Held, PartKey, Plane, Position, Region, RoomKey, Tag)
RECORDS: tuple[type, ...] = (
    Grant,
    Introduction,
    Local,
    ModelShape,
    PlanInputs,
    RoomOpen,
    Segment,
    SendPages,
    Share,
    Side,
    StateShape,
    Timing,
)
"""Structs and frozen dataclasses."""

LEAVES: frozenset[type] = frozenset({*ATOMS, *ENUMS, *TUPLES, *RECORDS, np.ndarray, range, frozenset})
"""What does not change, and is kept by reference. A dict or list inside of one of these is never changed either."""

STATES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Fence,
        Final,
        Gate,
        Holding,
        Ledger,
        Leg,
        Part,
        Peer,
        RecvRoom,
        Ring,
        RoomRecord,
        SendRoom,
        Spans,
        StagingBook,
        WriterLeg,
    )
}
"""What changes."""

# Of what is remembered for people, only what the machines look at again.
KEPT: dict[type, tuple[str, ...]] = {
    RoomRecord: (
        "forward_begun_at",
        "forward_done_at",
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


@lru_cache(maxsize=256)
def names_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a class that changes; empty where each object says, None for a class that is not listed."""
    if STATES.get(kind.__name__) is not kind:
        return None
    if kind in KEPT:
        return KEPT[kind]
    return tuple(sorted(name for each in kind.__mro__ for name in getattr(each, "__slots__", ())))
