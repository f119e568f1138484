"""Engines killed and stopped under load: the others answer with the right tokens, and get their blocks back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.vllm_engines.conftest import CHUNK_TOKENS, Engines, Reference, prompt_of, wait_idle
from tests.vllm_engines.processes import Pair, Request, start_all

LENGTH = 3 * CHUNK_TOKENS + 40
# Beside the time that decode takes for the prompts without a transfer.
DETECTED_S = 2.0


@pytest.fixture
def prompts() -> list[list[int]]:
    return [prompt_of(LENGTH, seed=number) for number in range(8)]


def submit_until_chunks_move(pair: Pair, prompts: list[list[int]]) -> list[tuple[Request, Request]]:
    """Submits prompts to both engines; prefill has computed the first half of them, and holds."""
    pair.prefill.call("hold", True)
    requests = [pair.submit(prompt) for prompt in prompts]
    half = len(prompts) * LENGTH // 2
    pair.prefill.wait_for_counts(lambda counts: counts["computed_tokens"] >= half, stepping=True)
    return requests


def seconds_of(action: Callable[[], object]) -> float:
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def test_prefill_is_killed(pair: Pair, engines: Engines, reference: Reference, prompts: list[list[int]]) -> None:
    expected = [reference(prompt) for prompt in prompts]

    def alone() -> None:
        for request in [pair.decode.submit(prompt, 16) for prompt in prompts]:
            pair.decode.answer(request)

    alone_s = seconds_of(alone)
    assert pair.decode.call("reset")
    failing = engines.pair("prefill", "decode-fail")
    for each in (pair, failing):  # of a connection that exists
        assert each.generate(prompts[0]) == expected[0]
        assert each.decode.call("reset")
    assert pair.prefill.call("reset")
    requests = submit_until_chunks_move(pair, prompts)
    refused = failing.receive(prompts[0])
    killed = time.monotonic()
    pair.prefill.kill()
    answers = [pair.decode.answer(received) for _, received in requests]
    taken_s = max(answer.finished for answer in answers) - killed
    assert [answer.tokens for answer in answers] == expected
    error = failing.decode.answer(refused)
    assert (error.finish, error.tokens) == ("error", [])
    error_s = error.finished - killed
    print(
        f"prefill killed: error after {error_s:.2f} s; answers after {taken_s:.2f} s, {alone_s:.2f} s without transfer"
    )
    assert taken_s < DETECTED_S + alone_s
    assert error_s < DETECTED_S
    wait_idle(failing.decode)
    start_all([pair.prefill])
    assert [answer.tokens for answer in pair.generate_all(prompts)] == expected


def test_decode_is_killed(pair: Pair, reference: Reference, prompts: list[list[int]]) -> None:
    expected = [reference(prompt) for prompt in prompts]
    requests = submit_until_chunks_move(pair, prompts)
    pair.decode.kill()
    pair.prefill.call("hold", False)
    for sent, _ in requests:
        assert len(pair.prefill.answer(sent).tokens) == 1
    wait_idle(pair.prefill)
    start_all([pair.decode])
    assert [answer.tokens for answer in pair.generate_all(prompts)] == expected


@pytest.fixture
def stop(pair: Pair) -> Iterator[Callable[[], None]]:
    """Stops the prefill engine; it goes on when the test ends, if not before."""
    yield lambda: pair.prefill.signal(signal.SIGSTOP)
    pair.prefill.signal(signal.SIGCONT)


def test_prefill_stops_for_a_moment(
    pair: Pair, reference: Reference, prompts: list[list[int]], stop: Callable[[], None]
) -> None:
    expected = [reference(prompt) for prompt in prompts]
    other = prompt_of(100, seed="other")
    expected_of_other = reference(other)
    requests = submit_until_chunks_move(pair, prompts)
    pair.prefill.call("hold", False)
    stop()
    assert pair.decode.answer(pair.decode.submit(other, 16)).tokens == expected_of_other
    pair.prefill.signal(signal.SIGCONT)
    assert [pair.decode.answer(received).tokens for _, received in requests] == expected


@pytest.mark.parametrize("pair", ["prefill decode-impatient"], indirect=True)
def test_prefill_stops_until_it_is_taken_for_lost(
    pair: Pair, reference: Reference, prompts: list[list[int]], stop: Callable[[], None]
) -> None:
    expected = [reference(prompt) for prompt in prompts]
    others = [prompt_of(900, seed=number) for number in range(8)]
    expected_of_others = [reference(prompt) for prompt in others]
    requests = submit_until_chunks_move(pair, prompts)
    pair.prefill.call("hold", False)
    stop()
    assert [pair.decode.answer(received).tokens for _, received in requests] == expected
    # These take all blocks that the rooms had; a late write of the stopped process would change their tokens.
    answers = [pair.decode.submit(prompt, 16) for prompt in others]
    pair.prefill.signal(signal.SIGCONT)
    assert [pair.decode.answer(each).tokens for each in answers] == expected_of_others
    for sent, _ in requests:
        assert len(pair.prefill.answer(sent).tokens) == 1
