"""Parsing of bench's option values, and the error messages for malformed ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.commands.bench_options import parse_cp_modes, parse_sweep, sweep_loads
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

VALUES: dict[Callable[[str], Any], dict[str, Any]] = {
    parse_tokens: {"16, 4_096": Tokens(values=(16, 4096)), "256..2048": Tokens(low=256, high=2048)},
    parse_kv_layouts: {"hnd": ("hnd", "hnd"), "nhd, fused": ("nhd", "fused")},
    parse_sweep: {
        "concurrency=1,4,16": ("concurrency", [1, 4, 16]),
        "concurrency=1..8": ("concurrency", [1, 2, 4, 8]),
        "tokens=256..1000": ("tokens", [256, 512, 1000]),
        "tokens=7..7": ("tokens", [7]),
        "concurrency=4,4": ("concurrency", [4]),
    },
    parse_names: {"slice, staged,,auto": ("slice", "staged", "auto"), "": ()},
    parse_instances: {
        "tp4, tp2:pp2,cp2": (Sizes(tp=4), Sizes(tp=2, pp=2), Sizes(cp=2)),
        "dp2:tp4:pp10+22": (Sizes(dp=2, tp=4, pp=2, layers=(10, 22)),),
        "tp1,tp1": (Sizes(), Sizes()),
    },
    parse_stages: {"10, 22": (10, 22), "": ()},
    parse_cp_modes: {"rank0,all-chunk,rank0": ("rank0", "all-chunk")},
    parse_pipelines: {"off,on,auto,4": ("off", "on", "auto", "4")},
    parse_scale_bytes: {"": (None, None), "4": (4, 4), "4,2": (4, 2)},
    parse_state: {
        "conv:4x1x256": State("conv", 4, 1, 256),
        "swa:1x8x256:window=512": State("swa", 1, 8, 256, kind="window", window=512),
        "idx:1x1x132:pages": State("idx", 1, 1, 132, kind="pages"),
    },
    parse_kv_group: {
        "swa:layers=16,page=16,window=1024": Group("swa", 16, 16, 1024),
        "index:page=64,layers=2,dim=132,heads=1": Group("index", 2, 64, 0, 1, 132),
    },
}
WRONG: dict[Callable[[str], Any], dict[str, tuple[str, ...]]] = {
    parse_tokens: {"is not a whole number of at least 1": ("", "0", "-4", "1.5", "16,", "..", "1..", "many", "1e3")},
    parse_kv_layouts: {"prefill and decode, such as nhd,hnd": ("", ",", "nhd,hnd,nhd")},
    parse_sweep: {
        "write concurrency=1,4,16": ("", "concurrency", "speed=1"),
        "8..1": ("concurrency=8..1",),
        "'' is not a whole number": ("concurrency=",),
        "'0' is not a whole number": ("tokens=0..4",),
        "65 points, at most 64": ("concurrency=" + ",".join(map(str, range(1, 66))),),
    },
    parse_instances: {
        "'' is not a size": ("", "tp4,,cp2"),
        "'4' is not a size": ("4",),
        "'xx2' is not a size of a prefill instance; write tp4 or tp2:pp2": ("tp4,tp2:xx2",),
        "is not a size": ("tp", "tp0", "tp2+2", "pp10+0", "tp-1", "tp999999"),
        "'tp2:tp4' gives tp twice": ("tp2:tp4",),
        "17 instances, at most 16": (",".join(["tp1"] * 17),),
    },
    parse_stages: {"'x' is not a whole number": ("10,x",)},
    parse_cp_modes: {
        "did you mean all?": ("al",),
        "no value is given; allowed: rank0, all, all-chunk, room-hash": ("",),
    },
    parse_pipelines: {"did you mean auto": ("autto",), "is unknown": ("0", "-1")},
    parse_scale_bytes: {"write bytes per page and head": ("x", "1,2,3", "-4", "4,")},
    parse_state: {
        "write NAME:ROWSxHEADSxBYTES": (
            *("conv", "conv:4x1", "conv:4x1x256:rows"),
            *("Conv:1x1x1", "a:1x1x1:window=", "conv:-1x1x1"),
        )
    },
    parse_kv_group: {
        "write NAME:layers=N,page=TOKENS": ("swa", "swa:layers=2", "Swa:layers=2,page=16"),
        "did you mean window": ("swa:layers=2,page=16,windows=4",),
        "field '16x8x128' is unknown; allowed: layers, page, window, heads, dim": ("swa:16x8x128",),
        "'0' is not a whole number of at least 1": ("swa:layers=2,page=0",),
        "layers is given twice": ("swa:layers=2,layers=3,page=16",),
    },
}


@pytest.mark.parametrize(
    ("parse", "text", "value"), [(parse, *each) for parse, values in VALUES.items() for each in values.items()]
)
def test_values(parse: Callable[[str], Any], text: str, value: Any):
    assert parse(text) == value
    if parse is parse_tokens:
        assert parse(value.text) == value


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [(parse, text, error) for parse, wrong in WRONG.items() for error, texts in wrong.items() for text in texts],
)
def test_other_values_are_refused_with_what_is_wrong(parse: Callable[[str], Any], text: str, error: str):
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(text)


def test_sweeps_multiply_and_leave_other_axes_alone():
    fixed = Tokens(values=(7,))
    assert sweep_loads(4, fixed, []) == (Load(4, fixed),)
    assert sweep_loads(4, fixed, [("concurrency", [1, 2])]) == (Load(1, fixed), Load(2, fixed))
    both = sweep_loads(4, fixed, [("concurrency", [1, 2]), ("tokens", [16, 32])])
    assert [(load.concurrency, load.tokens.values) for load in both] == [(1, (16,)), (2, (16,)), (1, (32,)), (2, (32,))]
