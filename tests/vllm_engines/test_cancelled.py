"""Requests that are cancelled, or never submitted, on one side or both; the fixture `pair` checks what they leave."""

from __future__ import annotations

import time

import pytest

from tests.vllm_engines.conftest import CHUNK_TOKENS, Reference, prompt_of, room_record
from tests.vllm_engines.processes import Pair

LENGTH = 5 * CHUNK_TOKENS + 40
# A room that prefill never begins: kvctl's default for vLLM, and the time of vLLM's answer.
UNCLAIMED_S = 30.0


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["queued", "first chunk", "third chunk"])
def test_prefill_cancels(pair: Pair, reference: Reference, steps: int) -> None:
    prompt = prompt_of(LENGTH, seed=steps)
    expected = reference(prompt)
    pair.prefill.call("hold", True)
    sent, received = pair.submit(prompt)
    pair.prefill.call("step", steps)
    pair.prefill.abort(sent)
    pair.prefill.call("hold", False)
    assert pair.decode.answer(received).tokens == expected


def test_prefill_cancels_after_its_answer(pair: Pair, reference: Reference) -> None:
    prompt = prompt_of(LENGTH, seed=4)
    expected = reference(prompt)
    sent = pair.send(prompt)
    params = pair.prefill.answer(sent).params
    pair.prefill.abort(sent)
    received = pair.decode.submit(prompt, 16, params)
    assert pair.decode.answer(received).tokens == expected
    assert pair.decode.call("counts")["computed_tokens"] == 16


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["queued", "first chunk", "third chunk"])
@pytest.mark.parametrize("decode_steps", [0, 1], ids=["queued at decode", "waiting for KV"])
def test_decode_cancels(pair: Pair, steps: int, decode_steps: int) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.call("hold", True)
    sent, received = pair.submit(prompt_of(LENGTH))
    pair.decode.call("step", decode_steps)
    pair.prefill.call("step", steps)
    pair.decode.abort(received)
    for engine in (pair.decode, pair.prefill):
        engine.call("hold", False)
    assert len(pair.prefill.answer(sent).tokens) == 1


def test_decode_cancels_after_prefill_has_answered(pair: Pair) -> None:
    sent = pair.send(prompt_of(LENGTH))
    params = pair.prefill.answer(sent).params
    pair.decode.call("hold", True)
    received = pair.decode.submit(prompt_of(LENGTH), 16, params)
    pair.decode.abort(received)
    pair.decode.call("hold", False)


def test_decode_cancels_while_it_generates(pair: Pair) -> None:
    pair.decode.call("hold", True)
    sent, received = pair.submit(prompt_of(300), 1000)
    pair.decode.wait_for_counts(lambda counts: counts["computed_tokens"] >= 5, stepping=True)
    pair.decode.abort(received)
    pair.decode.call("hold", False)
    assert room_record(sent.transfer, "decode")["state"] == "Success"


def test_both_cancel_some_of_many_requests(pair: Pair, reference: Reference) -> None:
    prompts = [prompt_of(400, seed=number) for number in range(8)]
    expected = [reference(prompt) for prompt in prompts]
    requests = [pair.submit(prompt) for prompt in prompts]
    for number, (sent, received) in enumerate(requests):
        if number % 4 in (1, 3):
            pair.decode.abort(received)
        if number % 4 in (2, 3):
            pair.prefill.abort(sent)
    for number, (_, received) in enumerate(requests):
        if number % 4 in (0, 2):
            assert pair.decode.answer(received).tokens == expected[number]


def test_prefill_never_gets_the_request(pair: Pair, reference: Reference) -> None:
    prompt = prompt_of(200, seed=5)
    expected = reference(prompt)
    received = pair.decode.answer(pair.receive(prompt))
    assert received.tokens == expected
    assert received.finished - received.submitted < UNCLAIMED_S + 5
    failure = room_record(received.transfer, "decode")["failure"]
    assert failure["code"] == "KV_ROOM_UNCLAIMED"


def test_decode_never_gets_the_request(pair: Pair) -> None:
    begin = time.monotonic()
    sent = pair.prefill.answer(pair.send(prompt_of(200, seed=6)))
    assert len(sent.tokens) == 1
    pair.prefill.wait_for_counts(lambda counts: counts["requests"] == 0)
    assert time.monotonic() - begin > 20  # `hold_s`, 30 s
    assert room_record(sent.transfer, "prefill")["failure"]["code"] == "KV_HOLD_EXPIRED"
