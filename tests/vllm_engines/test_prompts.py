"""Prefill computed another prompt than decode asks for: decode computes it itself, and the answer is right."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_engines.conftest import Reference, prompt_of, room_record
from tests.vllm_engines.processes import Pair, Tokens

PROMPT = prompt_of(60, seed="prompt")
OTHER = prompt_of(60, seed="other")
FAILED = "KV_PLAN_MISMATCH"


def code(transfer: str, role: str) -> Any:
    return (room_record(transfer, role)["failure"] or {}).get("code")


@pytest.mark.parametrize(
    ("computed", "asked"),
    [
        (PROMPT[:50], PROMPT),  # as many blocks of 32 tokens: the rows behind the prompt have what was there before
        (PROMPT[:59], PROMPT),  # a proxy that appends a token
        (PROMPT, PROMPT[:59]),
        (OTHER, PROMPT),
    ],
)
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_another_prompt_under_one_id(
    pair: Pair, reference: Reference, computed: Tokens, asked: Tokens, first: str
) -> None:
    expected, transfer = reference(asked), uuid.uuid4().hex
    for number in range(3):  # no block is empty
        pair.generate(prompt_of(60, seed=number))
    pair.decode.call("reset")
    pair.prefill.call("reset")
    calls: list[Callable[[], Any]] = [lambda: pair.send(computed, transfer), lambda: pair.receive(asked, transfer)]
    made = [call() for call in (calls if first == "prefill" else calls[::-1])]
    sent, received = made if first == "prefill" else made[::-1]
    assert pair.decode.answer(received).tokens == expected
    pair.prefill.answer(sent)
    assert code(transfer, "decode") == FAILED
    assert code(transfer, "prefill") == FAILED


def test_a_reference_is_used_again_for_another_prompt(pair: Pair, reference: Reference) -> None:
    expected = [reference(prompt) for prompt in (PROMPT, OTHER)]
    answer = pair.prefill.answer(pair.send(PROMPT, uuid.uuid4().hex))
    for prompt, tokens in zip((PROMPT, OTHER), expected, strict=True):
        assert pair.decode.answer(pair.decode.submit(prompt, 16, answer.params)).tokens == tokens


def test_two_prompts_under_one_id(pair: Pair, reference: Reference) -> None:
    expected, transfer = [reference(prompt) for prompt in (PROMPT, OTHER)], uuid.uuid4().hex
    sent = [pair.send(prompt, transfer) for prompt in (PROMPT, OTHER)]
    received = [pair.receive(prompt, transfer) for prompt in (PROMPT, OTHER)]
    for request in sent:
        pair.prefill.answer(request)
    assert [pair.decode.answer(request).tokens for request in received] == expected
