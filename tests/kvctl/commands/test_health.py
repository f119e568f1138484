"""`kvctl health`: findings in every form, codes and their pages; and the health that `kvctl status` tells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.answers import refusal

pytestmark = pytest.mark.usefixtures("toy_codes")


@pytest.mark.parametrize(
    ("width", "name", "args"),
    [
        (120, "health", ("health",)),
        (80, "health", ("health",)),
        (80, "health-codes", ("health", "codes")),
        (80, "health-explain", ("health", "explain", "ring_full")),
    ],
)
def test_tables(
    name: str, args: tuple[str, ...], width: int, fleet: Any, kvctl: Any, golden: Any, terminal: Any
) -> None:
    terminal(width)
    outcome = kvctl(*args, "-o", "table")
    assert (outcome.code, outcome.err) == (0 if args[-1] in {"codes", "ring_full"} else 1, "")
    golden(f"{name}-{width}.txt", outcome.out)


def test_a_healthy_fleet_is_one_line(start: Any, kvctl: Any) -> None:
    start("prefill-0")
    outcome = kvctl("health", "-o", "table", "--filter", "severity!=info")
    assert outcome.out == "✓ healthy   1 agent, 2 codes examined\n"


def test_what_is_ignored_is_a_count(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("health", "--ignore", "ring_full:decode-0", "-o", "json")
    assert [row["subject"] for row in outcome.data] == ["decode-1 ring", "fleet"]
    for command in ("health", "doctor"):
        table = kvctl(command, "--ignore", "KV_RING_FULL", "-o", "table").out
        assert "1 ignored" not in table
        assert "2 ignored" in table
        assert "decode-0 ring" not in table


class TestStatus:
    def test_health_is_what_the_codes_find(self, fleet: Any, kvctl: Any) -> None:
        table = kvctl("status", "-o", "table").out
        assert table.startswith("fleet    ✗ KV_RING_FULL decode-1 ring  ! KV_RING_FULL decode-0 ring     4 agents\n")
        rows = {row["name"]: row["health"] for row in kvctl("status", "-o", "json").data}
        assert rows == {
            "decode-0": ["KV_RING_FULL"],
            "decode-1": ["KV_RING_FULL"],
            "prefill-0": ["KV_RING_FULL"],
            "prefill-1": [],
        }

    def test_a_reading_without_all_agents_is_never_without_a_problem(
        self, hang: Any, start: Any, kvctl: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvctl.health.engine.CODES", ())
        monkeypatch.setattr("kvctl.commands.health.CODES", ())
        hang("hung")
        start("decode-0")
        status = kvctl("status", "--timeout", "200ms", "-o", "table")
        health = kvctl("health", "--timeout", "200ms", "-o", "table")
        assert (status.code, status.out.splitlines()[0]) == (7, "fleet    ? incomplete   1 agent, 1 not answering")
        first = "? incomplete   1 agent, 0 codes examined, 1 not answering"
        assert (health.code, health.out.splitlines()[0]) == (1, first)

    def test_an_agent_that_did_not_answer_everything_is_not_ok(
        self, start: Any, kvctl: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvctl.health.engine.CODES", ())
        start("decode-0", {"staging": refusal()})
        outcome = kvctl("status", "-o", "table")
        assert (outcome.code, outcome.out.splitlines()[0]) == (0, "fleet    ? incomplete   1 agent")
        assert kvctl("status", "-o", "json").data[0]["health"] == ["incomplete"]

    def test_an_agent_that_refuses_what_only_health_reads_has_answered(self, start: Any, kvctl: Any) -> None:
        start("decode-0", {"staging": refusal()})
        outcome = kvctl("status", "-o", "json")
        assert (outcome.code, outcome.err) == (0, "kvctl: decode-0: health is incomplete: boom\n")
        assert outcome.data[0]["health"] == ["KV_RING_FULL"]
        assert json.loads(outcome.out)["errors"] == []
