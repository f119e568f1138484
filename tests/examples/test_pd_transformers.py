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


@pytest.fixture(scope="module")
def model(pd: ModuleType) -> Any:
    return pd.build_model()


def hand_over(pd: ModuleType, model: Any, prompt: torch.Tensor, head_of: Callable[[int], int]) -> list[int]:
    """Prefill in four ranks, copy every page by hand, decode; `head_of` says where each model head lands."""
    decode = pd.PagedKV(range(pd.KV_HEADS), 40, PAGE, slots=1, seed=9)
    decode_pages = decode.allocate(len(prompt))
    decode_rows = decode._rows(decode_pages)
    for tp in range(pd.PREFILL_TP):
        per_rank = pd.KV_HEADS // pd.PREFILL_TP
        rank = pd.PagedKV(range(tp * per_rank, (tp + 1) * per_rank), 20, PAGE, slots=1, seed=tp)
        pages = rank.allocate(len(prompt))
        sent: list[int] = []
        for chunk_pages, token in pd.prefill_in_chunks(model, rank, prompt, pages, CHUNK):
            sent += chunk_pages
            rank.first_tokens[0] = token
        assert sent == pages
        rows = rank._rows(pages)
        for layer in range(pd.LAYERS):
            for local, head in enumerate(rank.heads):
                decode.k[layer][decode_rows, head_of(head)] = rank.k[layer][rows, local]
                decode.v[layer][decode_rows, head_of(head)] = rank.v[layer][rows, local]
        decode.first_tokens[0] = rank.first_tokens[0]
    cache = decode.load(decode_pages, len(prompt))
    tokens: list[int] = pd.continue_greedily(model, cache, int(decode.first_tokens[0]), NEW_TOKENS)
    return tokens


@pytest.mark.parametrize("length", [1, PAGE - 1, CHUNK, 3 * CHUNK + PAGE + 3])
def test_pages_carry_everything_that_decode_needs(pd: ModuleType, model: Any, length: int) -> None:
    prompt = torch.arange(length) * 37 % pd.VOCABULARY
    assert hand_over(pd, model, prompt, lambda head: head) == pd.generate_undivided(model, prompt, NEW_TOKENS)


def test_a_head_in_another_heads_place_shows_in_the_tokens(pd: ModuleType, model: Any) -> None:
    prompt = torch.arange(3 * CHUNK + 5) * 37 % pd.VOCABULARY
    swapped = hand_over(pd, model, prompt, lambda head: head ^ 1)
    assert swapped != pd.generate_undivided(model, prompt, NEW_TOKENS)


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


def test_every_token_equals_the_undivided_run() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--prompts", "8", "--new-tokens", "16", "--timeout", "80"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "all 8 prompts token-identical"
    assert run.stdout.count("identical") == 9


def test_a_rank_that_dies_ends_it_all_and_is_named(socket_dir: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--prompts", "64", "--new-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        victim = socket_dir / f"pd-{run.pid}-prefill-2.sock"
        deadline = time.monotonic() + 60
        while not victim.exists():
            assert run.poll() is None, "it ended before its ranks were up"
            assert time.monotonic() < deadline, "its ranks did not come up"
            time.sleep(0.05)
        os.kill(int(victim.with_suffix(".lock").read_text()), signal.SIGKILL)
        _, errors = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "prefill 2 died with exit code -9" in errors
    assert [path.name for path in socket_dir.glob("*.sock")] == [victim.name], "the other ranks closed their agents"
    victim.unlink()
