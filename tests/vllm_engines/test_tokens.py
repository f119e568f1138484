"""Tokens of a pair of engines equal those of an undivided engine."""

from __future__ import annotations

import pytest

from tests.vllm_engines.conftest import BLOCK_TOKENS, Reference, prompt_of, room_record
from tests.vllm_engines.processes import Pair

ORDERS = ("both", "prefill_first")
# Around blocks of 32 tokens and chunks of 128.
LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 500, 1500)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt(pair: Pair, reference: Reference, order: str, length: int) -> None:
    prompt = prompt_of(length)
    expected = reference(prompt)
    assert pair.generate(prompt, order) == expected
    assert pair.prefill.call("counts")["computed_tokens"] == length
    # Decode computes the last token of the prompt, and each token that it generates but the last.
    assert pair.decode.call("counts")["computed_tokens"] == 16


@pytest.mark.parametrize("order", ORDERS)
def test_concurrent_prompts(pair: Pair, reference: Reference, order: str) -> None:
    prompts = [prompt_of(length, seed=order) for length in (40, 300, 7, 64, 300, 129, 650, 33)]
    expected = [reference(prompt) for prompt in prompts]
    answers = pair.generate_all([*prompts, prompts[1]], order)
    assert [answer.tokens for answer in answers] == [*expected, expected[1]]


@pytest.mark.parametrize("order", ORDERS)
def test_a_prefix_that_decode_has_cached(pair: Pair, reference: Reference, order: str) -> None:
    shared = prompt_of(200, seed=order)
    prompts = [shared, shared + prompt_of(70, seed=1), shared + prompt_of(70, seed=2)]
    expected = [reference(prompt) for prompt in prompts]
    moved = []
    for prompt, tokens in zip(prompts, expected, strict=True):
        [answer] = pair.generate_all([prompt], order)
        assert answer.tokens == tokens
        moved.append(room_record(answer.transfer, "decode")["pages"])
    # 200 tokens fill six blocks and a part of the seventh; 270 need nine.
    assert moved == [7, 3, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_a_prefix_that_prefill_has_cached(pair: Pair, reference: Reference, order: str) -> None:
    shared = prompt_of(200, seed=order)
    prompts = [shared, shared + prompt_of(70, seed=3)]
    expected = [reference(prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert pair.decode.call("reset")
        [answer] = pair.generate_all([prompt], order)
        assert answer.tokens == tokens
    assert room_record(answer.transfer, "decode")["pages"] == 9
    assert pair.prefill.call("counts")["computed_tokens"] == 270 - 200 // BLOCK_TOKENS * BLOCK_TOKENS + 200
