"""How much of a load a path runs where each point of a sweep may take only so long.

Paths differ by factors of a hundred: what moves a thousand rooms in a second on one would take minutes on another. The
slow one then runs the first of the same rooms, as many as it is expected to manage; nothing that runs is cut short.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.lab.bench.case import Case
from kvctl.lab.ranks.plan import PlannedRoom


class TimeBudget:
    """What each path takes per token, as last seen, and what each case has used of its time."""

    def __init__(self, point_s: float | None) -> None:
        """`point_s`: seconds of one case and repeat; None: as long as it takes."""
        self._point_s = point_s
        self._per_token: dict[tuple[str, str], float] = {}
        self._used: dict[tuple[Case, int], float] = {}

    def unknown(self, case: Case) -> bool:
        """Whether it must be tried how fast this path is before anything can be told."""
        return self._point_s is not None and (case.path, case.pipeline) not in self._per_token

    def rooms(self, case: Case, repeat: int, lot: Sequence[PlannedRoom]) -> int:
        """How many rooms of a lot fit into what is left of the time: one at least of a case's first lot."""
        if self._point_s is None:
            return len(lot)
        used = self._used.get((case, repeat))
        per_token = self._per_token[case.path, case.pipeline]
        left = self._point_s - (used or 0.0)
        fitting = 0
        for room in lot:
            left -= room["tokens"] * per_token
            if left < 0:
                break
            fitting += 1
        return max(fitting, used is None)

    def ran(self, case: Case, repeat: int, lot: Sequence[PlannedRoom], seconds: float) -> None:
        """Rooms of a lot took so long."""
        self.tried(case, lot, seconds)
        self._used[case, repeat] = self._used.get((case, repeat), 0.0) + seconds

    def tried(self, case: Case, lot: Sequence[PlannedRoom], seconds: float) -> None:
        """The same of rooms that count for no case."""
        self._per_token[case.path, case.pipeline] = seconds / max(1, sum(room["tokens"] for room in lot))
