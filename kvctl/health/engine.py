"""Runs health codes on snapshots, orders their findings, and applies the user's mutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvctl.client.fleet import Survey
from kvctl.client.names import natural_key
from kvctl.health.codes import CODES
from kvctl.health.codes.advice import adapted
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.mutes import Judged, judge, load_or_warn
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


@dataclass(frozen=True, slots=True)
class HealthReading:
    """Result of one reading: the snapshot, its findings with muted ones separate, and remarks for the user."""

    snapshot: Snapshot
    judged: Judged
    remarks: Sequence[str]


class HealthWatch:
    """Examines each survey that it is called with, and compares it with the previous one.

    A survey older than the previous one, from a recording that was moved back, is not compared with it.

    Args:
        before: snapshot to compare the first survey with.
        muted: whether the user's mutes apply.
    """

    def __init__(self, before: Snapshot | None = None, *, muted: bool = True) -> None:
        self._before = before
        self._muted = muted

    def __call__(self, survey: Survey) -> HealthReading:
        before = self._before if self._before is not None and self._before.taken_ns < survey.tick_ns else None
        snapshot = Snapshot(survey, survey.tick_ns, before)
        self._before = Snapshot(survey, survey.tick_ns)  # without its predecessor, so that the chain can be freed
        mutes, remarks = load_or_warn() if self._muted else ([], [])
        return HealthReading(snapshot, judge(examine(snapshot, CODES), mutes, survey.at_ns), remarks)
