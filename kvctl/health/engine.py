"""Runs health codes on a snapshot and orders their findings."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl.client.names import natural_key
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
                remedy="`kvctl debug bundle bundle.tar.zst --redact` saves the data for a report: this is a bug of "
                "kvctl",
            )
        ]
