"""How bench's option values are written, and what is said to those who write them otherwise."""

from __future__ import annotations

import pytest

from kvctl.bench.options import parse_names, parse_percent, parse_sweep, parse_tokens, sweep_loads
from kvctl_agent.contract.rig import Load, Tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1024", Tokens(values=(1024,))),
        ("16, 4_096", Tokens(values=(16, 4096))),
        ("256..2048", Tokens(low=256, high=2048)),
    ],
)
def test_prompt_lengths(text: str, tokens: Tokens):
    assert parse_tokens(text) == tokens
    assert parse_tokens(tokens.text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-4", "1.5", "16,", "..", "1..", "many", "1e3"])
def test_other_prompt_lengths_are_refused_with_what_was_given(text: str):
    with pytest.raises(ValueError, match="is not a whole number from 1 on"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("text", "sweep"),
    [
        ("concurrency=1,4,16", ("concurrency", [1, 4, 16])),
        ("concurrency=1..8", ("concurrency", [1, 2, 4, 8])),
        ("tokens=256..1000", ("tokens", [256, 512, 1000])),
        ("tokens=7..7", ("tokens", [7])),
        ("concurrency=4,4", ("concurrency", [4])),
    ],
)
def test_sweeps(text: str, sweep: tuple[str, list[int]]):
    assert parse_sweep(text) == sweep


@pytest.mark.parametrize("text", ["", "concurrency", "speed=1", "concurrency=8..1", "concurrency=", "tokens=0..4"])
def test_other_sweeps_are_refused(text: str):
    with pytest.raises(ValueError, match=text or "write"):
        parse_sweep(text)


def test_a_sweep_of_too_many_points_is_refused():
    with pytest.raises(ValueError, match="65 points, at most 64"):
        parse_sweep("concurrency=" + ",".join(map(str, range(1, 66))))


def test_sweeps_multiply_and_leave_other_axes_alone():
    fixed = Tokens(values=(7,))
    assert sweep_loads(4, fixed, []) == (Load(4, fixed),)
    assert sweep_loads(4, fixed, [("concurrency", [1, 2])]) == (Load(1, fixed), Load(2, fixed))
    both = sweep_loads(4, fixed, [("concurrency", [1, 2]), ("tokens", [16, 32])])
    assert [(load.concurrency, load.tokens.values) for load in both] == [(1, (16,)), (2, (16,)), (1, (32,)), (2, (32,))]


def test_an_axis_swept_twice_is_refused():
    with pytest.raises(ValueError, match="swept once"):
        sweep_loads(4, Tokens(values=(7,)), [("tokens", [1]), ("tokens", [2])])


def test_percentages():
    assert parse_percent("5%") == parse_percent("5") == 0.05
    for text in ("", "five", "101", "-1"):
        with pytest.raises(ValueError, match="write 5%"):
            parse_percent(text)


def test_names():
    assert parse_names("slice, staged,,auto") == ("slice", "staged", "auto")
    assert parse_names("") == ()
