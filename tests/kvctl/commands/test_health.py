"""`kvctl health`: findings in every form, codes and their pages, mutes; and the health that `kvctl status` tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import refusal

pytestmark = pytest.mark.usefixtures("toy_codes")


def mutes_file() -> Path:
    return Path(os.environ["XDG_STATE_HOME"]) / "kvctl" / "mutes.json"


@pytest.mark.parametrize(
    ("width", "name", "args"),
    [
        (120, "health", ("health",)),
        (80, "health", ("health",)),
        (80, "health-detail", ("health", "detail")),
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


def test_json_has_the_numbers(fleet: Any, kvctl: Any) -> None:
    rows = kvctl("health", "-o", "json").data
    assert [(row["severity"], row["code"], row["subject"]) for row in rows] == [
        ("critical", "KV_RING_FULL", "decode-1 ring"),
        ("warning", "KV_RING_FULL", "decode-0 ring"),
        ("info", "KV_FLEET_YOUNG", "fleet"),
    ]
    assert rows[0]["evidence"]["used_bytes"] == 24 << 20
    assert rows[0]["muted_ns"] is None


def test_a_healthy_fleet_is_one_line(start: Any, kvctl: Any) -> None:
    start("prefill-0")
    outcome = kvctl("health", "-o", "table", "--filter", "severity!=info")
    assert outcome.out == "✓ healthy   1 agent, 2 codes examined\n"
    assert kvctl("health", "detail", "KV_RING_FULL").err == "kvctl: KV_RING_FULL is not raised\n"


@pytest.mark.parametrize("command", ["explain", "detail"])
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("KV_RING_FUL", "did you mean KV_RING_FULL"),
        ("ring-full", "did you mean KV_RING_FULL"),
        ("zzz", "kvctl health codes"),
    ],
)
def test_a_mistyped_code(command: str, typed: str, words: str, kvctl: Any) -> None:
    outcome = kvctl("health", command, typed)
    assert outcome.code == 2
    assert words in outcome.err


class TestMutes:
    def test_what_is_muted_is_a_count(self, fleet: Any, kvctl: Any) -> None:
        outcome = kvctl("health", "mute", "ring_full:decode-0", "1h", "--reason", "known")
        assert (outcome.code, outcome.err) == (0, "")
        outcome = kvctl("health", "-o", "json")
        assert [row["subject"] for row in outcome.data] == ["decode-1 ring", "fleet"]
        assert outcome.err == "kvctl: 1 muted (kvctl health mutes)\n"
        table = kvctl("health", "-o", "table").out
        assert "✗ 1 critical, 1 info   4 agents, 2 codes examined, 1 muted" in table
        assert "decode-0 ring" not in table
        (muted,) = [row for row in kvctl("health", "--muted", "-o", "json").data if row["muted_ns"]]
        assert muted["subject"] == "decode-0 ring"
        assert 0 < muted["muted_ns"] <= 3_600_000_000_000
        assert "muted for" in kvctl("health", "detail", "-o", "table").out

    def test_what_is_not_raised_yet_can_be_muted_and_is_told(self, start: Any, kvctl: Any) -> None:
        outcome = kvctl("health", "mute", "KV_RING_FULL", "2h")
        assert outcome.code == 0
        assert "could not be examined: no agent answered; every finding of it is muted for 2h00m" in outcome.err
        start("prefill-0")
        assert "is not raised now" in kvctl("health", "mute", "KV_RING_FULL", "2h").err
        start("decode-1")
        assert "decode-1 ring" not in kvctl("health").out

    def test_the_list(self, fleet: Any, kvctl: Any) -> None:
        kvctl("health", "mute", "KV_RING_FULL:decode-1", "1h", "--reason", "ticket 17")
        kvctl("health", "mute", "KV_FLEET_YOUNG", "1d")
        assert kvctl("health", "mutes", "--columns", "target,until_worse,reason", "-o", "tsv").out == (
            "target\tuntil_worse\treason\n"
            "KV_RING_FULL:decode-1\t1 critical, weight 2.52e+07\tticket 17\n"
            "KV_FLEET_YOUNG\t1 info, weight 1\t\n"
        )
        (first, second) = kvctl("health", "mutes", "-o", "json").data
        assert (first["code"], first["subject"], first["reason"]) == ("KV_RING_FULL", "decode-1", "ticket 17")
        assert 0 < first["left_ns"] < second["left_ns"] <= 86_400_000_000_000

    def test_unmute(self, fleet: Any, kvctl: Any) -> None:
        kvctl("health", "mute", "KV_RING_FULL", "1h")
        outcome = kvctl("health", "unmute", "ring_full")
        assert (outcome.code, outcome.err) == (0, "kvctl: KV_RING_FULL is reported again\n")
        assert "decode-0 ring" in kvctl("health").out
        kvctl("health", "mute", "KV_FLEET_YOUNG", "1h")
        outcome = kvctl("health", "unmute", "ring_full")
        assert (outcome.code, outcome.err) == (1, "kvctl: KV_RING_FULL is not muted; muted: KV_FLEET_YOUNG\n")

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (("KV_RING_FUL", "1h"), "did you mean KV_RING_FULL"),
            (("KV_RING_FULL", "1"), "is not a duration"),
            (("KV_RING_FULL", "0s"), "not a positive time"),
            (("KV_RING_FULL",), "Missing argument 'TIME'"),
        ],
    )
    def test_wrong_usage(self, args: tuple[str, ...], words: str, kvctl: Any) -> None:
        outcome = kvctl("health", "mute", *args)
        assert outcome.code == 2
        assert words in outcome.err
        assert not mutes_file().exists()

    def test_a_file_that_is_spoilt_mutes_nothing_and_is_told(self, fleet: Any, kvctl: Any) -> None:
        mutes_file().parent.mkdir(parents=True)
        mutes_file().write_text("{")
        for command, code in (("health", 1), ("status", 0)):
            outcome = kvctl(command)
            assert outcome.code == code
            assert "nothing is muted" in outcome.err
            assert "KV_RING_FULL" in outcome.out
        for args in (("mute", "KV_RING_FULL", "1h"), ("unmute", "KV_RING_FULL"), ("mutes",)):
            outcome = kvctl("health", *args)
            assert outcome.code == 1
            assert "repair it or delete it" in outcome.err
        assert mutes_file().read_text() == "{"


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
        detail = kvctl("health", "detail", "--timeout", "200ms")
        assert (status.code, status.out.splitlines()[0]) == (7, "fleet    ? incomplete   1 agent, 1 not answering")
        first = "? incomplete   1 agent, 0 codes examined, 1 not answering"
        assert (health.code, health.out.splitlines()[0]) == (1, first)
        assert "kvctl: incomplete: no findings\n" in detail.err

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
