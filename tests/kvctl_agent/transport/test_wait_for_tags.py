"""The wait of NIXL's native code for tags, in which the GIL is free."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvctl_agent.runtime.waiting import PolledDescriptors, turns_of_loop
from kvctl_agent.transport import Arrival
from kvctl_agent.transport.base import MAX_TAG_BYTES
from tests.kvctl_agent.transport.conftest import Pair

pytestmark = pytest.mark.parametrize(
    "engine", ["nixl", "nixl+pool num_threads=3,split_batch_size=1"], indirect=True, scope="module"
)

Waiting = Callable[..., tuple[list[int], list[Arrival]] | None]


TURNS = turns_of_loop()
CALLS = TURNS.calls


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def waiting(pair: Pair, pipe: tuple[int, int]) -> Waiting:
    """Waits for tags and for the pipe; returns which descriptors are readable, and the tags; None without a wait."""
    descriptors = PolledDescriptors([pipe[0]])

    def wait(timeout_s: float = 60.0, pause_s: float = 1e-4) -> tuple[list[int], list[Arrival]] | None:
        since_ns = time.monotonic_ns()
        waited = pair.agent.transport.wait_for_tags(descriptors.polled, turns_of_loop(), timeout_s, pause_s)
        if waited is None:
            return None
        assert since_ns < waited.ended_ns < time.monotonic_ns()
        return descriptors.readable(), waited.arrivals

    return wait


def test_it_ends_when_a_tag_has_arrived(pair: Pair, waiting: Waiting) -> None:
    agent, peer = pair
    for tag in (b"\0", secrets.token_bytes(MAX_TAG_BYTES), b"same", b"same"):
        peer.send("tell", peer="writer", tag=tag.hex())
        assert waiting() == ([], [Arrival("peer", tag)])
        peer.answer()
    assert agent.transport.arrivals() == []


def test_a_tag_that_has_arrived_is_found_at_once(pair: Pair, waiting: Waiting, pipe: tuple[int, int]) -> None:
    """Whether descriptors are readable is known then, too: otherwise tags could keep messages waiting for ever."""
    for readable in ([0], []):
        pair.peer.ask("tell", peer="writer", tag=b"early".hex())
        if readable:
            os.write(pipe[1], b"x")
        deadline = time.monotonic() + 30
        found: list[Arrival] = []
        while not found and time.monotonic() < deadline:
            waited = waiting(1e-9, pause_s=60.0)
            assert waited is not None
            assert waited[0] == readable
            found = waited[1]
        assert found == [Arrival("peer", b"early")]
        if readable:
            os.read(pipe[0], 1)


def test_it_ends_when_a_descriptor_is_readable(waiting: Waiting, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    assert waiting(pause_s=60.0) == ([0], [])
    os.read(pipe[0], 1)
    assert waiting(0.01) == ([], [])


def test_it_ends_after_its_time(waiting: Waiting) -> None:
    for timeout_s, pause_s in ((0.02, 60.0), (0.02, 1e-9), (0.02, 0.007)):
        since = time.monotonic()
        assert waiting(timeout_s, pause_s) == ([], [])
        assert time.monotonic() - since >= 0.02


def test_other_threads_run_meanwhile(waiting: Waiting, pipe: tuple[int, int]) -> None:
    """A wait with the GIL would last for its 60 s, because the thread that ends it could not run."""

    def end() -> None:
        time.sleep(0.05)
        os.write(pipe[1], b"x")

    ends = threading.Thread(target=end)
    ends.start()
    since = time.monotonic()
    assert waiting() == ([0], [])
    assert time.monotonic() - since < 30
    ends.join()
    os.read(pipe[0], 1)


def test_what_it_cannot_do_is_left_to_the_caller(pair: Pair, waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags that have been collected already, and abandoned writes that have to be polled."""
    agent, peer = pair
    peer.ask("tell", peer="writer", tag=b"early".hex())
    while not agent.transport._landed:
        agent.transport.progress()
    assert waiting() is None
    assert agent.transport.arrivals() == [Arrival("peer", b"early")]
    monkeypatch.setattr(agent.transport._in_flight, "_draining", [None])
    assert waiting() is None


@pytest.mark.parametrize(
    "arguments",
    [
        (b"", 1, 1, 8, CALLS),
        (bytearray(7), 1, 1, 8, CALLS),
        (bytearray(8), 1, 0, 8, CALLS),
        (bytearray(8), 1, 1, 0, CALLS),
        (bytearray(8), 1, 1, 8, None),
    ],
)
def test_native_code_checks_its_arguments(pair: Pair, waiting: Waiting, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        pair.agent.transport._native.wait(*arguments)
