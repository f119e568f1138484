"""The feed: order and time of readings, waiting for the app, failing sources."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.calls import Call
from kvctl.client.endpoints import Discovery
from kvctl.client.fleet import Survey
from kvctl.errors import CliError
from kvctl.tui.feed import Feed, Question, Reading

MS = 1_000_000
PATIENCE_S = 20.0
ROOMS = Question("rooms", (Call("status"), Call("rooms", {"limit": 20})))
PEERS = Question("peers", (Call("peers"),))


class FakeSource:
    """A source that stores the calls it gets."""

    def __init__(self) -> None:
        self.asked: queue.Queue[Sequence[Call]] = queue.Queue()
        self.trouble: Exception | None = None
        self.entered = self.left = False

    def __enter__(self) -> FakeSource:
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        self.asked.put(calls)
        if self.trouble is not None:
            raise self.trouble
        return Survey(Discovery(Path("/run/kvctl")))

    def advance(self) -> bool:
        return True


class FakeRecording(FakeSource):
    """A recording with three moments."""

    moments = (100, 200, 300)
    moment = 0

    def seek(self, index: int) -> None:
        self.moment = index

    def advance(self) -> bool:
        last = self.moment == len(self.moments) - 1
        self.moment += not last
        return not last

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        super().survey(calls, clock_rounds)
        return Survey(Discovery(Path("/run/kvctl")), at_ns=self.moments[self.moment])


class Run:
    """A feed and the readings it delivers."""

    def __init__(self, source: FakeSource, interval_ns: int) -> None:
        self.source = source
        self.feed = Feed(source, interval_ns)  # type: ignore[arg-type]
        self._readings: queue.Queue[Reading] = queue.Queue()
        self.feed.start(self._readings.put)

    def next(self, view: str | None = None) -> Reading:
        """Returns the next reading, which must be of that view, and acknowledge it."""
        while True:
            reading = self._readings.get(timeout=PATIENCE_S)
            self.feed.acknowledge()
            if view in {None, reading.question.view}:
                return reading

    def untaken(self) -> Reading:
        return self._readings.get(timeout=PATIENCE_S)

    def idle(self) -> bool:
        return self._readings.empty()


@pytest.fixture
def run() -> Iterator[Any]:
    runs: list[Run] = []

    def make(source: FakeSource, interval_ns: int = 20 * MS) -> Run:
        runs.append(Run(source, interval_ns))
        return runs[-1]

    yield make
    for each in runs:
        each.feed.stop()
        assert each.source.entered == each.source.left


def test_nothing_is_asked_before_a_view_wants_something(run: Any) -> None:
    started = run(FakeSource())
    assert started.source.asked.empty()
    started.feed.ask(ROOMS)
    assert started.source.asked.get(timeout=PATIENCE_S) == ROOMS.calls


def test_a_reading_that_takes_long_does_not_delay_the_end(run: Any) -> None:
    source, released = FakeSource(), threading.Event()
    survey = source.survey

    def slow(calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        found = survey(calls, clock_rounds)
        released.wait(PATIENCE_S)
        return found

    source.survey = slow  # type: ignore[method-assign]
    started = run(source)
    started.feed.ask(ROOMS)
    source.asked.get(timeout=PATIENCE_S)
    begun = time.monotonic()
    started.feed.stop()
    assert 0.5 < time.monotonic() - begun < PATIENCE_S / 2
    assert not source.left
    released.set()
    started.feed.stop()
    assert source.left
    assert started.idle()


def test_a_view_is_read_again_and_again_and_health_between(run: Any) -> None:
    started = run(FakeSource())
    started.feed.ask(ROOMS)
    views = [started.next().question.view for _ in range(6)]
    assert views[0] == "rooms"
    assert views.count("rooms") >= 3
    assert "health" in views


def test_the_first_readings_of_a_view_are_an_interval_apart(run: Any) -> None:
    started = run(FakeSource(), interval_ns=200 * MS)
    begun = time.monotonic()
    started.feed.ask(ROOMS)
    for _ in range(2):
        started.next("rooms")
    assert time.monotonic() - begun >= 0.2


def test_health_takes_turns_with_a_view_that_is_always_late(run: Any) -> None:
    started = run(FakeSource(), interval_ns=1)
    started.feed.ask(ROOMS)
    views = {started.next().question.view for _ in range(4)}
    assert views == {"rooms", "health"}


def test_another_view_is_read_at_once(run: Any) -> None:
    started = run(FakeSource(), interval_ns=3600 * 1_000 * MS)
    started.feed.ask(ROOMS)
    started.next("rooms")
    started.feed.ask(PEERS)
    assert started.next("peers").question == PEERS


def test_the_next_reading_waits_until_the_last_was_taken(run: Any) -> None:
    started = run(FakeSource(), interval_ns=1)
    started.feed.ask(ROOMS)
    started.untaken()
    asked = started.source.asked.qsize()
    threading.Event().wait(0.05)
    assert (started.source.asked.qsize(), started.idle()) == (asked, True)
    started.feed.acknowledge()
    started.untaken()


def test_while_paused_only_a_new_view_is_read(run: Any) -> None:
    started = run(FakeSource(), interval_ns=1)
    started.feed.pause(True)
    started.feed.ask(ROOMS)
    started.next("rooms")
    asked = started.source.asked.qsize()
    threading.Event().wait(0.05)
    assert started.source.asked.qsize() == asked
    started.feed.pause(False)
    started.next()


@pytest.mark.parametrize("trouble", [CliError("/run/kvctl belongs to another user"), OSError("gone")])
def test_what_the_source_raises_is_a_reading(trouble: Exception, run: Any) -> None:
    source = FakeSource()
    source.trouble = trouble
    started = run(source)
    started.feed.ask(ROOMS)
    reading = started.next("rooms")
    assert (reading.survey, reading.problem) == (None, str(trouble))
    source.trouble = None
    while started.next("rooms").survey is None:
        pass


def test_a_recording_plays_on_is_turned_and_stays_at_its_ends(run: Any) -> None:
    started = run(FakeRecording(), interval_ns=5 * MS)
    assert started.feed.recorded
    started.feed.ask(ROOMS)
    places = [started.next("rooms").position for _ in range(4)]
    assert [place.index for place in places] == [0, 1, 2, 2]
    assert [place.playing for place in places] == [True, True, False, False]
    started.feed.seek(-1)
    while (reading := started.next("rooms")).position.index != 1:
        pass
    assert (reading.at_ns, reading.position.playing) == (200, False)
    started.feed.seek(-7)
    while (reading := started.next("rooms")).position.index != 0:
        pass


def test_findings_come_with_the_health_readings(run: Any) -> None:
    started = run(FakeSource())
    started.feed.ask(ROOMS)
    assert started.next("health").findings is not None
    assert started.next("rooms").findings is None
