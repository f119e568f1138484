"""Reads from the fleet, on a separate thread and at a fixed interval, the data that the view on screen needs.

Only one reading is in progress at a time, and the next one begins after the app has shown the previous one. On a busy
machine the display is therefore updated less often, but readings are not queued. An error of the source becomes a
reading with a problem.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvctl.client.calls import Call
from kvctl.client.fleet import Source, Survey
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.errors import CliError
from kvctl.health.engine import HealthWatch
from kvctl.health.finding import Finding

# The health codes need much more data than any view. The pause after a reading for them is this many times the CPU time
# of the reading, so that they use at most a hundredth of a core and the agents' answers little more, but at most half a
# minute, so that the findings of a very large fleet are not too old.
_HEALTH_REST = 100
_LONGEST_HEALTH_REST_NS = 30_000_000_000
_END_S = 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """The calls that read the data of a view.

    Attributes:
        clock_rounds: round trips to each agent for measuring the offset of its clock.
        subject: object that the view shows, such as a room number; distinguishes questions of one view.
    """

    view: str
    calls: tuple[Call, ...]
    clock_rounds: int = 1
    subject: str = ""


@dataclass(frozen=True, slots=True)
class RecordingPosition:
    """Position of a reading in a recording; `index` counts from 0."""

    index: int
    count: int
    playing: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """The agents' answers to one question.

    Attributes:
        at_ns: wall-clock time of the reading; for a recording, the recorded time.
        survey: the answers; None if the source could not be read, and `problem` is the reason.
        findings: findings of the health codes; None unless this is a reading for the health codes.
    """

    question: Question
    at_ns: int
    survey: Survey | None
    problem: str = ""
    findings: Sequence[Finding] | None = None
    position: RecordingPosition | None = None


Deliver = Callable[[Reading], None]
_HEALTH = Question("health", HEALTH_CALLS)


@runtime_checkable
class RecordedSource(Protocol):
    """A source of recorded surveys: `moments` has their wall-clock times in ns, `moment` is the current index."""

    moment: int

    @property
    def moments(self) -> Sequence[int]: ...

    def seek(self, index: int) -> None: ...


class Feed:
    """The thread that reads a live fleet or a recording, as the app controls it.

    Args:
        source: the fleet or recording to read; the feed's thread enters and exits it as a context manager.
        interval_ns: time from the start of one reading to the start of the next.
    """

    def __init__(self, source: Source, interval_ns: int) -> None:
        self._source = source
        self._interval_ns = interval_ns
        self._thread = threading.Thread(target=self._run, name="kvctl-top-feed", daemon=True)
        self._changed = threading.Condition()
        # Requests of the app; guarded by `_changed`.
        self._question: Question | None = None
        self._step = 0
        self._paused = self._stopped = self._urgent = False
        self._acknowledged = True
        # State of the feed's thread, which no other thread uses.
        self._due_ns = self._health_due_ns = 0
        self._viewed_last = False
        self._health = HealthWatch()

    @property
    def recorded(self) -> bool:
        """Whether readings come from a file instead of live agents."""
        return isinstance(self._source, RecordedSource)

    def start(self, deliver: Deliver) -> None:
        """Starts the thread, which calls `deliver` with each reading."""
        self._deliver = deliver
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Changes the question and reads its answers at once, even while paused."""
        with self._change():
            self._question, self._urgent = question, True

    def acknowledge(self) -> None:
        """Permits the next reading; the app calls this after it has shown the previous reading."""
        with self._change():
            self._acknowledged = True

    def pause(self, paused: bool) -> None:
        """Pauses the readings, or resumes them if `paused` is False."""
        with self._change():
            self._paused, self._urgent = paused, not paused

    def seek(self, step: int) -> None:
        """Moves a recording by `step` recorded surveys, backwards if negative, and pauses it."""
        with self._change():
            self._step += step
            self._paused = self._urgent = True

    def stop(self) -> None:
        """Ends the thread and waits for it, but at most a second for a reading in progress, whose result is dropped."""
        with self._change():
            self._stopped = True
        if self._thread.is_alive():
            self._thread.join(_END_S)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Lets the app change its requests, and wakes the thread."""
        with self._changed:
            yield
            self._changed.notify()

    def _run(self) -> None:
        with self._source:
            while (question := self._next()) is not None:
                self._read(question)

    def _next(self) -> Question | None:
        """Waits until a question is due and returns it; returns None after `stop`."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic_ns()
                health_due = now >= self._health_due_ns
                if self._question is None or not self._acknowledged or (self._paused and not self._urgent):
                    self._changed.wait()
                elif self._urgent or (now >= self._due_ns and not (health_due and self._viewed_last)):
                    self._move_recording()
                    self._due_ns = max((now if self._urgent else self._due_ns) + self._interval_ns, now)
                    self._urgent, self._acknowledged, self._viewed_last = False, False, True
                    return self._question
                elif health_due:
                    # Readings for the view and for health alternate if they take longer than the interval, for example
                    # while an agent hangs.
                    self._acknowledged, self._viewed_last = False, False
                    return _HEALTH
                else:
                    self._changed.wait((min(self._due_ns, self._health_due_ns) - now) / 1e9)
        return None

    def _move_recording(self) -> None:
        """Advances the source by one survey, or moves a recording to the position requested with `seek`."""
        before = self._source.moment if isinstance(self._source, RecordedSource) else 0
        if not self._urgent:
            self._source.advance()
        elif isinstance(self._source, RecordedSource) and self._step:
            self._source.seek(min(max(before + self._step, 0), len(self._source.moments) - 1))
        self._step = 0
        if isinstance(self._source, RecordedSource) and self._source.moment != before:
            self._health_due_ns = 0

    def _read(self, question: Question) -> None:
        started = time.thread_time_ns()
        try:
            survey = self._source.survey(question.calls, question.clock_rounds)
            findings = self._health(survey).findings if question is _HEALTH else None
            reading = Reading(question, survey.at_ns, survey, findings=findings, position=self._position())
        except (CliError, OSError) as error:
            reading = Reading(question, time.time_ns(), None, str(error))
        if question is _HEALTH:
            rest = min((time.thread_time_ns() - started) * _HEALTH_REST, _LONGEST_HEALTH_REST_NS)
            rest = max(self._interval_ns, rest)
            self._health_due_ns = time.monotonic_ns() + rest
        if not self._stopped:
            self._deliver(reading)

    def _position(self) -> RecordingPosition | None:
        if not isinstance(self._source, RecordedSource):
            return None
        count = len(self._source.moments)
        playing = not self._paused and self._source.moment < count - 1
        return RecordingPosition(self._source.moment, count, playing)
