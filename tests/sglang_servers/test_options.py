"""Options of servers beside their parallel sizes: pipeline stages, overlap, checksums, optimistic prefill."""

from __future__ import annotations

import re
import threading
import time
from functools import partial

import pytest

from kvctl.lab.demo.sglang_servers import Answer, Prefill, Process, post, together
from tests.sglang_servers.conftest import Servers, Undivided
from tests.sglang_servers.test_tokens import LENGTHS, prompt

OPTIMISTIC = "optimistic-tp1"


@pytest.fixture(autouse=True)
def kvctl_only(mode: str) -> None:
    if mode in ("nixl", "replace"):
        pytest.skip("the options are tried with kvctl's backend, and where it observes SGLang's")


def check_tokens(prefill: Prefill, decode: Process, undivided: Undivided, seeds: tuple[int, ...]) -> None:
    prompts = [prompt(length, seed) for length in LENGTHS for seed in seeds]
    answers = together([partial(prefill.generate, decode, each) for each in prompts], threads=8)
    for each, (first, all_) in zip(prompts, answers, strict=True):
        assert all_.tokens == undivided.tokens(each), len(each)
        assert first.tokens == all_.tokens[:1]


@pytest.mark.parametrize("servers", ["pp2-tp1+pp2"], indirect=True, scope="session")
@pytest.mark.parametrize("decode", ["tp1", "pp2"])
def test_pipeline_stages(servers: Servers, undivided: Undivided, decode: str) -> None:
    check_tokens(*servers.pair(f"pp2-{decode}"), undivided, (41, 42))


@pytest.mark.parametrize("servers", ["overlap-overlap"], indirect=True, scope="session")
def test_overlap_schedule_and_checksums(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("overlap-overlap")
    logs = prefill.process, decode
    before = [log.log_text().count("host checksum of") for log in logs]
    check_tokens(prefill, decode, undivided, (43, 44))
    for log, count in zip(logs, before, strict=True):
        assert "'disable_overlap_schedule': False" in log.log_text()
        assert log.log_text().count("host checksum of") - count == 2 * len(LENGTHS)
        assert "checksum mismatch" not in log.log_text()


def late(prefill: Prefill, decode: Process, tokens: list[int], after_s: float) -> Answer:
    """Sends a request to prefill and, some time later, to decode; returns decode's answer."""
    message = prefill.request(tokens, 16)
    other = threading.Thread(target=post, args=(f"{prefill.process.url}/generate", message))
    other.start()
    try:
        time.sleep(after_s)
        return Answer.read(post(f"{decode.url}/generate", message))
    finally:
        other.join()


@pytest.mark.parametrize("servers", [OPTIMISTIC], indirect=True, scope="session")
def test_prefill_before_decode_has_the_request(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("optimistic-tp1")
    prompts = [prompt(length, seed=49) for length in LENGTHS]
    answers = together([partial(late, prefill, decode, each, 1.0) for each in prompts])
    assert [answer.tokens for answer in answers] == [undivided.tokens(each) for each in prompts]
    assert re.search(r"#optimistic-req: [1-9]", prefill.process.log_text())
    check_tokens(prefill, decode, undivided, (50, 51))
