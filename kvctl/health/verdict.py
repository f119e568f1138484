"""What a monitoring system is told of one area: the worst of who did not answer, what was found, and thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvctl.client.faults import SILENT, Fault
from kvctl.exit_codes import CheckState
from kvctl.health.areas import AREAS, area
from kvctl.health.finding import Finding, Severity
from kvctl.health.measures import MEASURES, Measure
from kvctl.health.mutes import Judged
from kvctl.health.snapshot import Snapshot
from kvctl.health.thresholds import Threshold, human

_STATES = {
    Severity.INFO: CheckState.OK,
    Severity.WARNING: CheckState.WARNING,
    Severity.CRITICAL: CheckState.CRITICAL,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not well, in one line; `code` is "" where no finding says it."""

    state: CheckState
    text: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one area, the worst problem first."""

    area: str
    problems: Sequence[Problem]
    muted: Sequence[Finding]
    values: Mapping[str, float | None]

    @property
    def state(self) -> CheckState:
        return worst(problem.state for problem in self.problems)


def worst(states: Iterable[CheckState]) -> CheckState:
    """OK of none."""
    return max(states, key=lambda state: state.gravity, default=CheckState.OK)


def verdicts(
    areas: Sequence[str],
    snapshot: Snapshot,
    judged: Judged,
    thresholds: Mapping[str, Threshold],
    nobody: str,
) -> list[Verdict]:
    """One verdict for each area.

    Args:
        nobody: what to say where no agent answered.
    """
    silent = list(_silent(snapshot.survey.faults)) if snapshot.agents or snapshot.faults else []
    if not snapshot.agents and not silent:
        silent = [Problem(CheckState.CRITICAL, nobody)]
    return [
        Verdict(
            each,
            _ranked(
                [
                    # Nobody's silence is told in each area: it is not known how things stand there.
                    *silent,
                    *(_left(snapshot) if each == next(iter(AREAS)) else ()),
                    *(_of(finding) for finding in judged.raised if area(finding.code) == each),
                    *_reached(each, snapshot, thresholds),
                ]
            ),
            [finding for finding, _ in judged.muted if area(finding.code) == each],
            {measure.name: measure.read(snapshot) for measure in MEASURES if measure.area == each},
        )
        for each in areas
    ]


def _ranked(problems: Iterable[Problem]) -> list[Problem]:
    """The worst first, otherwise as they came; what is no problem is left out."""
    bad = [problem for problem in problems if problem.state is not CheckState.OK]
    return sorted(bad, key=lambda problem: -problem.state.gravity)


def _silent(faults: Iterable[Fault]) -> Iterator[Problem]:
    for fault in faults:
        state = CheckState.CRITICAL if fault.code in SILENT else CheckState.UNKNOWN
        yield Problem(state, f"{fault.agent}: {fault.message}" if fault.agent else fault.message)


def _left(snapshot: Snapshot) -> Iterator[Problem]:
    """Who was killed says nothing any more, and only a socket remembers it."""
    named = {fault.agent for fault in snapshot.faults}
    for endpoint in snapshot.survey.discovery.stale:
        if endpoint.name not in named:
            yield Problem(
                CheckState.WARNING,
                f"{endpoint.name} is gone and left its socket behind: {endpoint.path} (kvctl agents --prune)",
            )


def _of(finding: Finding) -> Problem:
    return Problem(_STATES[finding.severity], f"{finding.code} {finding.subject}: {finding.cause}", finding.code)


def _reached(area: str, snapshot: Snapshot, thresholds: Mapping[str, Threshold]) -> Iterator[Problem]:
    for measure in MEASURES:
        threshold = thresholds.get(measure.name)
        if measure.area != area or threshold is None:
            continue
        value = measure.read(snapshot)
        state = threshold.state(measure, value)
        if state is not CheckState.OK:
            limit = threshold.crit if state is CheckState.CRITICAL else threshold.warn
            yield Problem(state, f"{measure.name} {_beyond(measure, value, limit)} ({measure.help})")


def _beyond(measure: Measure, value: float | None, limit: float | None) -> str:
    word = "is less than" if measure.least else "has reached"
    return f"{human(measure, value)} {word} {human(measure, limit)}"
