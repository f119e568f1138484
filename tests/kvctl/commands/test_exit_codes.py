"""Exit codes of doctor, health and check follow one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvctl.exit_codes import FINDING_EXITS, CheckState, ExitCode
from kvctl.health.finding import Code, Finding, Severity

# How to produce each situation of the table.
SITUATIONS: dict[str, tuple[Severity | None, bool, bool]] = {
    "no finding, or only info; ignored findings do not count": (Severity.INFO, True, False),
    "a warning": (Severity.WARNING, True, False),
    "a critical finding": (Severity.CRITICAL, True, False),
    "an agent that does not answer": (None, True, True),
    "no agent": (None, False, False),
}
JUDGES = ("doctor", "health", "check")

Make = Callable[[Severity | None, bool, bool], None]


@pytest.fixture
def make(start: Any, hang: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Builds a fleet with a finding of the severity, with or without agents, and with an agent that hangs."""

    def situation(severity: Severity | None, agent: bool, hangs: bool) -> None:
        def find(snapshot: Any) -> Iterator[Finding]:
            if severity is not None and snapshot.agents:
                yield Finding("KV_TOY", severity, "fleet", (), "a cause", "a remedy")

        code = Code("KV_TOY", "sees", "means", "remedy", Severity.CRITICAL, find)
        for module in ("health.engine", "commands.health", "commands.health_query"):
            monkeypatch.setattr(f"kvctl.{module}.CODES", (code,))
        monkeypatch.setattr("kvctl.commands.health_query.CODES_BY_NAME", {"KV_TOY": code})
        monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)
        monkeypatch.setattr("kvctl.commands.doctor.inspect", lambda *_: [])
        if agent:
            start("decode-0")
        if hangs:
            hang("hung")

    return situation


def run(judge: str, kvctl: Any, *more: str) -> int:
    return int(kvctl(judge, "--timeout", "2s", *more).code)


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("situation", "code", "state"), FINDING_EXITS, ids=SITUATIONS)
def test_the_commands_exit_as_the_table_says(
    situation: str, code: ExitCode, state: CheckState, judge: str, make: Make, kvctl: Any
) -> None:
    make(*SITUATIONS[situation])
    assert run(judge, kvctl) == (state if judge == "check" else code)


@pytest.mark.parametrize("judge", JUDGES)
def test_ignored_findings_do_not_count(judge: str, make: Make, kvctl: Any) -> None:
    make(Severity.CRITICAL, True, False)
    assert run(judge, kvctl) != 0
    assert run(judge, kvctl, "--ignore", "KV_TOY") == 0


@pytest.mark.parametrize("judge", ["doctor", "health"])
def test_what_a_filter_leaves_out_counts(judge: str, make: Make, kvctl: Any) -> None:
    make(Severity.WARNING, True, False)
    assert run(judge, kvctl, "--filter", "severity=critical") == ExitCode.FAILED
