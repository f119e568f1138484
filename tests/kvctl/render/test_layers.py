"""Summary of the decisions to pipeline forwards, with the reasons against it."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.render.layers import PipelineDecisions
from kvctl.render.report import Line
from kvctl.render.status import screen
from kvctl_agent.contract.choices import REASONS


def rank(mode: str = "on", group_size: int | None = None, **decisions: int) -> dict[str, Any]:
    counted = {reason.replace("_", "-"): count for reason, count in decisions.items()}
    return {"pipeline": {"mode": mode, "min_tokens": 3072, "group_size": group_size, "decisions": counted}}


def text(line: Line) -> str:
    return "".join(piece for piece, _ in line)


def said(*ranks: dict[str, Any]) -> list[str]:
    return [text(line) for line in PipelineDecisions(ranks).lines()]


DECODE = {"pipeline": None}
OLDER: dict[str, Any] = {}  # an older agent, which does not report it


def test_every_reason_with_its_words_those_for_it_first() -> None:
    assert said(rank(few_tokens=12, formula=1120, multimodal=3), DECODE, OLDER) == [
        "pipeline on from 3,072 tokens   1,120 of 1,135 forwards pipelined, else mostly few-tokens",
        f"  1,120  formula     {REASONS['formula']}",
        f"     12  few-tokens  {REASONS['few-tokens']}",
        f"      3  multimodal  {REASONS['multimodal']}",
    ]


def test_ranks_are_added_up_and_that_is_said() -> None:
    head, *reasons = said(rank(formula=5), rank(formula=5, few_tokens=1))
    assert head == "pipeline on from 3,072 tokens   10 of 11 forwards (on 2 ranks) pipelined, else few-tokens"
    assert [line.split()[:2] for line in reasons] == [["10", "formula"], ["1", "few-tokens"]]


@pytest.mark.parametrize(
    ("ranks", "head"),
    [
        ([rank("off")], "pipeline off"),
        ([rank("off", off=7)], "pipeline off   0 of 7 forwards pipelined, else off"),
        ([rank("on", 8, override=2)], "pipeline on, 8 layers a group   2 of 2 forwards pipelined"),
        ([rank("auto")], "pipeline auto from 3,072 tokens   no forward yet"),
        ([rank("off", off=1), rank("on", 8)], "pipeline off or on, 8 layers a group   0 of 1 forwards (on 2 ranks)"),
    ],
)
def test_the_mode(ranks: list[dict[str, Any]], head: str) -> None:
    assert said(*ranks)[0].startswith(head)


def test_off_needs_one_line() -> None:
    assert len(said(rank("off", off=7))) == 1
    assert len(said(rank("off", off=7, formula=3))) == 3  # it was on before


def test_a_reason_of_a_newer_agent_is_shown_without_words() -> None:
    assert said(rank(moon_phase=3))[1].split() == ["3", "moon-phase"]


def test_without_prefill_ranks_nothing_is_said() -> None:
    assert said(DECODE, OLDER) == []


class TestStatus:
    def lines(self, canned: Any, pipeline: Any) -> list[str]:
        rows = [{**canned.status(name), "pipeline": pipeline} for name in ("prefill-0",)]
        return [text(line) for line in screen(rows, 0, [])[0].lines]  # type: ignore[union-attr]

    def test_one_line(self, canned: Any) -> None:
        found = [line for line in self.lines(canned, rank(formula=5)["pipeline"]) if line.startswith("pipeline")]
        assert found == ["pipeline on from 3,072 tokens   5 of 5 forwards pipelined"]

    def test_none_where_nobody_pipelines(self, canned: Any) -> None:
        for pipeline in (rank("off", off=9)["pipeline"], None):
            assert not any(line.startswith("pipeline") for line in self.lines(canned, pipeline))
