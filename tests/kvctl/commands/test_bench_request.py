"""Resolution of the options of `kvctl bench`, and errors for contradictory ones."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from click.core import ParameterSource

from kvctl.commands.bench import bench
from kvctl.commands.bench_request import BenchRequest, resolve
from kvctl.lab.ranks.request import Group, PlanRequest, Sizes, State


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known size."""
    monkeypatch.setattr("kvctl.commands.bench_request.memory_budget_bytes", lambda: 8 << 30)


def ask(*args: str) -> BenchRequest:
    with bench.make_context("bench", list(args)) as ctx:
        given = {name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
        return resolve(ctx.params, given)


def requests(*args: str) -> list[PlanRequest]:
    return [variant.request for wave in ask(*args).waves for variant in wave]


def request(*args: str) -> PlanRequest:
    (only,) = requests(*args)
    return only


# Options, and the fields of the request that differ from those of a bench without options.
ARRIVES: dict[str, dict[str, Any]] = {
    "--mla --head-dim 576 --dtype fp8 --scale-bytes 4,2 --v-head-dim 64": {
        **{"kind": "mla", "head_dim": 576, "dtype": "fp8", "scale_bytes": (4, 2), "v_head_dim": 64}
    },
    "--draft-layers 1 --draft-heads 2 --draft-dim 32": {"draft_layers": 1, "draft_heads": 2, "draft_dim": 32},
    "--state conv:4x1x256 --state swa:1x8x256:window=512": {
        "states": (State("conv", 4, 1, 256), State("swa", 1, 8, 256, kind="window", window=512))
    },
    "--kv-group swa:layers=4,page=8,window=64 --kv-group index:layers=1,page=16,dim=132": {
        "groups": (Group("swa", 4, 8, 64), Group("index", 1, 16, head_dim=132))
    },
    "--page-size 32 --decode-page-size 64 --decode-cp 2 --cp-interleave 8 --kv-layout hnd": {
        **{"page_size": 32, "decode_page_size": 64, "decode": Sizes(cp=2), "cp_interleave": 8},
        "kv_layouts": ("hnd", "hnd"),
    },
    "--prefill-pp-layers 10,22 --decode-pp-layers 16,16": {
        "prefill": (Sizes(pp=2, layers=(10, 22)),),
        "decode": Sizes(pp=2, layers=(16, 16)),
    },
    "--prefill-instances tp4,tp2:pp2": {"prefill": (Sizes(tp=4), Sizes(tp=2, pp=2))},
    "--path slice,staged --pipeline off,on,4": {"paths": ("slice", "staged"), "pipelines": ("off", "on", "4")},
    "--decode-ms 2": {"decode_ms": 2.0, "output_tokens": 32},
    "--decode-ms 2 --output-tokens 7": {"decode_ms": 2.0, "output_tokens": 7},
    "--output-tokens 7": {},
    "--device cuda --prefill-gpus 0,0 --decode-gpus 1 --direct-sms 16 --path direct": {
        **{"device": "cuda", "prefill_gpus": (0, 0), "decode_gpus": (1,), "direct_sms": 16, "paths": ("direct",)}
    },
}


def test_without_options_there_is_one_fleet_of_two_ranks_with_the_defaults_of_the_fields():
    asked = request()
    assert (asked.prefill, asked.decode) == ((Sizes(),), Sizes())
    assert (asked.transport, asked.cp_mode, asked.rate, asked.output_tokens) == ("nixl", "rank0", 0.0, 0)
    declared = [field for field in fields(PlanRequest) if field.metadata]
    assert len(declared) > 20
    assert {field.name: getattr(asked, field.name) for field in declared} == {
        field.name: field.default for field in declared
    }


@pytest.mark.parametrize("options", ARRIVES)
def test_options_arrive_and_change_nothing_else(options: str):
    plain = request("--seed", "5")
    assert request("--seed", "5", *options.split()) == replace(plain, **ARRIVES[options])


def test_what_one_fleet_cannot_compare_has_fleets_of_its_own_that_share_the_memory():
    every = requests("--transport", "nixl,loopback", "--cp-mode", "rank0,all")
    assert [(each.transport, each.cp_mode) for each in every] == [
        *(("nixl", "rank0"), ("nixl", "all")),
        *(("loopback", "rank0"), ("loopback", "all")),
    ]
    assert {each.memory_bytes for each in every} == {2 << 30}


def test_without_a_seed_each_bench_has_its_own():
    assert request().seed != request().seed
