"""Parsing of bench's option values, and the error messages for malformed ones."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvctl.lab.bench.options import (
    parse_cp_modes,
    parse_percent,
    parse_scale,
    parse_sweep,
    sweep_loads,
)
from kvctl.lab.ranks.request import (
    Group,
    Load,
    Sizes,
    State,
    Tokens,
    parse_instances,
    parse_kv_group,
    parse_kv_layouts,
    parse_names,
    parse_pipelines,
    parse_scale_bytes,
    parse_stages,
    parse_state,
    parse_tokens,
)


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


def test_pool_layouts():
    assert parse_kv_layouts("hnd") == ("hnd", "hnd")
    assert parse_kv_layouts("nhd, fused") == ("nhd", "fused")
    for text in ("", ",", "nhd,hnd,nhd"):
        with pytest.raises(ValueError, match="prefill and decode, such as nhd,hnd"):
            parse_kv_layouts(text)


@pytest.mark.parametrize("text", ["", "0", "-4", "1.5", "16,", "..", "1..", "many", "1e3"])
def test_other_prompt_lengths_are_refused_with_what_was_given(text: str):
    with pytest.raises(ValueError, match="is not a whole number of at least 1"):
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


class TestInstances:
    @pytest.mark.parametrize(
        ("text", "instances"),
        [
            ("tp4", (Sizes(tp=4),)),
            ("tp4, tp2:pp2,cp2", (Sizes(tp=4), Sizes(tp=2, pp=2), Sizes(cp=2))),
            ("dp2:tp4:pp10+22", (Sizes(dp=2, tp=4, pp=2, layers=(10, 22)),)),
            ("tp1,tp1", (Sizes(), Sizes())),
        ],
    )
    def test_each_is_sizes_joined_by_colons(self, text: str, instances: tuple[Sizes, ...]):
        assert parse_instances(text) == instances

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            ("", "'' is not a size"),
            ("4", "'4' is not a size"),
            ("tp4,,cp2", "'' is not a size"),
            ("tp4,tp2:xx2", "'xx2' is not a size of a prefill instance; write tp4 or tp2:pp2"),
            ("tp", "'tp' is not a size"),
            ("tp0", "'tp0' is not a size"),
            ("tp2+2", r"'tp2\+2' is not a size"),
            ("pp10+0", r"'pp10\+0' is not a size"),
            ("tp-1", "'tp-1' is not a size"),
            ("tp999999", "'tp999999' is not a size"),
            ("tp2:tp4", "'tp2:tp4' gives tp twice"),
            (",".join(["tp1"] * 17), "17 instances, at most 16"),
        ],
    )
    def test_the_wrong_piece_is_named(self, text: str, wrong: str):
        with pytest.raises(ValueError, match=wrong):
            parse_instances(text)


def test_stages_are_layers():
    assert parse_stages("10, 22") == (10, 22)
    assert parse_stages("") == ()
    with pytest.raises(ValueError, match="'x' is not a whole number"):
        parse_stages("10,x")


def test_cp_modes_and_pipelines_are_lists_of_known_words():
    assert parse_cp_modes("rank0,all-chunk,rank0") == ("rank0", "all-chunk")
    assert parse_pipelines("off,on,auto,4") == ("off", "on", "auto", "4")


@pytest.mark.parametrize(
    ("parse", "text", "wrong"),
    [
        (parse_cp_modes, "al", "did you mean all?"),
        (parse_cp_modes, "", "no value is given; allowed: rank0, all, all-chunk, room-hash"),
        (parse_pipelines, "autto", "did you mean auto"),
        (parse_pipelines, "0", "'0' is unknown"),
        (parse_pipelines, "-1", "'-1' is unknown"),
    ],
)
def test_other_words_are_refused_with_what_is_allowed(parse, text: str, wrong: str):
    with pytest.raises(ValueError, match=wrong):
        parse(text)


def test_a_scale_is_exact():
    assert parse_scale("0.05") == Fraction(1, 20)
    assert parse_scale("1/3") == Fraction(1, 3)


@pytest.mark.parametrize("text", ["0", "-1", "", "half", "1/0", "101", "inf", "nan"])
def test_other_scales_are_refused(text: str):
    with pytest.raises(ValueError, match="is not a factor"):
        parse_scale(text)


def test_scale_bytes_are_of_k_and_v():
    assert [parse_scale_bytes(text) for text in ("", "4", "4,2")] == [(None, None), (4, 4), (4, 2)]
    for text in ("x", "1,2,3", "-4", "4,"):
        with pytest.raises(ValueError, match="write bytes per page and head"):
            parse_scale_bytes(text)


def test_state_components():
    assert parse_state("conv:4x1x256") == State("conv", 4, 1, 256)
    assert parse_state("swa:1x8x256:window=512") == State("swa", 1, 8, 256, kind="window", window=512)
    assert parse_state("idx:1x1x132:pages") == State("idx", 1, 1, 132, kind="pages")
    for text in ("conv", "conv:4x1", "conv:4x1x256:rows", "Conv:1x1x1", "a:1x1x1:window=", "conv:-1x1x1"):
        with pytest.raises(ValueError, match="write NAME:ROWSxHEADSxBYTES"):
            parse_state(text)


def test_kv_groups():
    assert parse_kv_group("swa:layers=16,page=16,window=1024") == Group("swa", 16, 16, 1024)
    assert parse_kv_group("index:page=64,layers=2,dim=132,heads=1") == Group("index", 2, 64, 0, 1, 132)
    for text, error in (
        ("swa", "write NAME:layers=N,page=TOKENS"),
        ("swa:layers=2", "write NAME:layers=N,page=TOKENS"),
        ("Swa:layers=2,page=16", "write NAME:layers=N,page=TOKENS"),
        ("swa:layers=2,page=16,windows=4", "did you mean window"),
        ("swa:16x8x128", "field '16x8x128' is unknown; allowed: layers, page, window, heads, dim"),
        ("swa:layers=2,page=0", "'0' is not a whole number of at least 1"),
        ("swa:layers=2,layers=3,page=16", "layers is given twice"),
    ):
        with pytest.raises(ValueError, match=error):
            parse_kv_group(text)
