"""States are told apart by everything that a machine holds, but for what is named, with a reason, as irrelevant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import msgspec
import pytest

from kvctl_agent.protocol.ring import RegionState
from kvctl_agent.protocol.tag import RoomKey
from tests.explore.explorer.canonical import IRRELEVANT, UNORDERED, Walk, plan_of
from tests.explore.explorer.scene import Scene
from tests.explore.explorer.witness import Witness

pytestmark = pytest.mark.sample


def reachable(root: object) -> dict[str, object]:
    """One object of each of our classes that a machine or the oracle holds, by the name of the class."""
    found: dict[str, object] = {}
    met: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif type(value).__module__.startswith(("kvctl_agent.protocol", "tests.")):
            for base in type(value).__mro__[:-1]:
                found.setdefault(base.__name__, value)
            slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
            waiting += [
                getattr(value, name) for name in (*slots, *getattr(value, "__dict__", ())) if hasattr(value, name)
            ]
    return found


def fresh() -> dict[str, Any]:
    """Machines in the middle of something, and one object of each class that they hold."""
    world = Scene(rooms=2, aux=1, granted=True, computed=(("prefill-0", 7),)).start().world
    machines = list(world.machines.values())
    return {**reachable(([machine.state for machine in machines], Witness(world))), "machines": machines}


@pytest.fixture(scope="module")
def objects() -> dict[str, object]:
    found = fresh()
    del found["machines"]
    return found


@pytest.mark.parametrize("table", [IRRELEVANT, UNORDERED], ids=["irrelevant", "unordered"])
def test_what_is_left_out_is_there(table: dict[str, Iterable[str]], objects: dict[str, object]) -> None:
    for kind, fields in table.items():
        for field in fields:
            assert hasattr(objects[kind], field), f"{kind}.{field} is gone: take it out of the table"


def test_a_field_that_is_new_counts(objects: dict[str, object]) -> None:
    for kind, value in objects.items():
        if isinstance(value, tuple | Enum | msgspec.Struct):
            continue  # values: all of them counts
        wider = type(kind, (type(value),), {"__slots__": ("new",)})
        assert ("new", True) in plan_of(wider, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda objects: setattr(objects["PeerTransfer"], "drained_sent", True),
        lambda objects: setattr(objects["PeerTransfer"], "in_flight", 7),
        lambda objects: setattr(objects["CancelToken"], "cancelled", True),
        lambda objects: setattr(objects["RingGate"], "sequence", 7),
        lambda objects: setattr(objects["Peer"], "heard_ns", 1),
        lambda objects: objects["Peer"].ended_incarnations.append(7),
        lambda objects: setattr(objects["Part"], "revoked", 7),
        lambda objects: setattr(objects["Ring"], "_serial", 7),
        lambda objects: setattr(objects["Allocation"], "state", RegionState.REVOKING),
        lambda objects: setattr(objects["RecvRoom"], "missing", 7),
        lambda objects: objects["Tombstones"].add(RoomKey("decode-0", 1, 2), None, 0),
    ],
)
def test_what_the_protocol_knows_makes_another_state(change: Callable[[Any], object]) -> None:
    found = fresh()
    before = [Walk().of(machine.state) for machine in found["machines"]]
    change(found)
    assert [Walk().of(machine.state) for machine in found["machines"]] != before


def test_what_is_only_told_makes_no_other_state() -> None:
    found = fresh()
    before = [Walk().of(machine.state) for machine in found["machines"]]
    found["Peer"].errors_total += 1
    found["Ring"].high_water_bytes += 1
    assert [Walk().of(machine.state) for machine in found["machines"]] == before


def test_one_object_in_two_places_is_not_two_equal_ones() -> None:
    one: list[int] = []
    assert Walk().of([one, one]) != Walk().of([[], []])


def test_a_class_that_shows_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="holds nothing"):
        Walk().of(object())
