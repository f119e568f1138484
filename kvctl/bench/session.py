"""One bench from its plan to its results, on a fleet of its own."""

from __future__ import annotations

from kvctl.bench.fleet import Fleet
from kvctl.bench.laps import Course
from kvctl.bench.progress import Steps
from kvctl.bench.results import Results
from kvctl_agent.contract.rig import Plan

FLOORS = ("memcpy", "write")


class Session:
    """Measures a plan; `results` holds what has been measured so far, however it ends."""

    def __init__(self, fleet: Fleet, plan: Plan, verify: str, repeat: int, steps: Steps) -> None:
        self._fleet = fleet
        self._steps = steps
        self._course = Course(fleet, plan, verify, repeat, steps.step)
        self.results = Results(plan, fleet.names, verify)

    def measure(self) -> None:
        """Start the fleet, measure the floors, run every lap, measure the floors again.

        Raises:
            FleetError: a rank died, failed or hung.
        """
        self._steps.step(f"starting {self._fleet.size} ranks")
        self.results.ready = self._fleet.start()
        self._floors()
        self._steps.laps(self._course.length)
        for lap in self._course.laps():
            self.results.add(lap)
            self._steps.lap()
        self._floors()

    def hold(self) -> None:
        """Keep the fleet up under light traffic until interrupted."""
        self._steps.step("holding")
        self._course.hold()

    def lanes(self) -> list[str]:
        """The transport's lanes, as the ranks describe them."""
        described = [ready["transport"].get("lanes", []) for ready in self.results.ready.values()]
        return sorted({str(lane) for lanes in described for lane in ([lanes] if isinstance(lanes, str) else lanes)})

    def _floors(self) -> None:
        for kind in FLOORS:
            self._steps.step(f"measuring the {kind} floor")
            figure = self._fleet.floor(kind)
            if figure is not None:
                self.results.floors[kind].append(figure)
