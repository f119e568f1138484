"""The order of a bench: every load and every path runs its first lot before any runs its second.

Machines drift while a bench runs, so what is compared runs in turns, paths on the same rooms. A lap is one lot of one
load on one path: filled, run, verified.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvctl.bench.failures import FleetError
from kvctl.bench.fleet import Fleet
from kvctl_agent.contract.rig import Plan, Room, RunReport, VerifyReport

# Indices of rooms decide their content; loads are this far apart, so that no two share any.
LOAD_STRIDE = 1 << 24
_HOLD_ROOMS = 4
_HOLD_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Lap:
    """One lot of one load on one path, once."""

    load: int
    lot: int
    repeat: int
    path: str
    rooms: tuple[Room, ...]
    reports: Mapping[str, RunReport]
    verdicts: Mapping[str, VerifyReport] = field(default_factory=dict)


class Course:
    """All laps of a plan, on one fleet."""

    def __init__(self, fleet: Fleet, plan: Plan, verify: str, repeat: int, on_step: Callable[[str], None]) -> None:
        """`on_step` is told what is done next, in a few words."""
        self._fleet = fleet
        self._plan = plan
        self._verify = verify
        self._repeat = repeat
        self._on_step = on_step
        # Rooms of two fleets must not be taken for one by those who watch both.
        self._next_room = (secrets.randbelow(1 << 30) + 1) * plan["room_stride"] << 10

    @property
    def length(self) -> int:
        """Number of laps."""
        return self._repeat * len(self._plan["paths"]) * sum(len(load["lots"]) for load in self._plan["loads"])

    def laps(self) -> Iterator[Lap]:
        """Run them, in order.

        Raises:
            FleetError: a rank died, failed or hung, or a room's pages stay held.
        """
        loads = self._plan["loads"]
        for repeat in range(self._repeat):
            for lot in range(max(len(planned["lots"]) for planned in loads)):
                for load in (load for load, planned in enumerate(loads) if lot < len(planned["lots"])):
                    for path in self._plan["paths"]:
                        yield self._lap(load, lot, repeat, path)

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

    def _lap(self, load: int, lot: int, repeat: int, path: str) -> Lap:
        planned = self._plan["loads"][load]
        first, end = planned["lots"][lot]
        rooms = self._rooms(load, first, end)
        doing = f"{path}, lot {lot + 1} of {len(planned['lots'])}"
        if len(self._plan["loads"]) > 1:
            doing = f"concurrency {planned['concurrency']}, {planned['tokens']} tokens, {doing}"
        lot_number = load << 16 | lot
        self._on_step(f"filling for {doing}")
        self._fleet.prepare(lot_number, path, rooms, poison=True, doing=doing)
        self._on_step(doing)
        reports = self._fleet.run(planned["windows"], rooms, doing)
        held = sorted({index for report in reports.values() for index in report["held"]})
        if held:
            causes = sorted({text for report in reports.values() for _, text in report["failures"]})
            raise FleetError(
                f"{len(held)} rooms still hold pages after {doing}, so a write to them may be in flight and nothing "
                f"can run after it; first causes: {'; '.join(causes[:3]) or 'none given'}"
            )
        verdicts: Mapping[str, VerifyReport] = {}
        if self._verify != "off":
            self._on_step(f"verifying {doing}")
            verdicts = self._fleet.verify(self._verify, rooms, doing)
        return Lap(load, lot, repeat, path, rooms, reports, verdicts)

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
                slot=index - first,
            )
            for index in range(first, end)
        )
