"""Engines of different tensor and pipeline parallelism, a model with sliding windows, and layers sent one by one."""

from __future__ import annotations

import pytest

from tests.vllm_engines.conftest import Reference, prompt_of, room_record
from tests.vllm_engines.processes import Pair
from tests.vllm_engines.test_tokens import ORDERS

# No MLA: vLLM's kernels for it on CPUs generate other tokens for a prompt in a batch than alone, without transfers too.
STAGES = ("prefill-pp2 decode", "prefill decode-pp2", "prefill-deep decode-deep")
PAIRS = (
    "prefill-windows decode-windows",
    "prefill-tp2 decode",
    "prefill decode-tp2",
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pair", PAIRS + STAGES, indirect=True)
def test_prompts(pair: Pair, reference: Reference, order: str) -> None:
    # Prefill leaves out the last token of a model with windows, so 2 tokens are the fewest that are transferred.
    prompts = [prompt_of(length, seed=order) for length in (2, 31, 64, 65, 300, 700)]
    expected = [reference(prompt) for prompt in prompts]
    answers = pair.generate_all(prompts, order)
    assert [answer.tokens for answer in answers] == expected
    assert [room_record(answer.transfer, "decode")["failure"] for answer in answers] == [None] * len(prompts)


@pytest.mark.parametrize("pair", PAIRS + STAGES, indirect=True)
def test_prefixes_that_both_have_cached(pair: Pair, reference: Reference) -> None:
    shared = prompt_of(200, seed=3)
    prompts = [shared, shared + prompt_of(70, seed=4), shared + prompt_of(90, seed=5)]
    expected = [reference(prompt) for prompt in prompts]
    assert [pair.generate(prompt) for prompt in prompts] == expected


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_prefill_preempts_and_cancels(pair: Pair, reference: Reference) -> None:
    prompts = [prompt_of(400, seed=number) for number in range(3)]
    expected = [reference(prompt) for prompt in prompts]
    pair.prefill.call("hold", True)
    requests = [pair.submit(prompt) for prompt in prompts]
    pair.prefill.call("step", 2)
    pair.prefill.call("preempt_all")
    pair.prefill.abort(requests[1][0])
    pair.prefill.call("hold", False)
    assert [pair.decode.answer(received).tokens for _, received in requests] == expected


@pytest.mark.parametrize("pair", ["prefill-64 decode", "prefill decode-64"], indirect=True)
def test_different_block_sizes_are_refused_on_cpus(pair: Pair, reference: Reference) -> None:
    # vLLM's attention on CPUs orders the elements of a block by its size.
    prompt = prompt_of(300, seed=6)
    expected = reference(prompt)
    [answer] = pair.generate_all([prompt])
    assert answer.tokens == expected
    assert room_record(answer.transfer, "decode")["failure"]["code"] == "KV_COMPAT_MISMATCH"
