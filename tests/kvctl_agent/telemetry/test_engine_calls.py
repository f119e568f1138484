"""The stack of an engine's thread that makes no calls, while rooms are open."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from kvctl_agent.telemetry import engine_calls as calls
from kvctl_agent.telemetry.engine_calls import CALLS, SilentEngine
from kvctl_agent.telemetry.region import Cell, Document, Header, MemoryReader, RegionWriter

S = 1_000_000_000


@pytest.fixture
def region() -> RegionWriter:
    return RegionWriter(Header.of_this_process("decode", "decode-0"))


class Engine:
    """A thread that calls once and then waits in `wait_for_the_end`."""

    def __init__(self, region: RegionWriter) -> None:
        self._region, self._end, self._called = region, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self._called.wait(60)

    def _run(self) -> None:
        self._region.note_call(calls.PAGES)
        self.wait_for_the_end()

    def wait_for_the_end(self) -> None:
        self._called.set()
        self._end.wait()

    def end(self) -> None:
        self._end.set()
        self.thread.join()


def sample(region: RegionWriter) -> Any:
    published = MemoryReader(region).document(Document.STACK)
    return None if published is None else {**msgspec.msgpack.decode(published.value), "at_ns": published.at_ns}


def test_names_and_numbers() -> None:
    numbers = {name: getattr(calls, name.upper()) for name in CALLS}
    assert numbers == {name: number for number, name in enumerate(CALLS)}


def test_the_stack_of_the_thread_that_called_last(region: RegionWriter) -> None:
    engine = Engine(region)
    called_ns = region.cells[Cell.CALL_NS]
    silent = SilentEngine(region)
    silent.look(called_ns + S - 1, 1)
    assert sample(region) is None
    assert region.cells[Cell.CALL_TASK] == engine.thread.native_id
    silent.look(called_ns + S, 1)
    found = sample(region)
    assert (found["call_ns"], found["task"], found["at_ns"]) == (called_ns, engine.thread.native_id, called_ns + S)
    assert 4 <= len(found["frames"]) <= 8
    assert found["frames"][-1].startswith("python3")
    assert any(
        "test_engine_calls.py:" in frame and frame.endswith("Engine.wait_for_the_end") for frame in found["frames"]
    )
    engine.end()
    silent.look(called_ns + 3 * S, 1)
    assert sample(region)["frames"] == []


def test_once_a_second(region: RegionWriter) -> None:
    engine, silent = Engine(region), SilentEngine(region)
    called_ns = region.cells[Cell.CALL_NS]
    for tenths in range(10, 41):
        silent.look(called_ns + tenths * S // 10, 2)
    assert region.cells[Cell.PUBLISHED + Document.STACK] == 4
    engine.end()


def test_not_without_rooms_or_while_the_engine_calls(region: RegionWriter) -> None:
    silent = SilentEngine(region)
    silent.look(time.monotonic_ns(), 3)  # it has not called yet
    region.note_call(calls.SEND)
    silent.look(region.cells[Cell.CALL_NS] + 60 * S, 0)
    for _ in range(3):
        region.note_call(calls.POLL)
        silent.look(region.cells[Cell.CALL_NS] + S // 2, 3)
    assert sample(region) is None


def test_a_wait_counts_from_its_end(region: RegionWriter) -> None:
    silent = SilentEngine(region)
    with region.call(calls.WAIT):
        region.cells[Cell.CALL_NS] -= 60 * S
    silent.look(region.cells[Cell.CALL_ENDED_NS] + S // 2, 1)
    assert sample(region) is None
