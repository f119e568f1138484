"""The count itself: what it must see, what it must not follow, and that it can fail."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.leaks.census import BOUNDS, census, grown, instances
from benchmarks.leaks.slope import slope, sparkline
from kvctl_agent.protocol.decode.rooms import WriterTransfer
from kvctl_agent.protocol.machine import Tombstones
from kvctl_agent.protocol.tag import RoomKey
from kvctl_agent.telemetry.durations import BusyTime

pytestmark = pytest.mark.sample


def make(name: str, **attributes: Any) -> Any:
    """An object of a class that counts as the agent's own."""
    kind = type(name, (), {"__module__": "kvctl_agent.made", "__init__": lambda self: self.__dict__.update(attributes)})
    return kind()


@pytest.mark.parametrize(
    "container", [{}, [], set(), deque(), SimpleQueue(), bytearray()], ids=lambda container: type(container).__name__
)
def test_a_structure_of_any_kind_and_name_is_counted(container: Any) -> None:
    root = make("Root", inner=[make("Inner", surprise=container)])
    before = census(root)
    assert before["inner[].surprise"] == 0
    add = {dict: lambda: container.update({1: 2}), set: lambda: container.add(1), SimpleQueue: lambda: container.put(1)}
    add.get(type(container), lambda: container.append(1))()
    assert grown(before, census(root)) == ["inner[].surprise: 1 (was 0)"]


def test_slots_are_counted_and_sizes_at_one_path_are_added_up() -> None:
    one, other = Tombstones[bool](1), Tombstones[bool](1)
    one.add(RoomKey("", 1, 1), True, 0)
    other.add(RoomKey("", 2, 1), True, 0)
    other.add(RoomKey("", 3, 1), True, 0)
    spans = BusyTime()
    spans.add(1, 2)
    sizes = census(make("Root", tombstones={"a": one, "b": other}, moved=spans))
    assert sizes["tombstones"] == 2
    assert sizes["tombstones[]._entries"] == 3
    assert sizes["moved._spans"] == 1


def test_what_appears_is_growth_and_what_shrinks_is_not() -> None:
    assert grown({"a": 2, "b": 1}, {"a": 1, "new": 3}) == ["new: 3 (was 0)"]


def test_history_may_fill_up_to_its_bound_and_no_further() -> None:
    path = "decode-0: telemetry.rooms._ended"
    bound = BOUNDS[r"telemetry\.rooms\._ended"]
    assert grown({}, {path: bound}) == []
    assert grown({}, {path: bound + 1}) == [f"{path}: {bound + 1}, its bound is {bound}"]


def test_a_ring_of_references_ends() -> None:
    one, other = make("One", things=[]), make("Other", things=[])
    one.things.append(other)
    other.things.append(one)
    assert census(one) == {"things": 1, "things[].things": 1}


def test_objects_that_only_a_closure_holds_are_counted() -> None:
    kind = "kvctl_agent.protocol.decode.rooms.WriterTransfer"
    before = instances().get(kind, 0)
    hidden = (lambda transfer: lambda: transfer)(WriterTransfer("peer", 1))
    assert instances()[kind] == before + 1
    assert hidden().peer == "peer"


def test_objects_that_are_history_are_not_counted() -> None:
    root = make("Root", telemetry=make("Telemetry", rooms=make("Rooms", _ended=deque(), _active={})))
    kind = "kvctl_agent.protocol.decode.rooms.WriterTransfer"
    before = instances(root).get(kind, 0)
    root.telemetry.rooms._ended.append({RoomKey("", 1, 1): [WriterTransfer("peer", 1)]})
    assert instances(root).get(kind, 0) == before
    root.telemetry.rooms._active[1] = WriterTransfer("peer", 1)
    assert instances(root)[kind] == before + 1


def test_slope_and_its_picture() -> None:
    assert slope([1, 2, 3, 4], [10, 30, 50, 70]) == 20
    assert slope([1, 2, 3], [5, 5, 5]) == 0
    assert slope([1], [5]) == 0
    assert sparkline([0, 7, 14], width=3) == "▁▅█"
    assert sparkline([3, 3]) == "▁▁"
    assert len(sparkline(range(1000))) <= 60
