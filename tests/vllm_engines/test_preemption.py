"""Requests that an engine preempts, on demand and because its blocks run out."""

from __future__ import annotations

import pytest

from tests.vllm_engines.conftest import CHUNK_TOKENS, Reference, prompt_of, room_record
from tests.vllm_engines.processes import Pair
from tests.vllm_engines.test_tokens import ORDERS


@pytest.mark.parametrize("order", ORDERS)
def test_prefill_preempts_a_prompt_that_is_partly_sent(pair: Pair, reference: Reference, order: str) -> None:
    prompt = prompt_of(5 * CHUNK_TOKENS + 40, seed=order)
    expected = reference(prompt)
    pair.prefill.call("hold", True)
    sent = pair.send(prompt)
    if order == "both":
        received = pair.receive(prompt, sent.transfer)
    pair.prefill.call("step", 3)
    pair.prefill.call("preempt_all")
    pair.prefill.call("step", 1)
    pair.prefill.call("hold", False)
    params = pair.prefill.answer(sent).params
    if order == "prefill_first":
        received = pair.decode.submit(prompt, 16, params)
    assert pair.decode.answer(received).tokens == expected
    assert pair.prefill.call("counts")["preemptions"] == 1
    assert room_record(sent.transfer, "decode")["state"] == "Success"


def test_decode_preempts_a_request_that_it_has_received(pair: Pair, reference: Reference) -> None:
    prompt = prompt_of(300, seed=3)
    expected = reference(prompt, 64)
    pair.decode.call("hold", True)
    sent, received = pair.submit(prompt, 64)
    pair.decode.wait_for_counts(lambda counts: counts["computed_tokens"] >= 20, stepping=True)
    pair.decode.call("preempt_all")
    pair.decode.call("hold", False)
    assert pair.decode.answer(received).tokens == expected
    assert pair.prefill.answer(sent).tokens == expected[:1]
    assert pair.decode.call("counts")["preemptions"] == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pair", ["prefill-small decode-small"], indirect=True)
def test_blocks_run_out_on_both_sides(pair: Pair, reference: Reference, order: str) -> None:
    prompts = [prompt_of(300, seed=f"{order} {number}") for number in range(8)]
    expected = [reference(prompt, 100) for prompt in prompts]
    answers = pair.generate_all(prompts, order, tokens=100)
    assert [answer.tokens for answer in answers] == expected
    assert pair.prefill.call("counts")["preemptions"] > 0
    assert pair.decode.call("counts")["preemptions"] > 0
