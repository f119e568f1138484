"""Fleets being measured: each from its start to its floors, and several of them in turns.

What cannot stand side by side in one fleet (transports, CP modes, layouts) runs on fleets of its own that are alive at
the same time; they take turns lap by lap, so that a machine that drifts drifts for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvctl.lab.bench import roofline
from kvctl.lab.bench.case import length
from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.bench.observers import Observers
from kvctl.lab.bench.program import Program
from kvctl.lab.bench.progress import Steps
from kvctl.lab.bench.results import Results
from kvctl.lab.bench.trials import Trial, TrialRunner
from kvctl.lab.ranks.messages import Gpu
from kvctl.lab.ranks.plan import Plan


class Session:
    """One fleet; `results` holds what has been measured on it so far, however it ends."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        program: Program,
        verify: str,
        decode_ms: float,
        label: str,
        steps: Steps,
        point_s: float | None = None,
    ) -> None:
        """`label` names the fleet where there are several, else ""; `point_s` is that of `TrialRunner`."""
        self.results = Results(plan, fleet.names, verify)
        self.program = program
        self.label = label
        self.fleet = fleet
        self._plan = plan
        self._steps = steps
        self._watchers = Observers(list(fleet.names))
        self._course = TrialRunner(fleet, plan, verify, decode_ms, self._step, self._watchers.watch, point_s)

    def start(self) -> None:
        """Start the fleet.

        Raises:
            FleetError: a rank did not come up.
        """
        self._step(f"starting {self.fleet.size} ranks")
        self.results.ready = self.fleet.start()

    def laps(self) -> Iterator[Trial]:
        """Run the program, lap by lap; each is in the results before it is handed out.

        Raises:
            FleetError: a rank died, failed or hung.
        """
        try:
            for stage in self.program.stages(self._plan, self.results.latency_ms):
                for lap in self._course.laps(stage.cases, stage.repeat):
                    self.results.add(lap)
                    yield lap
        finally:
            self._watchers.close()

    def floors(self) -> None:
        """Measure what this machine can do at best; nothing else may run."""
        for kind in roofline.measured(self._plan):
            self._step(f"measuring the {kind} floor")
            figure = self.fleet.floor(kind)
            if figure is not None:
                self.results.floors[kind].append(figure)

    def hold(self) -> None:
        """Keep the fleet up under light traffic until interrupted."""
        self._step("holding")
        self._course.hold()

    def lanes(self) -> list[str]:
        """The transport's lanes, as the ranks describe them."""
        described = [ready["transport"].get("lanes", []) for ready in self.results.ready.values()]
        return sorted({str(lane) for lanes in described for lane in ([lanes] if isinstance(lanes, str) else lanes)})

    def gpus(self) -> dict[int, Gpu]:
        """What each GPU in use says of itself, by number."""
        found = {self.fleet.names[name]["device"]: ready.get("gpu") for name, ready in self.results.ready.items()}
        return {number: gpu for number, gpu in sorted(found.items()) if gpu is not None}

    def _step(self, text: str) -> None:
        self._steps.step(f"{self.label}: {text}" if self.label else text)


def laps_of(program: Program, plan: Plan) -> int:
    """Number of laps that a program takes."""
    return sum(length(plan, stage.cases) * stage.repeat for stage in program.outlook(plan))


def measure(sessions: Sequence[Session], steps: Steps) -> None:
    """Start every fleet, measure the floors, run all laps in turns, measure the floors again.

    Raises:
        FleetError: a rank died, failed or hung.
    """
    for session in sessions:
        session.start()
    for session in sessions:
        session.floors()
    under_way = [session.laps() for session in sessions]
    while under_way:
        for laps in tuple(under_way):
            if next(laps, None) is None:
                under_way.remove(laps)
            else:
                steps.lap()
    for session in sessions:
        session.floors()
