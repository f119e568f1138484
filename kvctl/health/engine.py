"""Runs health codes on snapshots, and orders their findings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvctl.client.fleet import Survey
from kvctl.client.names import natural_key
from kvctl.health.codes import CODES
from kvctl.health.codes.advice import adapted
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot


def examine(snapshot: Snapshot, codes: Iterable[Code]) -> list[Finding]:
    """Runs the health codes and returns their findings, ordered by severity, then as `codes`, then by subject.

    The order ignores weights, because they change with every reading and lines on a screen should stay in place.
    """
    order = list(codes)
    position = {code.name: number for number, code in enumerate(order)}
    found = [finding for code in order for finding in _find(code, snapshot)]
    return sorted(found, key=lambda each: (-each.severity, position[each.code], natural_key(each.subject), each.cause))


def _find(code: Code, snapshot: Snapshot) -> list[Finding]:
    """Returns the findings of one code; if it raises, a finding about the error, so that the other codes still run."""
    try:
        return [adapted(finding, snapshot) for finding in code.find(snapshot)]
    except Exception as error:
        return [
            Finding(
                code=code.name,
                severity=Severity.INFO,
                subject="kvctl",
                agents=(),
                cause=f"{code.name} could not examine the agents' answers: {type(error).__name__}: {error}",
                remedy="`kvctl record incident.kvrec --for 2s --redact` saves the data for a report: this is a bug of "
                "kvctl",
            )
        ]


class Ignored(NamedTuple):
    """Findings that the user ignores: those of a code, or of one subject or agent of it if `subject` is not ""."""

    code: str
    subject: str = ""

    def covers(self, finding: Finding) -> bool:
        return finding.code == self.code and self.subject in {"", finding.subject, *finding.agents}


@dataclass(frozen=True, slots=True)
class HealthReading:
    """Result of one reading: the snapshot, its findings, and those that the user ignores."""

    snapshot: Snapshot
    findings: Sequence[Finding]
    ignored: Sequence[Finding] = ()


class HealthWatch:
    """Examines each survey that it is called with, and compares it with the previous one.

    A survey older than the previous one, from a recording that was moved back, is not compared with it.

    Args:
        before: snapshot to compare the first survey with.
    """

    def __init__(self, before: Snapshot | None = None, ignored: Collection[Ignored] = ()) -> None:
        self._before = before
        self._ignored = ignored

    def __call__(self, survey: Survey) -> HealthReading:
        before = self._before if self._before is not None and self._before.taken_ns < survey.tick_ns else None
        snapshot = Snapshot(survey, survey.tick_ns, before)
        self._before = snapshot.alone()
        found = examine(snapshot, CODES)
        ignored = [finding for finding in found if any(each.covers(finding) for each in self._ignored)]
        return HealthReading(snapshot, [finding for finding in found if finding not in ignored], ignored)


def codes_of_agents(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """Returns the codes of warnings and critical findings by agent, in the order of the findings."""
    found: dict[str, dict[str, None]] = {}
    for finding in findings:
        for name in finding.agents if finding.severity > Severity.INFO else ():
            found.setdefault(name, {})[finding.code] = None
    return {name: list(codes) for name, codes in found.items()}
