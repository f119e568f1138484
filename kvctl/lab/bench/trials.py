"""The order of a bench: every case runs its first lot before any runs its second.

Machines drift while a bench runs, so what is compared runs in turns, on the same rooms. A lap is one lot of one case:
filled, run, verified.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.lab.bench.case import Case
from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.bench.time_budget import TimeBudget
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.messages import Room, RunReport, VerifyReport
from kvctl.lab.ranks.plan import Plan

# Indices of rooms decide their content; loads are this far apart, so that no two share any.
LOAD_STRIDE = 1 << 24
# Rooms before the end of a lap of which agents still have all events.
_REMEMBERED = 32
_HOLD_ROOMS = 4
_HOLD_PAUSE_S = 0.5
# The first room over a path meets kernels that are not compiled and lanes that are not open: only the second one tells.
_TRIALS = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """One lot of one case, once; `shown` is the index of the room whose parts the reports list."""

    case: Case
    lot: int
    repeat: int
    rooms: tuple[Room, ...]
    reports: Mapping[str, RunReport]
    verdicts: Mapping[str, VerifyReport] = field(default_factory=dict)
    shown: int = -1


def _identity(load: int, lot: int, part: int) -> int:
    """Number of a lot that no other has; `part`: of its first so many rooms, 0 of all. Other rooms, other pages."""
    return part << 48 | load << 16 | lot


class TrialRunner:
    """Runs laps of a plan on one fleet."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        verify: str,
        decode_ms: float,
        on_step: Callable[[str], None],
        watch: Callable[[bool], None] = lambda wanted: None,
        point_s: float | None = None,
    ) -> None:
        """
        Args:
            on_step: told what is done next, in a few words.
            watch: told whether people are to watch from now on.
            point_s: seconds that one case may run for, each time; None: until all its rooms have run.
        """
        self._pace = TimeBudget(point_s)
        self._watch = watch
        self._fleet = fleet
        self._plan = plan
        self._verify = verify
        self._decode_ms = decode_ms
        self._on_step = on_step
        # Rooms of two fleets must not be taken for one by those who watch both.
        self._next_room = (secrets.randbelow(1 << 30) + 1) * plan["room_stride"] << 10

    def laps(self, cases: Sequence[Case], repeat: int) -> Iterator[Trial]:
        """Run them, in turns.

        Raises:
            FleetError: a rank died, failed or hung, or a room's pages stay held.
        """
        lots = {case: len(self._plan["loads"][case.load]["lots"]) for case in cases}
        for again in range(repeat):
            for lot in range(max(lots.values(), default=0)):
                for case in (case for case in cases if lot < lots[case]):
                    first, end = self._plan["loads"][case.load]["lots"][lot]
                    planned = self._plan["loads"][case.load]["rooms"][first:end]
                    if self._pace.unknown(case):
                        self._try(case, lot)
                    count = self._pace.rooms(case, again, planned)
                    if count:
                        yield self._lap(case, lot, again, count)

    def hold(self) -> None:
        """Light traffic over a few rooms of the first lot, until interrupted.

        Raises:
            FleetError: as `laps`.
        """
        path = self._plan["paths"][-1]
        first, end = self._plan["loads"][0]["lots"][0]
        windows = self._plan["loads"][0]["windows"]
        while True:
            rooms = self._rooms(0, first, min(end, first + _HOLD_ROOMS))
            self._fleet.prepare(0, path, rooms, poison=False, doing="hold")
            self._fleet.run(windows, rooms, "hold")
            self._fleet.idle(_HOLD_PAUSE_S)

    def _try(self, case: Case, lot: int) -> None:
        """See how fast a path is, with the first room of a lot."""
        planned = self._plan["loads"][case.load]
        first = planned["lots"][lot][0]
        doing = f"trying {case.path}"
        self._on_step(doing)
        for _ in range(_TRIALS):
            rooms = self._rooms(case.load, first, first + 1)
            self._fleet.prepare(
                _identity(case.load, lot, 1), case.path, rooms, poison=False, doing=doing, pipeline=case.pipeline
            )
            started = time.monotonic()
            self._check(self._fleet.run(planned["windows"], rooms, doing, case.layer_ms, self._decode_ms), doing)
            self._pace.tried(case, planned["rooms"][first : first + 1], time.monotonic() - started)

    def _lap(self, case: Case, lot: int, repeat: int, count: int) -> Trial:
        """The first `count` rooms of a lot."""
        planned = self._plan["loads"][case.load]
        first, end = planned["lots"][lot]
        rooms = self._rooms(case.load, first, first + count)
        doing = self._words(case, lot)
        number = _identity(case.load, lot, count if count < end - first else 0)
        self._on_step(f"filling for {doing}")
        self._fleet.prepare(number, case.path, rooms, poison=True, doing=doing, pipeline=case.pipeline)
        self._on_step(doing)
        # Neither the first room, which warms things up, nor the last, which has no company; agents forget early ones.
        shown = rooms[max(len(rooms) // 2, len(rooms) - _REMEMBERED)].index
        self._watch(case.observed)
        started = time.monotonic()
        reports = self._fleet.run(planned["windows"], rooms, doing, case.layer_ms, self._decode_ms, shown)
        self._pace.ran(case, repeat, planned["rooms"][first : first + count], time.monotonic() - started)
        self._check(reports, doing)
        verdicts: Mapping[str, VerifyReport] = {}
        if self._verify != "off":
            self._on_step(f"verifying {doing}")
            verdicts = self._fleet.verify(self._verify, rooms, doing)
        return Trial(case, lot, repeat, rooms, reports, verdicts, shown)

    def _check(self, reports: Mapping[str, RunReport], doing: str) -> None:
        held = sorted({index for report in reports.values() for index in report["held"]})
        if held:
            causes = sorted({text for report in reports.values() for _, text in report["failures"]})
            raise FleetError(
                f"{len(held)} rooms still hold pages after {doing}, so a write to them may be in flight and nothing "
                f"can run after it; first causes: {'; '.join(causes[:3]) or 'none given'}"
            )

    def _words(self, case: Case, lot: int) -> str:
        """What a lap is called while it runs and where it fails."""
        planned = self._plan["loads"][case.load]
        watched = ["watched"] if case.observed else []
        words = [*watched, f"lot {lot + 1} of {len(planned['lots'])}"]
        if len(self._plan["pipelines"]) > 1:
            words.insert(0, f"pipeline {case.pipeline}")
        words.insert(0, case.path)
        if len(self._plan["loads"]) > 1:
            words = [f"concurrency {planned['concurrency']}", f"{planned['tokens']} tokens", *words]
        return ", ".join(words)

    def _rooms(self, load: int, first: int, end: int) -> tuple[Room, ...]:
        """Rooms [first, end) of a load under numbers that were never used before."""
        base = self._next_room
        self._next_room += self._plan["room_stride"]
        planned = self._plan["loads"][load]["rooms"]
        return tuple(
            Room(
                index=load * LOAD_STRIDE + index,
                number=base + index - first,
                tokens=planned[index]["tokens"],
                prefix_tokens=planned[index]["prefix_tokens"],
                decode_dp=planned[index]["decode_dp"],
                instance=planned[index]["instance"],
                arrival_ms=planned[index]["arrival_ms"],
                output_tokens=planned[index]["output_tokens"],
                session=planned[index]["session"],
            )
            for index in range(first, end)
        )
