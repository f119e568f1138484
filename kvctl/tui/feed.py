"""Asks the source on a thread of its own, at a steady pace, for no more than the view on screen needs.

One reading is under way at a time, and the next is not begun before the last was taken: on a busy machine the tool
falls behind rather than piles up. What the source raises becomes a reading that says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.fleet import Source, Survey
from kvctl.errors import CliError
from kvctl.health.codes import CODES
from kvctl.health.engine import examine
from kvctl.health.mutes import Judged, judge, load_or_warn
from kvctl.health.snapshot import HEALTH_CALLS, Snapshot
from kvctl.tui.readings import Deliver, Place, Question, Reading

# The health codes read much more than any view does. However large the fleet is, they rest this many times as long as
# they took: a thirtieth of a core at most.
_HEALTH_REST = 30
_HEALTH = Question("health", HEALTH_CALLS)
_Orders = Sequence[tuple[str, Call]]


@runtime_checkable
class Recorded(Protocol):
    """A source that remembers moments (wall clock, ns); `moment` is the index of the one that it is turned to."""

    moment: int

    @property
    def moments(self) -> Sequence[int]: ...

    def seek(self, index: int) -> None: ...


@runtime_checkable
class Living(Protocol):
    """A source whose agents can be told things."""

    def ask(self, requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]: ...


class SourceFeed:
    """A feed from a live fleet or from a recording.

    Args:
        source: entered and left on the feed's thread.
        interval_ns: from the start of one reading to that of the next.
    """

    def __init__(self, source: Source, interval_ns: int) -> None:
        self._source = source
        self._interval_ns = interval_ns
        self._thread = threading.Thread(target=self._run, name="kvctl-top-feed", daemon=True)
        self._changed = threading.Condition()
        # What the screen wants; guarded by `_changed`.
        self._question: Question | None = None
        self._orders: list[tuple[_Orders, Callable[[str], None]]] = []
        self._step = 0
        self._paused = self._stopped = self._urgent = False
        self._free = True  # the last reading was taken
        # The thread's own.
        self._due_ns = self._health_due_ns = 0
        self._viewed_last = False
        self._endpoints: dict[str, Endpoint] = {}
        self._health = HealthWatch()

    @property
    def recorded(self) -> bool:
        return isinstance(self._source, Recorded)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._thread.start()

    def want(self, question: Question) -> None:
        with self._changed:
            self._question, self._urgent = question, True
            self._changed.notify()

    def taken(self) -> None:
        with self._changed:
            self._free = True
            self._changed.notify()

    def pause(self, paused: bool) -> None:
        with self._changed:
            self._paused, self._urgent = paused, not paused
            self._changed.notify()

    def seek(self, step: int) -> None:
        with self._changed:
            self._step += step
            self._paused = self._urgent = True
            self._changed.notify()

    def act(self, orders: _Orders, done: Callable[[str], None]) -> None:
        with self._changed:
            self._orders.append((orders, done))
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread, after the answer that it may be waiting for."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with self._source:
            while (question := self._next()) is not None:
                self._read(question)

    def _next(self) -> Question | None:
        """Waits for the moment of the next reading and says of what; None at the end."""
        with self._changed:
            while not self._stopped:
                orders, self._orders = self._orders, []
                for each, done in orders:
                    self._changed.release()
                    try:
                        done(self._carry_out(each))
                    finally:
                        self._changed.acquire()
                    self._urgent = True
                now = time.monotonic_ns()
                health_due = now >= self._health_due_ns
                if self._question is None or not self._free or (self._paused and not self._urgent):
                    self._changed.wait()
                elif self._urgent or (now >= self._due_ns and not (health_due and self._viewed_last)):
                    self._turn()
                    self._urgent, self._free, self._viewed_last = False, False, True
                    self._due_ns = max(self._due_ns + self._interval_ns, now)
                    return self._question
                elif health_due:
                    # Also while readings take longer than the interval, as when an agent hangs: then they take turns.
                    self._free, self._viewed_last = False, False
                    return _HEALTH
                else:
                    self._changed.wait((min(self._due_ns, self._health_due_ns) - now) / 1e9)
        return None

    def _turn(self) -> None:
        """Turns a recording to the moment that is wanted, or plays on by one."""
        before = self._source.moment if isinstance(self._source, Recorded) else 0
        if not self._urgent:
            self._source.advance()
        elif isinstance(self._source, Recorded) and self._step:
            self._source.seek(min(max(before + self._step, 0), len(self._source.moments) - 1))
        self._step = 0
        if isinstance(self._source, Recorded) and self._source.moment != before:
            self._health_due_ns = 0

    def _read(self, question: Question) -> None:
        started = time.thread_time_ns()
        try:
            survey = self._source.survey(question.calls, question.clock_rounds)
            self._endpoints = {agent.name: agent.endpoint for agent in survey.agents}
            judged = self._health.judge(survey) if question is _HEALTH else None
            reading = Reading(question, survey.at_ns, survey, judged=judged, place=self._place())
        except (CliError, OSError) as error:
            reading = Reading(question, time.time_ns(), None, str(error))
        if question is _HEALTH:
            rest = max(self._interval_ns, (time.thread_time_ns() - started) * _HEALTH_REST)
            self._health_due_ns = time.monotonic_ns() + rest
        self._deliver(reading)

    def _place(self) -> Place | None:
        if not isinstance(self._source, Recorded):
            return None
        count = len(self._source.moments)
        return Place(self._source.moment, count, not self._paused and self._source.moment < count - 1)

    def _carry_out(self, orders: _Orders) -> str:
        """What agents answered to being told something, in one line."""
        if not isinstance(self._source, Living):
            return "a recording cannot be told anything"
        gone = [name for name, _ in orders if name not in self._endpoints]
        requests = [(self._endpoints[name], call) for name, call in orders if name in self._endpoints]
        failed = [reply.fault for reply in self._source.ask(requests) if reply.fault is not None]
        troubles = [*(f"{name} is gone" for name in gone), *(f"{each.agent}: {each.message}" for each in failed)]
        done = len(requests) - len(failed)
        text = f"{orders[0][1].command}: done on {done} of {len(orders)} agent{'s' * (len(orders) != 1)}"
        return "; ".join([text, *troubles])


class HealthWatch:
    """Judges one survey of the health calls after the other."""

    def __init__(self) -> None:
        self._before: Snapshot | None = None

    def judge(self, survey: Survey) -> Judged:
        """What is wrong now. A survey from before the last, as of a recording turned back, is compared with none."""
        before = self._before if self._before is None or self._before.taken_ns < survey.tick_ns else None
        found = examine(Snapshot(survey, survey.tick_ns, before), CODES)
        self._before = Snapshot(survey, survey.tick_ns)  # without its own past: that chain would never be freed
        mutes, _ = load_or_warn()  # kvctl health says why they cannot be read
        return judge(found, mutes, survey.at_ns)
