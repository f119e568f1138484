"""kvctl's connector as a child of vLLM's `MultiConnector`, beside vLLM's `ExampleConnector`, which stores prompts."""

from __future__ import annotations

import pytest

from tests.vllm_engines.conftest import Reference, prompt_of, room_record
from tests.vllm_engines.processes import Pair
from tests.vllm_engines.test_tokens import ORDERS


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pair", ["prefill-multi decode", "prefill decode-multi"], indirect=True)
def test_prompts(pair: Pair, reference: Reference, order: str) -> None:
    prompts = [prompt_of(length, seed=order) for length in (1, 40, 64, 65, 300)]
    expected = [reference(prompt) for prompt in prompts]
    answers = pair.generate_all(prompts, order)
    assert [answer.tokens for answer in answers] == expected
    assert pair.decode.call("counts")["computed_tokens"] == 16 * len(prompts)


@pytest.mark.parametrize("pair", ["prefill-multi decode"], indirect=True)
def test_a_prompt_that_prefill_loads_from_the_other_connector(pair: Pair, reference: Reference) -> None:
    prompt = prompt_of(300, seed=3)
    expected = reference(prompt)
    assert pair.generate(prompt) == expected
    for engine in (pair.prefill, pair.decode):
        assert engine.call("reset")
    [answer] = pair.generate_all([prompt])
    assert answer.tokens == expected
    assert pair.prefill.call("counts")["computed_tokens"] == 300 - 288  # nine blocks were stored
    assert room_record(answer.transfer, "decode")["pages"] == 10
