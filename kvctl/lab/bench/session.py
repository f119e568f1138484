"""Runs the programs of one or several fleets in turns, measures the roofline, and shows the progress on stderr.

Transports, CP modes and layouts cannot be compared within one fleet, so they run on several fleets at the same time.
The fleets take turns trial by trial, so that a drifting machine affects all of them alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.bench.machine import rooflines_of
from kvctl.lab.bench.results import Results
from kvctl.lab.bench.trials import Program, Trial, TrialRunner
from kvctl.lab.bench.variants import Variant
from kvctl.lab.ranks.plan import Plan


class Steps:
    """Progress display on stderr: a bar on a terminal, otherwise lines that `-v` prints.

    Args:
        quiet: Shows no bar.
        detail: Called with the description of each step if there is no bar; prints it if `-v` is given.
    """

    def __init__(self, quiet: bool, detail: Callable[[str], None]) -> None:
        self._detail = detail
        shown = not quiet and sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            # A higher rate would take processor time from the ranks.
            refresh_per_second=2,
            disable=not shown,
        )
        self._task = self._bar.add_task("planning", total=None)

    def step(self, text: str) -> None:
        """Shows the description of the next step."""
        self._bar.update(self._task, description=text)
        if self._bar.disable:
            task = self._bar.tasks[0]
            self._detail(f"{text} ({task.completed:.0f} of {task.total:.0f} trials done)" if task.total else text)

    def expect(self, trials: int) -> None:
        """Sets the total number of trials and restarts the count at 0."""
        self._bar.update(self._task, total=trials, completed=0)

    def finished_trial(self) -> None:
        """Counts one trial as done and updates the display."""
        self._bar.advance(self._task)

    def end(self) -> None:
        """Removes the bar, so that other text can be printed."""
        self._bar.stop()

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Session:
    """The measurement of one fleet; a context manager that ends the fleet.

    Args:
        point_s: Time limit of one case and repeat, as in `TimeBudget`; None for no limit.
        label: Prefix of the descriptions of steps; "" if there is only one fleet.
        rank_prefix: Prefix of the ranks' names, to tell them from other fleets' ranks; "" for none.
    """

    def __init__(
        self,
        variant: Variant,
        plan: Plan,
        program: Program,
        steps: Steps,
        verify: str = "full",
        point_s: float | None = None,
        label: str = "",
        rank_prefix: str = "",
    ) -> None:
        self.fleet = Fleet(plan, variant.request, rank_prefix)
        self.results = Results(variant, plan, self.fleet.ranks, verify)
        self._plan = plan
        self._program = program
        self._steps = steps
        self._label = label
        decode_ms = variant.request.decode_ms
        self._runner = TrialRunner(self.fleet, plan, verify, decode_ms, self.step, point_s)

    def start(self) -> None:
        """Starts the fleet; raises FleetError if a rank did not start."""
        self.step(f"starting {len(self.fleet.ranks)} ranks")
        self.results.ready = self.fleet.start()

    def trials(self) -> Iterator[Trial]:
        """Runs the program; each trial is added to the results before it is yielded.

        Raises:
            FleetError: A rank died, failed or hung.
        """
        for trial in self._runner.trials(self._program.cases(self._plan), self._program.repeat):
            self.results.add(trial)
            yield trial

    def measure_roofline(self) -> None:
        """Measures each roofline of the plan once and adds it to the results; nothing else may run meanwhile."""
        for kind in rooflines_of(self._plan):
            self.step(f"measuring the {kind} roofline")
            figure = self.fleet.roofline(kind)
            if figure is not None:
                self.results.roofline[kind].append(figure)

    def step(self, text: str) -> None:
        """Shows the description of this fleet's next step."""
        self._steps.step(f"{self._label}: {text}" if self._label else text)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()


def measure(sessions: Sequence[Session], steps: Steps, roofline: bool = True) -> None:
    """Starts every fleet, runs their trials in turns, and measures the roofline before and after the trials.

    Args:
        roofline: Whether to measure the roofline.

    Raises:
        FleetError: A rank died, failed or hung.
    """
    for session in sessions:
        session.start()
    rooflines = sessions if roofline else ()
    for session in rooflines:
        session.measure_roofline()
    running = [session.trials() for session in sessions]
    while running:
        for trials in tuple(running):
            if next(trials, None) is None:
                running.remove(trials)
            else:
                steps.finished_trial()
        running.reverse()  # no fleet always comes after the same one
    for session in rooflines:
        session.measure_roofline()
