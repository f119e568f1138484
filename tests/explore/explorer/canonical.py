"""Canonical form of a state: a generic walk over all fields of all objects, so that no new field can be missed.

Two machines are in the same state if their walks are equal. A field is ignored only if `IRRELEVANT` lists it with a
reason, and the order of a mapping only if `UNORDERED` lists it. A mistake elsewhere therefore only adds states.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

import msgspec
import numpy as np

_TOLD = "telemetry: written, never read by the protocol"
_GIVEN = "fixed for the agent's life, which is named by its incarnation"
_INTRODUCED = "said by the peer in its introduction, which its incarnation stands for"
_PLANNED = "computed from the opening, which the nonce stands for"

IRRELEVANT: dict[str, dict[str, str]] = {
    "PrefillState": {"sends_at_finish": _GIVEN, "rows_in_tags": _GIVEN},
    "Peer": {
        "timing": _GIVEN,
        "info": _INTRODUCED,
        "inputs": _INTRODUCED,
        "wire": _INTRODUCED,
        "coord": _INTRODUCED,
        "rtt_ns": _TOLD,
        "echoed_ns": _TOLD,
        "errors_total": _TOLD,
        "last_error": _TOLD,
        "watermark_sent": _TOLD,
        "name_refused_to": _TOLD,
    },
    "Lease": {"length_ns": _GIVEN},
    "CancelToken": {"lease": "the peer's; one that is not its present one belongs to transfers that have failed"},
    "RingGate": {"heard_ns": _TOLD},
    "Ring": {"high_water_bytes": _TOLD, "size_bytes": _GIVEN},
    "RecvRoom": {
        "record": _TOLD,
        "opening": "named by room and nonce; completed once, together with the transfers",
        "pages": _PLANNED,
        "groups": _PLANNED,
        "tokens": _PLANNED,
        "tables": _PLANNED,
        "shares": _PLANNED,
        "chunks": _PLANNED,
        "wanted": _PLANNED,
        "writers": _PLANNED,
    },
    "SendRoom": {"record": _TOLD, "spans": _TOLD},
    "PeerTransfer": {
        "reader": _PLANNED,
        "writer": _PLANNED,
        "key": "peer, room and nonce",
        "shares": _PLANNED,
        "tables": _PLANNED,
        "prefix_tokens": _PLANNED,
        "planned": _PLANNED,
        "prefill_only": _PLANNED,
    },
    "Part": {
        "chunk": "named by the key",
        "share": "named by the key",
        "nbytes": "named by the key",
        "layers": "named by the key",
        "asks": _TOLD,
        "asked_ns": _TOLD,
    },
    "GrantTable": {"refused_largest_bytes": _TOLD},
    "Final": {"share": "named by the key", "dst": _PLANNED},
    "ComputedPages": {"forwards": _TOLD, "complete": "follows from the counts"},
    "Tombstones": {"_lifetime_ns": _GIVEN, "_capacity": _GIVEN},
    "Witness": {
        "shape": _GIVEN,
        "decode": _GIVEN,
        "instances": _GIVEN,
        "chunk_pages": _GIVEN,
        "source": "what the engines' pages hold, the same from the start",
        "items": "what the engines' state items hold, the same from the start",
        "sent_failures": "for the words of a complaint",
        "paths": _TOLD,
        "cut": _TOLD,
    },
    "ExpectedRoom": {
        **dict.fromkeys(("plan", "opening"), "named by room and nonce"),
        "failure": "for the words of a complaint",
    },
}

# Mappings that are looked up by key, and never walked in an order that anybody could see.
UNORDERED: dict[str, frozenset[str]] = {
    "PrefillState": frozenset({"ended"}),
    "Tombstones": frozenset({"_entries"}),  # they do not expire here
    "RecvRoom": frozenset({"landed", "scattered", "granted"}),
    "GrantTable": frozenset({"_by_part", "_by_room"}),
    "Witness": frozenset({"rooms", "sent", "ring_bytes", "transfers", "lives"}),
    "ExpectedRoom": frozenset({"covered"}),
    "ExpectedTransfer": frozenset({"sent"}),
}

_ATOMS = frozenset({int, str, bytes, bool, float, type(None)})


class Walk:
    """Converts objects into values that are equal if the objects are; `named` returns an object's name, if it has one.

    Mutable objects are numbered in the order of the walk, so that one object in two places differs from two equal
    objects.
    """

    def __init__(self, named: Callable[[object], Hashable | None] = lambda value: None) -> None:
        self._named = named
        self._plans: dict[type, tuple[tuple[str, bool], ...]] = {}
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Hashable:
        self._met = {}
        return self._of(value)

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _ATOMS:
            return value  # type: ignore[no-any-return]
        name = self._named(value)
        if name is not None:
            return name
        if isinstance(value, Enum):
            return value.value  # type: ignore[no-any-return]
        if isinstance(value, tuple):
            return tuple([self._of(entry) for entry in value])
        if isinstance(value, frozenset):
            return frozenset([self._of(entry) for entry in value])
        if isinstance(value, np.ndarray):
            return value.tobytes()
        if isinstance(value, msgspec.Struct):
            return kind.__name__, tuple([self._of(getattr(value, field)) for field in value.__struct_fields__])
        if isinstance(value, range):
            return value.start, value.stop
        number = self._met.get(id(value))
        if number is not None:
            return "again", number
        self._met[id(value)] = len(self._met)
        return self._changing(value, kind, ordered=True)

    def _changing(self, value: Any, kind: type, *, ordered: bool) -> Hashable:
        if isinstance(value, dict):
            entries = [(self._of(key), self._of(entry)) for key, entry in value.items()]
            return tuple(entries) if ordered else frozenset(entries)
        if isinstance(value, list | deque):
            return tuple([self._of(entry) for entry in value])
        if isinstance(value, set):
            return frozenset([self._of(entry) for entry in value])
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = plan_of(kind, value)
        parts: list[Hashable] = []
        for field, in_order in plan:
            entry = getattr(value, field)
            if in_order:
                parts.append(self._of(entry))
            elif isinstance(entry, OrderedDict | dict):
                self._met.setdefault(id(entry), len(self._met))
                parts.append(self._changing(entry, dict, ordered=False))
            else:
                raise TypeError(f"{kind.__name__}.{field} is no mapping")
        return tuple(parts)


def plan_of(kind: type, value: object) -> tuple[tuple[str, bool], ...]:
    """Returns the relevant fields of a class, and whether the order within each is relevant."""
    slots = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())}
    fields = sorted(slots | vars(value).keys() if hasattr(value, "__dict__") else slots)
    if not fields:
        raise TypeError(f"a {kind.__name__} holds nothing that could be compared")
    names = [base.__name__ for base in kind.__mro__]
    left_out = {field for name in names for field in IRRELEVANT.get(name, ())}
    unordered = {field for name in names for field in UNORDERED.get(name, ())}
    return tuple((field, field not in unordered) for field in fields if field not in left_out)
