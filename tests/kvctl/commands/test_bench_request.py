"""Resolution of the options of `kvctl bench`, and errors for contradictory ones."""

from __future__ import annotations

from dataclasses import fields

import click
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


class TestPlain:
    def test_without_options_there_is_one_fleet_of_two_ranks(self):
        asked = request()
        assert (asked.prefill, asked.decode) == ((Sizes(),), Sizes())
        assert (asked.transport, asked.cp_mode, asked.pipelines) == ("nixl", "rank0", ("off",))
        assert (asked.rate, asked.output_tokens) == (0.0, 0)
        assert asked.states is None

    def test_an_option_that_is_not_given_has_the_default_of_its_field(self):
        asked = request()
        declared = [field for field in fields(PlanRequest) if field.metadata]
        assert len(declared) > 20
        assert {field.name: getattr(asked, field.name) for field in declared} == {
            field.name: field.default for field in declared
        }

    def test_every_model_option_arrives(self):
        shape = "--mla --head-dim 576 --dtype fp8 --scale-bytes 4,2 --v-head-dim 64"
        more = "--draft-layers 1 --draft-heads 2 --draft-dim 32 --state conv:4x1x256 --state swa:1x8x256:window=512"
        asked = request(*f"{shape} {more}".split())
        assert (asked.kind, asked.head_dim, asked.v_head_dim, asked.dtype) == ("mla", 576, 64, "fp8")
        assert asked.scale_bytes == (4, 2)
        assert (asked.draft_layers, asked.draft_heads, asked.draft_dim) == (1, 2, 32)
        assert asked.states == (State("conv", 4, 1, 256), State("swa", 1, 8, 256, kind="window", window=512))

    def test_kv_groups_arrive_in_their_order(self):
        asked = request("--kv-group", "swa:layers=4,page=8,window=64", "--kv-group", "index:layers=1,page=16,dim=132")
        assert asked.groups == (Group("swa", 4, 8, 64), Group("index", 1, 16, head_dim=132))

    def test_pages_and_pools_of_each_side_arrive(self):
        asked = request(
            *[
                "--page-size",
                "32",
                "--decode-page-size",
                "64",
                "--decode-cp",
                "2",
                "--cp-interleave",
                "8",
                "--kv-layout",
                "hnd",
            ]
        )
        assert [asked.page_tokens(role) for role in ("prefill", "decode")] == [32, 64]
        assert (asked.decode.cp, asked.cp_interleave, asked.decode_run) == (2, 8, 128)
        assert asked.kv_layouts == ("hnd", "hnd")
        with pytest.raises(click.BadParameter, match="only with --decode-cp 2"):
            request("--cp-interleave", "8")

    def test_stages_make_the_pipeline(self):
        assert request("--prefill-pp-layers", "10,22", "--decode-pp-layers", "16,16").prefill == (
            Sizes(pp=2, layers=(10, 22)),
        )

    def test_several_instances(self):
        assert request("--prefill-instances", "tp4,tp2:pp2").prefill == (Sizes(tp=4), Sizes(tp=2, pp=2))

    def test_what_one_fleet_cannot_compare_has_fleets_of_its_own_that_share_the_memory(self):
        every = requests("--transport", "nixl,loopback", "--cp-mode", "rank0,all")
        assert [(each.transport, each.cp_mode) for each in every] == [
            ("nixl", "rank0"),
            ("nixl", "all"),
            ("loopback", "rank0"),
            ("loopback", "all"),
        ]
        assert {each.memory_bytes for each in every} == {2 << 30}

    def test_paths_and_pipelines_share_one(self):
        asked = request("--path", "slice,staged", "--pipeline", "off,on,4")
        assert (asked.paths, asked.pipelines) == (("slice", "staged"), ("off", "on", "4"))

    def test_decoding_has_tokens_where_it_takes_time(self):
        assert request("--decode-ms", "2").output_tokens == 32
        assert request("--decode-ms", "2", "--output-tokens", "7").output_tokens == 7
        assert request("--output-tokens", "7").output_tokens == 0

    def test_a_seed_makes_two_benches_the_same(self):
        assert request("--seed", "5") == request("--seed", "5")
        assert request().seed != request().seed


class TestGpus:
    def test_pools_are_in_host_memory_unless_asked(self):
        asked = request()
        assert (asked.device, asked.prefill_gpus, asked.direct_sms) == ("cpu", (), None)

    def test_every_option_arrives(self):
        where = "--device cuda --prefill-gpus 0,0 --decode-gpus 1 --direct-sms 16 --path direct"
        asked = request(*where.split())
        assert (asked.device, asked.direct_sms) == ("cuda", 16)
        assert (asked.prefill_gpus, asked.decode_gpus, asked.paths) == ((0, 0), (1,), ("direct",))


@pytest.mark.parametrize(
    ("args", "option", "text"),
    [
        ("--prefill-instances tp4 --prefill-tp 2", "--prefill-instances", "leave out --prefill-tp"),
        ("--prefill-instances tp4 --prefill-pp-layers 2,2", "--prefill-instances", "leave out --prefill-pp-layers"),
        (
            "--prefill-pp 3 --prefill-pp-layers 10,22",
            "--prefill-pp-layers",
            "10,22 are 2 stages, but --prefill-pp is 3",
        ),
        ("--sweep tokens=1 --sweep tokens=2", "--sweep", "swept once"),
    ],
)
def test_contradictions_name_the_option_and_the_way_out(args: str, option: str, text: str):
    with pytest.raises(click.BadParameter, match=text) as caught:
        ask(*args.split())
    assert caught.value.param_hint == option


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--pipeline onn", "did you mean on"),
        ("--rate 0", "not in the range"),
        ("--device gpu", "'gpu' is not one of"),
        ("--device cuda --prefill-gpus a", "nvidia-smi -L lists them"),
        ("--point-seconds 0", "not in the range"),
    ],
)
def test_values_are_refused_where_they_are_read(args: str, text: str):
    with pytest.raises(click.BadParameter, match=text):
        ask(*args.split())
