"""Findings in the TUI: compared with one earlier snapshot, without ignored ones."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.health import engine
from kvctl.health.engine import HealthWatch, Ignored
from kvctl.health.finding import Finding, Severity
from kvctl.health.snapshot import Snapshot


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """The snapshots examined; each examination returns the same finding."""
    seen: list[Snapshot] = []
    finding = Finding("KV_IDLE", Severity.WARNING, "fleet", ("decode-0",), "nobody sends", "look")

    def examine(snapshot: Snapshot, codes: Any) -> list[Finding]:
        seen.append(snapshot)
        return [finding]

    monkeypatch.setattr(engine, "examine", examine)
    return seen


def test_each_survey_is_compared_with_the_one_before_and_no_more(specimen: Any, seen: list[Snapshot]) -> None:
    watch = HealthWatch()
    for beat in range(3):
        watch(specimen.survey((), beat))
    assert [None if each.before is None else each.before.taken_ns for each in seen] == [None, 0, 1_000_000_000]
    assert seen[2].before is not None
    assert seen[2].before.before is None


def test_a_survey_from_earlier_is_compared_with_none(specimen: Any, seen: list[Snapshot]) -> None:
    watch = HealthWatch()
    watch(specimen.survey((), 5))
    watch(specimen.survey((), 2))
    assert seen[1].before is None


@pytest.mark.parametrize(
    ("code", "subject", "count"),
    [
        ("KV_IDLE", "", 1),
        ("KV_IDLE", "fleet", 1),
        ("KV_IDLE", "decode-0", 1),
        ("KV_IDLE", "decode-1", 0),
        ("KV_OTHER", "", 0),
    ],
)
def test_findings_that_the_user_ignores(
    code: str, subject: str, count: int, specimen: Any, seen: list[Snapshot]
) -> None:
    reading = HealthWatch(ignored=[Ignored(code, subject)])(specimen.survey((), 0))
    assert (len(reading.ignored), len(reading.findings)) == (count, 1 - count)


def test_the_real_codes_find_nothing_in_nothing(specimen: Any) -> None:
    specimen.prefill, specimen.decode = [], []
    assert not HealthWatch()(specimen.survey(HEALTH_CALLS, 0)).findings
