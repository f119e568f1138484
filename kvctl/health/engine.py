"""Runs the codes over a snapshot and ranks what they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvctl.health.finding import Code, Finding
from kvctl.health.snapshot import Snapshot


def examine(snapshot: Snapshot, codes: Iterable[Code]) -> list[Finding]:
    """All findings, the worst first; among equally severe ones that which explains others comes first."""
    order = list(codes)
    place = {code.name: number for number, code in enumerate(order)}
    found = [finding for code in order for finding in code.find(snapshot)]
    return sorted(found, key=lambda one: (-one.severity, place[one.code], -one.weight, one.subject))


def worst(findings: Sequence[Finding]) -> str:
    """Label of the worst severity among them; "ok" where there are none."""
    return max(findings, key=lambda finding: finding.severity).severity.label if findings else "ok"
