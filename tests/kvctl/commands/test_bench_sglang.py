"""Options of `kvctl bench --engine sglang`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner

from kvctl.commands.bench import bench
from kvctl.commands.bench_sglang import ServerRequest, resolve_servers
from kvctl.lab.bench.sglang_bench import CHECKED_TOKENS
from kvctl.lab.bench.sglang_pairs import Pair, parse_sides
from kvctl.lab.bench.statistics import MIN_ROUNDS
from kvctl.lab.ranks.messages import Gpu
from kvctl.lab.ranks.request import Load, Sizes, Tokens

LAYOUTS_SCRIPT = Path(__file__).parents[3] / "benchmarks" / "sglang_layouts.sh"


def gpus(count: int) -> Mapping[int, Gpu]:
    return {number: Gpu(name="H200", driver="", cuda="") for number in range(count)}


def ask(*args: str, found: int = 0) -> ServerRequest:
    with bench.make_context("bench", ["--engine", "sglang", *args]) as ctx:
        given = {name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
        return resolve_servers(ctx.params, given, gpus(found))


def sides(request: ServerRequest) -> list[str]:
    return [side.text for side in request.sides]


def test_the_defaults_compare_kvctl_with_nixl_and_an_undivided_server() -> None:
    request = ask()
    assert sides(request) == ["undivided", "nixl", "kvctl"]
    assert (request.rounds, request.output_tokens, request.together, request.compared) == (MIN_ROUNDS, 32, False, True)
    assert request.loads == (Load(4, Tokens((1024,))),)
    assert request.plan.longest == 1024 + 32


def test_every_load_of_a_sweep_is_measured() -> None:
    request = ask("--sweep", "tokens=1024,8192", "--sweep", "concurrency=1,16", "--rooms", "5", "--repeat", "1")
    assert [(load.tokens.text, load.concurrency) for load in request.loads] == [
        *(("1024", 1), ("1024", 16), ("8192", 1), ("8192", 16))
    ]
    assert (request.plan.concurrency, request.plan.longest, request.requests, request.rounds) == (16, 8224, 5, 1)


def test_prompts_whose_tokens_are_compared_fit_although_requests_generate_fewer_tokens() -> None:
    assert ask("--tokens", "4096", "--output-tokens", "8").plan.longest == 4096 + CHECKED_TOKENS


def test_without_comparing_there_is_no_undivided_server() -> None:
    request = ask("--verify", "off", "--sides", "undivided,kvctl")
    assert (sides(request), request.compared) == (["kvctl"], False)


@pytest.mark.parametrize(
    ("args", "found", "prefill", "decode"),
    [
        ((), 2, (0,), (1,)),
        ((), 1, (0,), (0,)),
        (("--prefill-tp", "2"), 4, (0, 1), (2,)),
        (("--prefill-tp", "2"), 2, (0, 1), (1,)),
        (("--decode-tp", "2", "--prefill-pp", "2"), 8, (0, 1), (2, 3)),
        (("--prefill-gpus", "3", "--decode-gpus", "1"), 4, (3,), (1,)),
        (("--prefill-tp", "2", "--prefill-gpus", "0,2", "--decode-gpus", "1"), 4, (0, 2), (1,)),
        (("--device", "cpu"), 2, (), ()),
    ],
)
def test_decode_has_the_gpus_after_prefill(
    args: tuple[str, ...], found: int, prefill: tuple[int, ...], decode: tuple[int, ...]
) -> None:
    plan = ask(*args, found=found).plan
    assert (plan.prefill_gpus, plan.decode_gpus) == (prefill, decode)


def test_random_weights_for_dp_attention_are_those_of_a_qwen3() -> None:
    model = ask("--prefill-tp", "4", "--decode-dp", "4", found=4).model
    assert (model.llama or {})["qwen3"] is True
    assert model.shape["model"] == "random Qwen3 of the shape of llama-3.1-8b"
    assert (ask("--prefill-tp", "4", found=4).model.llama or {})["qwen3"] is False


def test_sizes_and_flags_are_those_of_the_servers() -> None:
    plan = ask("--prefill-tp", "2", "--prefill-pp", "2", "--server-args", "--mem-fraction-static 0.5 --x 'a b'").plan
    assert (plan.prefill, plan.decode) == (Sizes(tp=2, pp=2), Sizes())
    assert plan.flags == ["--mem-fraction-static", "0.5", "--x", "a b"]


@pytest.mark.parametrize(
    ("args", "found", "problem"),
    [
        (("--path", "staged", "--ring-mb", "4"), 0, "--path, --ring-mb: not with --engine sglang"),
        (("--layer-ms", "1"), 0, "--layer-ms: not with --engine sglang"),
        (("--prefill-cp", "2"), 0, "--prefill-cp: not with --engine sglang"),
        (("--verify", "sample"), 0, "compared .full. or not .off."),
        (("--sides", "nixl,nixl"), 0, "a side is given twice"),
        (("--sides", "undivided"), 0, "name a side: nixl"),
        (("--prefill-gpus", "0"), 0, "require GPUs: add --device cuda"),
        (("--device", "cuda"), 0, "nvidia-smi finds no GPU: use --device cpu"),
        (("--prefill-tp", "2", "--prefill-gpus", "0,1,2"), 4, "2 ranks need as many GPUs.* these are 0,1,2"),
        (("--prefill-tp", "3", "--prefill-gpus", "0,1,3"), 4, "evenly spaced"),
        (("--prefill-tp", "4"), 2, "4 ranks need as many GPUs, evenly spaced, of the 2 here"),
        (("--model", "lama-3.1-8b"), 0, "unknown model"),
        (("--model", "vendor/name", "--layers", "3"), 0, "its own shape"),
        (("--server-args", "'"), 0, "No closing quotation"),
        (("--prefill-tp", "3"), 0, "8 query heads and 4 KV heads cannot be split over 3 ranks: change --prefill-tp$"),
        (("--prefill-dp", "3"), 0, "MLPs of width 256 cannot be split over 3 ranks: change --prefill-dp$"),
        (("--decode-tp", "2", "--decode-dp", "3"), 0, "split over 6 ranks: change --decode-tp or --decode-dp$"),
        (("--decode-pp", "9"), 0, "8 layers cannot be split over 9 stages: change --decode-pp$"),
    ],
)
def test_what_does_not_fit_is_refused(args: tuple[str, ...], found: int, problem: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        ask(*args, found=found)
    raised.match(problem)


def test_a_plan_refuses_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench, ["--engine", "sglang", "--plan", "--model", str(tmp_path)])
    assert "has no config.json: name the folder of a checkpoint" in f"{result.output}{result.exception}"


def test_servers_without_gpus_name_the_cores_of_each_rank(tmp_path: Path) -> None:
    plan = ask("--prefill-pp", "5", "--decode-tp", "4", "--decode-pp", "5").plan
    pair = Pair(parse_sides("kvctl")[0], plan, tmp_path / "pair")
    assert pair.decode.environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 19


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--sides", "nixl"), "--sides: requires --engine sglang"),
        (("--together",), "--together: requires --engine sglang"),
        (("--engine", "sglang"), "SGLang is not installed in the environment of this kvctl"),
    ],
)
def test_servers_and_ranks_are_not_mixed(args: tuple[str, ...], problem: str) -> None:
    result = CliRunner().invoke(bench, args)
    assert result.exit_code != 0
    assert problem in f"{result.output}{result.exception}"


def planned_layouts(folder: Path, gpus: int, **variables: str) -> dict[str, list[str]]:
    """Returns the command lines of the servers of each layout that benchmarks/sglang_layouts.sh would start."""
    listing = "\n".join(f'echo "{number}, H200, 570"' for number in range(gpus))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{listing}\n")
    (folder / "nvidia-smi").chmod(0o755)
    found = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable, "MODEL_FOLDER": str(folder / "models")}
    environment = {**os.environ, **found, **variables}
    command = [LAYOUTS_SCRIPT, folder / "out", "--plan"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    _, *parts = re.split(r"^== (.*)\n", done.stdout, flags=re.MULTILINE)
    return {name: text.splitlines()[1::2] for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_the_script_for_many_gpus_starts_each_layout(tmp_path: Path) -> None:
    planned = planned_layouts(tmp_path, 8, MODELS="60x2", SIDES="staging,kvctl-pipelined")
    assert [*planned] == [f"{each}-60x2" for each in ("tp4-dp4", "tp4-tp4", "dp4-dp4", "tp2-dp2", "tp2-tp1")]
    undivided, prefill, decode, *_, pipelined, _ = planned["tp4-dp4-60x2"]
    assert "--tp-size 4 --pp-size 1 --base-gpu-id 0" in undivided
    assert "SGLANG_DISAGG_STAGING_BUFFER=1" in prefill
    assert "--tp-size 4 --pp-size 1 --dp-size 4 --enable-dp-attention --base-gpu-id 4 --gpu-id-step 1" in decode
    assert "KVCTL_PIPELINE=on" in pipelined
    assert "--max-total-tokens 262144" not in decode


def test_servers_that_share_gpus_have_smaller_pools(tmp_path: Path) -> None:
    (commands,) = planned_layouts(tmp_path, 4, MODELS="32x8", SIDES="kvctl", LAYOUTS="tp4-dp4").values()
    for command in commands:
        assert "--base-gpu-id 0" in command
        assert re.findall(r"--max-total-tokens (\d+)", command)[-1] == "262144"
