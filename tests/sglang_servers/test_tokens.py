"""Greedy tokens of prefill/decode pairs equal those of the undivided server."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvctl.lab.bench.sglang_checkpoint import VOCABULARY
from kvctl.lab.bench.sglang_servers import Tokens, generation, together
from tests.sglang_servers.conftest import CHUNK_TOKENS, Servers, Undivided
from tests.support.sglang_fleet import post

# Around the page size of 16, and several chunks.
LENGTHS = (1, 15, 16, 17, 64, 100, 333)
REPLICAS = pytest.mark.modes(
    "kvctl",
    "replace",
    reason="SGLang's senders refuse every second room on replicas: they take each for dp rank 0",
)


def prompt(length: int, seed: int = 0) -> Tokens:
    return [random.Random(f"{seed}/{each}").randrange(3, VOCABULARY) for each in range(length)]


@pytest.mark.parametrize(
    ("servers", "pair"),
    [
        ("tp1+tp2-tp1", "tp1-tp1"),
        ("tp1+tp2-tp1", "tp2-tp1"),
        ("tp1-tp2+dp2", "tp1-tp2"),
        ("tp1-tp2+dp2", "tp1-dp2"),
        pytest.param("dp2-tp1", "dp2-tp1", marks=REPLICAS),
    ],
    indirect=["servers"],
    scope="session",
)
def test_tokens_of_a_pair(servers: Servers, undivided: Undivided, pair: str) -> None:
    prefill, decode = servers.pair(pair)
    prompts = [prompt(length, seed) for length in LENGTHS for seed in (1, 2)]
    answers = together([partial(prefill.generate, decode, each) for each in prompts], threads=8)
    for each, (first, all_) in zip(prompts, answers, strict=True):
        assert all_.tokens == undivided.tokens(each), len(each)
        assert first.tokens == all_.tokens[:1]


@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_a_long_prompt_is_prefilled_in_chunks(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("tp1-tp1")
    long = prompt(5 * CHUNK_TOKENS + 3, seed=3)
    before = prefill.process.log_text().count("Prefill batch")
    _first, answer = prefill.generate(decode, long)
    assert answer.tokens == undivided.tokens(long)
    assert prefill.process.log_text().count("Prefill batch") - before == 6


@pytest.mark.parametrize("servers", ["tp1-tp2+dp2"], indirect=True, scope="session")
def test_a_prefix_in_the_cache_of_prefill(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("tp1-tp2")
    shared = prompt(200, seed=4)
    for suffix in (prompt(20, seed=5), prompt(90, seed=6)):
        first, answer = prefill.generate(decode, shared + suffix)
        assert answer.tokens == undivided.tokens(shared + suffix)
    assert first.cached >= 192


@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
@pytest.mark.parametrize("pair", ["tp1-tp1", "tp2-tp1"])
def test_a_prefix_in_the_cache_of_decode(servers: Servers, undivided: Undivided, pair: str) -> None:
    prefill, decode = servers.pair(pair)
    shared = prompt(200, seed=pair)
    for suffix in (prompt(20, seed=7), prompt(90, seed=8), prompt(90, seed=8)):
        _first, answer = prefill.generate(decode, shared + suffix)
        assert answer.tokens == undivided.tokens(shared + suffix)
    assert answer.cached >= 192


@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_requests_through_the_router(servers: Servers, undivided: Undivided) -> None:
    prompts = [prompt(length, seed=9) for length in LENGTHS]
    url = f"{servers.router.url}/generate"
    replies = together([partial(post, url, generation(each, 16)) for each in prompts])
    assert [reply["output_ids"] for reply in replies] == [undivided.tokens(each) for each in prompts]
