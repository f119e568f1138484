"""Runs trials: a trial fills, transfers and verifies one batch of rooms for one case.

A batch is a set of a load's rooms that fits in memory at once. Every case runs its first batch before any case runs its
second, so that drift of the machine affects all compared cases alike, and all of them run the same rooms. Such a round
is the unit of the spread; every other one runs the cases in reverse order, because a case profits or suffers from the
one before it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.ranks.busy_loop import LoopTimes
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.messages import Prepare, Room, Run, RunReport, VerifyReport, planned_room
from kvctl.lab.ranks.plan import Plan, PlannedRoom

LOAD_STRIDE = 1 << 24
"""Distance between the first room indices of two loads. An index determines a room's content, so loads share none."""

# At the end of a trial, agents still have all events of about this many rooms.
_EVENTS_KEPT_ROOMS = 32
_IDLE_LOOP_S = 0.5
# The first room on a path waits for kernels to compile and connections to open, so only the second one is timed.
_SPEED_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one path with one pipeline setting: the unit that the bench compares.

    Attributes:
        busy_engine: ranks whose engine is busy between its calls, one of `BUSY_ENGINES`.
    """

    load: int
    path: str
    pipeline: str = "off"
    layer_ms: float = 0.0
    busy_engine: str = "off"


@dataclass(frozen=True, slots=True)
class Program:
    """Runs all cases of a plan in turns, `repeat` times each, so that machine drift does not look like a difference."""

    layer_ms: float
    repeat: int
    busy_engines: tuple[str, ...] = ("off",)

    def cases(self, plan: Plan) -> list[Case]:
        """Returns the cases in the order of loads, paths, pipeline settings and busy engines."""
        return [
            Case(load, path, pipeline, self.layer_ms, busy)
            for load in range(len(plan["loads"]))
            for path in plan["paths"]
            for pipeline in plan["pipelines"]
            for busy in self.busy_engines
        ]

    def trials(self, plan: Plan) -> int:
        """Returns the number of trials: one per case, batch and repeat."""
        return self.repeat * sum(len(plan["loads"][case.load]["batches"]) for case in self.cases(plan))


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one batch of a case.

    Attributes:
        verdicts: report of each decode rank on the verification, by rank name; empty if nothing was verified.
        idle_loops: speed of the engine's loop before and after the run, of each rank with a busy engine.
    """

    case: Case
    batch: int
    repeat: int
    rooms: tuple[Room, ...]
    reports: Mapping[str, RunReport]
    verdicts: Mapping[str, VerifyReport] = field(default_factory=dict)
    idle_loops: Sequence[Mapping[str, LoopTimes]] = ()


class TimeBudget:
    """Limits how many rooms of a batch a case runs, so that each case takes about `point_s` seconds per repeat.

    Paths differ in speed by factors of up to a hundred. On a slow path only the first rooms of each batch run, as many
    as its measured speed predicts to fit; a running batch is never interrupted.

    Args:
        point_s: Time limit of one case and repeat in seconds; None for no limit.
    """

    def __init__(self, point_s: float | None) -> None:
        self._point_s = point_s
        self._s_per_token: dict[tuple[str, str], float] = {}
        self._used_s: dict[tuple[Case, int], float] = {}

    def unknown(self, case: Case) -> bool:
        """Returns whether the speed of the case's path has to be measured before `rooms` can be called."""
        return self._point_s is not None and (case.path, case.pipeline) not in self._s_per_token

    def rooms(self, case: Case, repeat: int, batch: Sequence[PlannedRoom]) -> int:
        """Returns how many rooms of a batch fit into the case's remaining time; at least 1 for its first batch."""
        if self._point_s is None:
            return len(batch)
        used = self._used_s.get((case, repeat))
        s_per_token = self._s_per_token[case.path, case.pipeline]
        left = self._point_s - (used or 0.0)
        fitting = 0
        for room in batch:
            left -= room["tokens"] * s_per_token
            if left < 0:
                break
            fitting += 1
        return max(fitting, used is None)

    def ran(self, case: Case, repeat: int, rooms: Sequence[PlannedRoom], seconds: float) -> None:
        """Records the time that rooms of a trial took, which counts against the case's time limit."""
        self.measured(case, rooms, seconds)
        self._used_s[case, repeat] = self._used_s.get((case, repeat), 0.0) + seconds

    def measured(self, case: Case, rooms: Sequence[PlannedRoom], seconds: float) -> None:
        """Records the speed of a case's path without using up its time limit."""
        self._s_per_token[case.path, case.pipeline] = seconds / max(1, sum(room["tokens"] for room in rooms))


