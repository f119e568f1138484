"""Layer grouping: the formula as SGLang publishes it, every reason not to group, and the override."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvctl_agent.contract.choices import PIPELINED, REASONS
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.layout.layer_grouping import ForwardInfo, Grouping, GroupingOptions, group_layers

ON = GroupingOptions(mode="on")


def sizes(grouping: Grouping) -> list[int]:
    return [len(group) for group in grouping.groups]


class TestFormula:
    def test_the_average_over_requests_decides(self) -> None:
        assert sizes(group_layers(0, 80, ForwardInfo((1, 18431)), ON)) == [20] * 4
        assert group_layers(0, 80, ForwardInfo((1, 6142)), ON).reason == "few-tokens"  # 3071.5

    def test_groups_carry_global_layer_ids(self) -> None:
        grouping = group_layers(40, 40, ForwardInfo((9216,)), ON)
        assert grouping.groups == (range(40, 50), range(50, 60), range(60, 70), range(70, 80))

    @given(
        layers=st.integers(5, 200),
        tokens=st.lists(st.integers(1, 50_000), min_size=1, max_size=4),
        min_tokens=st.integers(0, 10_000),
        iters=st.tuples(st.integers(1, 40), st.integers(1, 40)).map(sorted),
        multiplier=st.floats(1, 20),
    )
    def test_against_the_published_formula(
        self, layers: int, tokens: list[int], min_tokens: int, iters: list[int], multiplier: float
    ) -> None:
        def clamp(value: float, low: float, high: float) -> float:
            return max(low, min(value, high))

        min_iters, max_iters = iters
        avg = sum(tokens) / len(tokens)
        threshold = 1 if min_tokens == 0 else min_tokens
        assume(avg >= threshold)
        sat = threshold * max(1.01, multiplier)
        t = clamp((avg - threshold) / (sat - threshold), 0, 1)
        group_size = max(1, layers // int(clamp(max_iters - t * (max_iters - min_iters), min_iters, max_iters)))

        options = GroupingOptions("on", min_tokens, max_iters, min_iters, None, multiplier)
        grouping = group_layers(0, layers, ForwardInfo(tuple(tokens)), options)
        if group_size >= layers:
            assert grouping == Grouping((), "one-group")
        else:
            assert sizes(grouping)[:-1] == [group_size] * (ceil(layers / group_size) - 1)
            assert grouping.reason == "formula"


class TestGuards:
    LONG = ForwardInfo((9216,))

    @pytest.mark.parametrize("layers", [0, 1, 4])
    def test_few_layers(self, layers: int) -> None:
        assert group_layers(0, layers, self.LONG, ON) == Grouping((), "few-layers")

    def test_the_first_of_several_reasons_is_reported(self) -> None:
        order = [
            ({"tokens": (9216,)}, "few-tokens"),
            ({}, "few-layers"),
            ({"split_forward": True}, "no-split-forward"),
            ({"multimodal": False}, "multimodal"),
            ({"attention_dp": False}, "attention-dp"),
            ({"expert_balancing": False}, "expert-balancing"),
            ({"draft": False}, "draft"),
            ({"input_embeddings": False}, "input-embeddings"),
            ({"prefill_only": False}, "prefill-only"),
        ]
        forward, layers = ForwardInfo((1,), False, True, True, True, True, True, True), 4
        for lifted, reason in order:
            assert group_layers(0, layers, forward, ON).reason == reason
            forward, layers = replace(forward, **lifted), layers if reason == "few-tokens" else 80
        assert group_layers(0, layers, forward, ON).reason == "formula"

    def test_a_threshold_of_0_means_1(self) -> None:
        zero, one = replace(ON, min_tokens=0), replace(ON, min_tokens=1)
        for tokens in ((1,), (2,), (0,)):
            assert group_layers(0, 80, ForwardInfo(tokens), zero) == group_layers(0, 80, ForwardInfo(tokens), one)
        assert group_layers(0, 80, ForwardInfo((0,)), zero).reason == "few-tokens"

    def test_one_group_is_the_plain_path(self) -> None:
        assert group_layers(0, 80, self.LONG, replace(ON, min_iters=1)) == Grouping((), "one-group")


class TestOverride:
    SIZED = GroupingOptions(mode="on", group_size=24)

    @pytest.mark.parametrize("mode", ["on", "auto"])
    def test_in_every_mode(self, mode: Any) -> None:
        options = replace(self.SIZED, mode=mode)
        assert group_layers(0, 80, ForwardInfo((9216,)), options, choose=lambda *_: 2).reason == "override"
        assert group_layers(0, 80, ForwardInfo((9216,)), replace(options, mode="off")).reason == "off"

    def test_the_other_checks_still_apply(self) -> None:
        assert group_layers(0, 4, ForwardInfo((9216,)), self.SIZED).reason == "few-layers"
        assert group_layers(0, 80, ForwardInfo(()), self.SIZED).reason == "empty-batch"
        assert group_layers(0, 80, ForwardInfo((9216,), draft=True), self.SIZED).reason == "draft"

    def test_all_layers_in_one_group(self) -> None:
        assert group_layers(0, 24, ForwardInfo((9216,)), self.SIZED) == Grouping((), "one-group")


class TestMeasured:
    MEASURED = GroupingOptions(mode="auto")

    def test_the_chooser_gets_tokens_and_layers(self) -> None:
        asked: list[tuple[float, int]] = []

        def choose(tokens: float, layers: int) -> int:
            asked.append((tokens, layers))
            return 16

        grouping = group_layers(0, 80, ForwardInfo((6000, 6288)), self.MEASURED, choose)
        assert asked == [(6144.0, 80)]
        assert (sizes(grouping), grouping.reason) == ([5] * 16, "measured")

    def test_never_more_groups_than_chosen(self) -> None:
        assert sizes(group_layers(0, 32, ForwardInfo((9216,)), self.MEASURED, lambda *_: 10)) == [4] * 8
        assert sizes(group_layers(0, 5, ForwardInfo((9216,)), self.MEASURED, lambda *_: 99)) == [1] * 5

    @pytest.mark.parametrize("chosen", [0, 1])
    def test_the_chooser_may_choose_one_group(self, chosen: int) -> None:
        """Its times are measured as those of several groups."""
        grouping = group_layers(0, 32, ForwardInfo((9216,)), self.MEASURED, lambda *_: chosen)
        assert grouping == Grouping((range(32),), "one-group")

    def test_the_chooser_is_not_called_if_a_check_fails(self) -> None:
        def choose(*_: Any) -> int:
            raise AssertionError

        assert group_layers(0, 80, ForwardInfo((100,)), self.MEASURED, choose).reason == "few-tokens"


class TestOptions:
    def test_defaults_are_those_of_the_configuration(self) -> None:
        options = GroupingOptions()
        assert options.mode == KEYS_BY_NAME["pipeline"].default
        for name in ("min_tokens", "max_iters", "min_iters", "group_size", "sat_multiplier"):
            assert getattr(options, name) == KEYS_BY_NAME[f"pipeline_{name}"].default

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"mode": "always"}, "pipeline = 'always': it takes one of off, on, auto"),
            ({"min_tokens": -1}, "pipeline_min_tokens = -1: it must be 0 or more"),
            ({"max_iters": 0, "min_iters": 0}, "pipeline_max_iters = 0: it must be 1 or more"),
            ({"group_size": 0}, "pipeline_group_size = 0"),
            ({"sat_multiplier": float("nan")}, "pipeline_sat_multiplier = nan"),
            ({"min_iters": 11}, "pipeline_min_iters = 11 exceeds pipeline_max_iters = 10"),
        ],
    )
    def test_errors_name_the_option(self, change: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            GroupingOptions(**change)

    @pytest.mark.parametrize("layers", [-1, True, 1.5])
    def test_layers_are_counted_in_whole_numbers(self, layers: Any) -> None:
        with pytest.raises(LayoutError, match="num_layers"):
            group_layers(0, layers, ForwardInfo((1,)), ON)


@given(
    tokens=st.lists(st.integers(0, 20_000), max_size=3),
    flags=st.lists(st.booleans(), min_size=7, max_size=7),
    layers=st.integers(0, 100),
    size=st.none() | st.integers(1, 100),
    mode=st.sampled_from(["off", "on", "auto"]),
)
def test_groups_come_with_a_reason_for_and_none_with_a_reason_against(
    tokens: list[int], flags: list[bool], layers: int, size: int | None, mode: Any
) -> None:
    options = GroupingOptions(mode=mode, group_size=size)
    grouping = group_layers(0, layers, ForwardInfo(tuple(tokens), *flags), options, choose=lambda *_: 3)
    assert grouping.reason in REASONS
    assert bool(grouping.groups) == (grouping.reason in PIPELINED)
    assert len(grouping.groups) != 1
