"""Resolution of the options of `kvctl bench`, and errors for contradictory ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

from kvctl.commands.bench import bench
from kvctl.commands.bench_request import BenchRequest, resolve
from kvctl.lab.ranks.request import Group, PlanRequest, Sizes, State, Tokens

LINE = '{"timestamp": %d, "input_length": 1000, "output_length": 5, "hash_ids": [0, %d]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(LINE % (1000 * number, number) for number in range(1, 700)))
    return str(file)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of known size."""
    monkeypatch.setattr("kvctl.commands.bench_request.memory_budget_bytes", lambda: 8 << 30)


def ask(*args: str) -> BenchRequest:
    with bench.make_context("bench", list(args)) as ctx:
        given = {name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
        return resolve(ctx.params, given)


def requests(*args: str) -> list[PlanRequest]:
    return [variant.request for wave in ask(*args).waves for variant in wave.variants]


def request(*args: str) -> PlanRequest:
    (only,) = requests(*args)
    return only


class TestPlain:
    def test_without_options_there_is_one_fleet_of_two_ranks(self):
        asked = request()
        assert (asked.prefill, asked.decode) == ((Sizes(),), Sizes())
        assert (asked.transport, asked.cp_mode, asked.pipelines) == ("nixl", "rank0", ("off",))
        assert (asked.rate, asked.requests, asked.output_tokens) == (0.0, (), 0)
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


class TestTraffic:
    def test_a_trace_gives_the_requests_and_the_default_concurrency(self, trace: str):
        asked = ask("--trace", trace, "--rooms", "3", "--speedup", "2", "--tokens-scale", "0.5")
        assert asked.source is not None
        prompts = asked.source.traffic.prompts
        assert [(each.tokens, each.arrival_ms) for each in prompts] == [(500, 0.0), (500, 500.0), (500, 1000.0)]
        assert asked.waves[0].variants[0].request.loads[0].concurrency == 32
        assert asked.source.facts["file"] == "trace.jsonl"
        assert asked.notes == ()

    def test_a_long_trace_is_cut_and_that_is_said(self, trace: str):
        asked = ask("--trace", trace)
        assert asked.source is not None
        assert len(asked.source.traffic.prompts) == 500
        assert asked.notes == ("the first 500 requests of trace.jsonl; --rooms N sets another number",)

    def test_a_rate_replaces_the_traces_arrivals(self, trace: str):
        asked = ask("--trace", trace, "--rooms", "50", "--rate", "10", "--seed", "1")
        assert asked.source is not None
        times = [each.arrival_ms for each in asked.source.traffic.prompts]
        assert times[0] == 0
        assert times != [1000.0 * number for number in range(50)]
        assert request("--rate", "10").rate == 10.0

    def test_as_fast_as_it_goes(self, trace: str):
        asked = ask("--trace", trace, "--speedup", "inf")
        assert asked.source is not None
        assert {each.arrival_ms for each in asked.source.traffic.prompts} == {None}
        assert asked.source.facts["speedup"] is None

    def test_skipped_lines_are_noted_and_kept(self, tmp_path: Path):
        file = tmp_path / "t.jsonl"
        file.write_text("{}\n" + LINE % (0, 1))
        asked = ask("--trace", str(file))
        assert asked.notes[0].startswith("t.jsonl line 1 is skipped: input_length is missing")
        assert asked.source is not None
        assert list(asked.source.facts["skipped_lines"]) == ["1"]

    def test_sessions_are_in_flight_all_at_once(self):
        asked = ask("--sessions", "16", "--turns", "3", "--tokens", "100", "--output-tokens", "20")
        assert asked.source is not None
        assert len(asked.source.traffic.prompts) == 48
        load = asked.waves[0].variants[0].request.loads[0]
        assert (load.concurrency, load.tokens) == (16, Tokens(values=(340,)))


class TestPresets:
    def test_a_preset_fills_in_what_was_not_given_and_says_what_is_not_as_published(self):
        asked = ask("--preset", "stress", "--prefill-tp", "2")
        (fleet,) = asked.waves[0].variants
        assert (fleet.request.prefill, fleet.request.decode) == ((Sizes(tp=2),), Sizes(dp=4))
        assert [(load.concurrency, load.rooms) for load in fleet.request.loads] == [(64, 64)]
        assert asked.notes == (
            "stress in host memory has 4 layers, 4 KV heads, 64 elements per head; options on the command line replace "
            "them",
        )

    def test_what_is_given_stays_and_heads_are_those_of_a_given_model(self):
        given = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--tokens", "4096")
        asked = ask("--preset", "p2d4", *given)
        assert asked.notes == ()
        fleet = asked.waves[0].variants[0].request
        assert (fleet.layers, fleet.loads[0].tokens) == (32, Tokens(values=(4096,)))
        latent = request("--preset", "stress", "--model", "deepseek-r1")
        assert (latent.layers, latent.kv_heads, latent.head_dim) == (4, None, None)

    def test_fleets_that_are_compared_are_alive_together(self):
        (wave,) = ask("--preset", "staging-overhead").waves
        assert [(each.fleet, each.name, each.request.paths) for each in wave.variants] == [
            ("homogeneous", "homogeneous", ("bulk",)),
            ("staged", "staged", ("staged",)),
        ]

    def test_cp_sizes_come_one_after_the_other_with_their_modes_together(self):
        asked = ask("--preset", "cp")
        assert [[each.name for each in wave.variants] for wave in asked.waves] == [
            [f"cp{size}-{mode}" for mode in ("rank0", "all", "all-chunk", "room-hash")] for size in (2, 4)
        ]

    def test_conversations_come_from_sessions(self):
        asked = ask("--preset", "multi-turn")
        assert asked.source is not None
        assert len(asked.source.traffic.prompts) == 160

    def test_a_sweep_that_is_given_replaces_the_presets(self):
        (fleet,) = ask("--preset", "staging-sweep", "--sweep", "concurrency=1,3").waves[0].variants
        assert [load.concurrency for load in fleet.request.loads] == [1, 3]

    @pytest.mark.parametrize(
        ("args", "names_tokens"),
        [("", True), ("--sweep concurrency=1,3", True), ("--sweep tokens=64,128", False), ("--sessions 2", False)],
    )
    def test_the_note_names_no_length_if_prompts_have_their_own(self, args: str, names_tokens: bool):
        (note, *_) = ask("--preset", "staging-sweep", *args.split()).notes
        sizes = "4 layers, 4 KV heads, 64 elements per head" + ", 256 tokens per prompt" * names_tokens
        assert note == f"staging-sweep in host memory has {sizes}; options on the command line replace them"

    def test_the_note_names_no_length_with_a_trace(self, trace: str):
        (note, *_) = ask("--preset", "staging-sweep", "--trace", trace).notes
        assert "elements per head; options on" in note


class TestGpus:
    def test_pools_are_in_host_memory_unless_asked(self):
        asked = request()
        assert (asked.device, asked.compute, asked.prefill_gpus, asked.direct_sms) == ("cpu", "sleep", (), None)

    def test_every_option_arrives(self):
        where = "--device cuda --compute gpu --prefill-gpus 0,0 --decode-gpus 1 --direct-sms 16 --path direct"
        asked = request(*where.split())
        assert (asked.device, asked.compute, asked.direct_sms) == ("cuda", "gpu", 16)
        assert (asked.prefill_gpus, asked.decode_gpus, asked.paths) == ((0, 0), (1,), ("direct",))

    def test_presets_compare_direct_too_and_are_not_scaled_but_limited_in_time(self):
        asked = ask("--preset", "staging-sweep", "--device", "cuda")
        assert asked.notes == ()
        assert asked.options["point_seconds"] == 5
        (fleet,) = asked.waves[0].variants
        assert fleet.request.paths == ("slice", "staged", "direct")
        assert (fleet.request.layers, [load.rooms for load in fleet.request.loads][-1]) == (None, 1024)

    def test_the_time_can_be_given(self):
        assert ask("--preset", "stress", "--device", "cuda", "--point-seconds", "9").options["point_seconds"] == 9
        assert ask("--preset", "stress").options["point_seconds"] is None

    def test_the_pipeline_sweep_computes_a_large_models_forwards(self):
        (wave,) = ask("--preset", "pipeline-sweep", "--device", "cuda", "--compute", "gpu").waves
        assert wave.program.layer_ms == 0
        asked = wave.variants[0].request
        assert (asked.model, asked.pipelines, asked.paths) == ("qwen2.5-72b", ("off", "on"), ("staged",))
        assert [load.tokens.values for load in asked.loads] == [(1024,), (2048,), (4096,), (8192,), (16384,)]
        assert {load.concurrency for load in asked.loads} == {1}

    def test_without_real_compute_it_is_simulated(self):
        (wave,) = ask("--preset", "pipeline-sweep", "--device", "cuda").waves
        assert wave.program.layer_ms > 0


@pytest.mark.parametrize(
    ("args", "option", "text"),
    [
        ("--compute gpu", "--compute", "add --device cuda"),
        ("--prefill-gpus 0", "--prefill-gpus", "add --device cuda"),
        ("--decode-gpus 0", "--decode-gpus", "add --device cuda"),
        ("--direct-sms 4", "--direct-sms", "add --device cuda"),
        ("--path staged,direct", "--path", "add --device cuda"),
        ("--device cuda --compute gpu --layer-ms 1", "--layer-ms", "leave it out"),
        ("--sessions 2 --trace {trace}", "--trace", "leave out --sessions"),
        ("--speedup 2", "--speedup", "requires --trace"),
        ("--tokens-scale 0.1", "--tokens-scale", "requires --trace"),
        ("--turns 2", "--turns", "requires --sessions"),
        ("--cache-tokens 2", "--cache-tokens", "requires --trace or --sessions"),
        ("--trace {trace} --tokens 4", "--tokens", "scale them with --tokens-scale"),
        ("--trace {trace} --prefix-hit 0.5", "--prefix-hit", "the requests determine the prefix hits"),
        ("--trace {trace} --sweep tokens=1,2", "--sweep", "the requests define the lengths"),
        ("--sessions 2 --tokens 1..5", "--tokens", "not a range"),
        ("--sessions 2 --rooms 5", "--rooms", "their number is --sessions times --turns"),
        ("--trace /nowhere.jsonl", "--trace", "/nowhere.jsonl cannot be read"),
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
def test_contradictions_name_the_option_and_the_way_out(args: str, option: str, text: str, trace: str):
    with pytest.raises(click.BadParameter, match=text) as caught:
        ask(*args.format(trace=trace).split())
    assert caught.value.param_hint == option


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--pipeline onn", "did you mean on"),
        ("--rate 0", "not in the range"),
        ("--device gpu", "'gpu' is not one of"),
        ("--device cuda --prefill-gpus a", "nvidia-smi -L lists them"),
        ("--point-seconds 0", "not in the range"),
        ("--preset staging", "'staging' is not one of"),
    ],
)
def test_values_are_refused_where_they_are_read(args: str, text: str):
    with pytest.raises(click.BadParameter, match=text):
        ask(*args.split())


def test_help_lists_every_option_under_its_group():
    with click.Context(bench, info_name="kvctl bench", help_option_names=["-h", "--help"]) as ctx:
        text: Any = bench.get_help(ctx)
    titles = [
        "Layout:",
        "Model:",
        "Load:",
        "Real traffic:",
        "Engine:",
        "GPUs:",
        "Compute:",
        "Result:",
        "Global options",
    ]
    positions = [text.index(f"\n{title}") for title in titles]
    assert positions == sorted(positions)
    assert text.index("--trace") > text.index("Real traffic:")