class TrialRunner:
    """Runs trials of a plan on one fleet.

    Args:
        on_step: Called with a short description of the next step.
        point_s: Time limit of one case and repeat, as in `TimeBudget`; None for no limit.
    """

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        verify: str,
        decode_ms: float,
        on_step: Callable[[str], None],
        point_s: float | None = None,
    ) -> None:
        self._budget = TimeBudget(point_s)
        self._fleet = fleet
        self._plan = plan
        self._verify = verify
        self._decode_ms = decode_ms
        self._on_step = on_step
        # Random, so that kvctl, if it observes two fleets, does not join rooms of both under one number.
        self._next_room = (secrets.randbelow(1 << 30) + 1) * plan["room_stride"] << 10

    def trials(self, cases: Sequence[Case], repeat: int) -> Iterator[Trial]:
        """Runs all batches of the cases in turns, `repeat` times.

        Raises:
            FleetError: A rank died, failed or hung, or the pages of a room may still be written to.
        """
        batches = {case: len(self._plan["loads"][case.load]["batches"]) for case in cases}
        for again in range(repeat):
            for batch in range(max(batches.values(), default=0)):
                in_turn = cases if (again + batch) % 2 == 0 else cases[::-1]
                for case in (case for case in in_turn if batch < batches[case]):
                    first, end = self._plan["loads"][case.load]["batches"][batch]
                    planned = self._plan["loads"][case.load]["rooms"][first:end]
                    if self._budget.unknown(case):
                        self._measure_speed(case, batch)
                    count = self._budget.rooms(case, again, planned)
                    if count:
                        yield self._trial(case, batch, again, count)

    def _measure_speed(self, case: Case, batch: int) -> None:
        """Measures the speed of a case's path with the first room of a batch, for the time budget."""
        planned = self._plan["loads"][case.load]
        first = planned["batches"][batch][0]
        doing = f"trying {case.path}"
        self._on_step(doing)
        for _ in range(_SPEED_ROUNDS):
            rooms = self._rooms(case.load, first, first + 1)
            number = _batch_id(case.load, batch, 1)
            self._fleet.prepare(Prepare(number, case.path, rooms, poison=False, pipeline=case.pipeline), doing)
            started = time.monotonic()
            reports = self._fleet.run(self._run(case), rooms, doing)
            _check_released(reports, doing)
            self._budget.measured(case, planned["rooms"][first : first + 1], time.monotonic() - started)

    def _trial(self, case: Case, batch: int, repeat: int, count: int) -> Trial:
        """Runs one trial with the first `count` rooms of a batch."""
        planned = self._plan["loads"][case.load]
        first, end = planned["batches"][batch]
        rooms = self._rooms(case.load, first, first + count)
        doing = self._description(case, batch)
        number = _batch_id(case.load, batch, count if count < end - first else 0)
        self._on_step(f"filling for {doing}")
        self._fleet.prepare(Prepare(number, case.path, rooms, pipeline=case.pipeline), doing)
        self._on_step(doing)
        # The first room warms up and the last one runs alone; agents no longer have the events of early rooms.
        shown = rooms[max(len(rooms) // 2, len(rooms) - _EVENTS_KEPT_ROOMS)].index
        idle_loops = [self._fleet.measure_loop(case.busy_engine, _IDLE_LOOP_S)]
        started = time.monotonic()
        reports = self._fleet.run(self._run(case, shown), rooms, doing, case.busy_engine)
        seconds = time.monotonic() - started
        idle_loops.append(self._fleet.measure_loop(case.busy_engine, _IDLE_LOOP_S))
        self._budget.ran(case, repeat, planned["rooms"][first : first + count], seconds)
        _check_released(reports, doing)
        verdicts: Mapping[str, VerifyReport] = {}
        if self._verify != "off":
            self._on_step(f"verifying {doing}")
            verdicts = self._fleet.verify(self._verify, rooms, doing)
        return Trial(case, batch, repeat, rooms, reports, verdicts, idle_loops)

    def _run(self, case: Case, show: int = -1) -> Run:
        windows = tuple(self._plan["loads"][case.load]["windows"])
        return Run(windows, layer_ms=case.layer_ms, decode_ms=self._decode_ms, show=show)

    def _description(self, case: Case, batch: int) -> str:
        """Returns a description of a trial for the progress display and for error messages."""
        planned = self._plan["loads"][case.load]
        busy = [f"busy engine {case.busy_engine}"] if case.busy_engine != "off" else []
        words = [*busy, f"batch {batch + 1} of {len(planned['batches'])}"]
        if len(self._plan["pipelines"]) > 1:
            words.insert(0, f"pipeline {case.pipeline}")
        words.insert(0, case.path)
        if len(self._plan["loads"]) > 1:
            words = [f"concurrency {planned['concurrency']}", f"{planned['tokens']} tokens", *words]
        return ", ".join(words)

    def _rooms(self, load: int, first: int, end: int) -> tuple[Room, ...]:
        """Creates rooms [first, end) of a load with bootstrap_room numbers that were not used before."""
        base = self._next_room
        self._next_room += self._plan["room_stride"]
        planned = self._plan["loads"][load]["rooms"]
        return tuple(
            planned_room(planned[index], load * LOAD_STRIDE + index, base + index - first)
            for index in range(first, end)
        )


def _batch_id(load: int, batch: int, count: int) -> int:
    """Returns a unique number for the first `count` rooms of a batch; a `count` of 0 stands for all rooms.

    Prefill ranks refill their pages when the number changes, because a different set of rooms uses different pages.
    """
    return count << 48 | load << 16 | batch


def _check_released(reports: Mapping[str, RunReport], doing: str) -> None:
    held = sorted({index for report in reports.values() for index in report["held"]})
    if held:
        causes = sorted({text for report in reports.values() for _, text in report["failures"]})
        raise FleetError(
            f"{len(held)} rooms still hold pages after {doing}: writes to them may be in flight, so nothing more can "
            f"run; first causes: {'; '.join(causes[:3]) or 'none reported'}"
        )
