"""The count itself: what it must see, what it must not follow, and that it can fail."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.leaks.census import BOUNDS, census, grown, instances
from kvctl_agent.protocol.decode.rooms import WriterTransfer
from kvctl_agent.protocol.tag import RoomKey

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


def test_history_may_fill_up_to_its_bound_and_no_further() -> None:
    path = "decode-0: telemetry.rooms._ended"
    bound = BOUNDS[r"telemetry\.rooms\._ended"]
    assert grown({}, {path: bound}) == []
    assert grown({}, {path: bound + 1}) == [f"{path}: {bound + 1}, its bound is {bound}"]


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
