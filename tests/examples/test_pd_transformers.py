"""examples/pd_transformers.py: the paging is right without an agent, and the whole is right with one."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "pd_transformers.py"
PAGE, CHUNK, NEW_TOKENS = 16, 32, 12


@pytest.fixture(scope="module")
def pd() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pd_transformers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pd_transformers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["llama", "mla"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(pd: ModuleType, name: str) -> Any:
    return pd.build_model(name)


def hand_over(
    pd: ModuleType, model: Any, options: Any, prompt: torch.Tensor, head_of: Callable[[int], int]
) -> list[int]:
    """Prefill on every rank, copy every page by hand, decode; `head_of` says where each model head lands."""
    shape = options.shape
    decode = pd.PagedKV(shape, pd.Rank(), 40, PAGE, slots=1, seed=9)
    decode_pages = decode.allocate(len(prompt))
    decode_rows = decode._rows(decode_pages)
    for place, rank in enumerate(options.prefill_ranks):
        kv = pd.PagedKV(shape, rank, 20, PAGE, slots=1, seed=place)
        pages = kv.allocate(len(prompt))
        computed: list[int] = []
        prefill = pd.Prefill(model, kv, computed.append)
        for start in range(0, len(prompt), CHUNK):
            token = prefill.run(prompt, pages, start, min(start + CHUNK, len(prompt)))
        assert computed == list(kv.layers) * -(-len(prompt) // CHUNK)
        for hooked in model.model.layers:
            hooked._forward_hooks.clear()
        rows = kv._rows(pages)
        for layer in kv.layers:
            for ours, theirs in zip(kv._pair(layer), decode._pair(layer), strict=True):
                for local, head in enumerate(range(kv.heads.start, kv.heads.stop)):
                    theirs[decode_rows, head_of(head)] = ours[rows, local]
    cache = decode.load(decode_pages, len(prompt))
    tokens: list[int] = pd.continue_greedily(model, cache, token, NEW_TOKENS)
    return tokens


@pytest.mark.parametrize("length", [1, PAGE - 1, CHUNK, 3 * CHUNK + PAGE + 3])
def test_pages_carry_everything_that_decode_needs(pd: ModuleType, model: Any, name: str, length: int) -> None:
    options = pd.parse(["--model", name, "--prefill-tp", "2", "--prefill-pp", "3"], "unused")
    prompt = torch.arange(length) * 37 % pd.VOCABULARY
    assert hand_over(pd, model, options, prompt, lambda head: head) == pd.generate_undivided(model, prompt, NEW_TOKENS)


def test_a_head_in_another_heads_place_shows_in_the_tokens(pd: ModuleType) -> None:
    model = pd.build_model("llama")
    prompt = torch.arange(3 * CHUNK + 5) * 37 % pd.VOCABULARY
    swapped = hand_over(pd, model, pd.parse([], "unused"), prompt, lambda head: head ^ 1)
    assert swapped != pd.generate_undivided(model, prompt, NEW_TOKENS)


def test_a_layout_that_cannot_be_is_refused_with_the_arithmetic(
    pd: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        pd.main(["--prefill-tp", "3"])
    assert "8 KV heads cannot be laid out over tp 3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        pd.main(["--prefill-pp", "11"])
    assert "10 layers cannot be divided into pp=11 stages" in capsys.readouterr().err


def test_prompts_cover_page_and_chunk_boundaries(pd: ModuleType) -> None:
    options = pd.parse(["--chunk-tokens", str(CHUNK), "--page-size", str(PAGE)], "unused")
    lengths = options.lengths()
    assert {length % CHUNK == 0 for length in lengths} == {True, False}
    assert {length % PAGE == 0 for length in lengths} == {True, False}
    assert {length > 2 * CHUNK for length in lengths} == {True, False}
    assert min(lengths) < PAGE


def test_chunks_are_whole_pages(pd: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        pd.main(["--chunk-tokens", "40", "--page-size", "16"])
    assert "--chunk-tokens 40 is not a multiple of --page-size 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "sent_by_groups"),
    [
        ([], 0),
        (["--prefill-tp", "2", "--prefill-pp", "2", "--pipelined", "--transport", "mooncake"], 12),
        (["--prefill-tp", "2", "--prefill-cp", "2", "--model", "mla", "--pipelined"], 12),
    ],
    ids=["tp4", "tp2-pp2-pipelined-mooncake", "tp2-cp2-mla-pipelined"],
)
def test_every_token_equals_the_undivided_run(layout: list[str], sent_by_groups: int) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--prompts", "4", "--new-tokens", "12", "--timeout", "240"]
    run = subprocess.run([*command, *layout], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "all 4 prompts token-identical"
    assert sum(line.endswith(" identical") for line in lines) == 4
    said = f"{sent_by_groups} forwards of 4 prefill ranks were sent by layer groups"
    assert (said in lines) == bool(sent_by_groups)


def test_a_rank_that_dies_ends_it_all_and_is_named(socket_dir: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--prefill-tp", "2", "--prompts", "64", "--new-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            ranks = {f"pd-{run.pid}-{role}-{rank}.sock" for role in ("prefill", "decode") for rank in range(2)}
            victim = socket_dir / f"pd-{run.pid}-prefill-1.sock"
            deadline = time.monotonic() + 180
            # All of them: a rank that starts after the kill would remove the socket of the process that has ended.
            while not ranks <= {path.name for path in socket_dir.glob("*.sock")}:
                assert run.poll() is None, "it ended before its ranks were up"
                assert time.monotonic() < deadline, "its ranks did not come up"
                time.sleep(0.05)
            os.kill(int(victim.with_suffix(".lock").read_text()), signal.SIGKILL)
            _, errors = run.communicate(timeout=100)
        finally:
            run.kill()
    assert run.returncode == 1
    assert "prefill 1 died with exit code -9" in errors
    assert [path.name for path in socket_dir.glob("*.sock")] == [victim.name], "the other ranks closed their agents"
    victim.unlink()
