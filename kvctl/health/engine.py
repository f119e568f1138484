"""Runs the codes over a snapshot and ranks what they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.selection import natural_key


def examine(snapshot: Snapshot, codes: Iterable[Code]) -> list[Finding]:
    """All findings, the worst first; among equally severe ones that which explains others comes first.

    Findings of one severity and code are in the order of their subjects: what they weigh changes from one reading to
    the next, and a list that somebody watches must not jump.

    A code that fails on what some agent answered is a finding of its own: the others are wanted all the more then.
    """
    order = list(codes)
    place = {code.name: number for number, code in enumerate(order)}
    found = [finding for code in order for finding in _find(code, snapshot)]
    return sorted(found, key=lambda one: (-one.severity, place[one.code], natural_key(one.subject), one.cause))


def _find(code: Code, snapshot: Snapshot) -> list[Finding]:
    try:
        return list(code.find(snapshot))
    except Exception as error:
        return [
            Finding(
                code=code.name,
                severity=Severity.INFO,
                subject="kvctl",
                agents=(),
                cause=f"{code.name} could not look at what the agents answered: {type(error).__name__}: {error}",
                remedy="`kvctl debug bundle bundle.tar.zst --redact` saves what is to be reported: a bug of kvctl",
            )
        ]


def worst(findings: Sequence[Finding]) -> str:
    """Label of the worst severity among them; "ok" where there are none."""
    return max(findings, key=lambda finding: finding.severity).severity.label if findings else "ok"
