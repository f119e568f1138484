"""Options of servers beside their parallel sizes: pipeline stages, overlap, checksums, optimistic prefill, roles."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from typing import Any

import pytest

from kvctl.lab.bench.sglang_servers import Process, ServerError, together
from tests.sglang_servers.conftest import GPUS, SWITCH_PORT, Servers, Undivided
from tests.sglang_servers.test_kvctl import rows
from tests.sglang_servers.test_tokens import LENGTHS, prompt
from tests.support.sglang_fleet import Answer, Prefill, post

OPTIMISTIC = "optimistic-tp1"
pytestmark = pytest.mark.modes(
    "kvctl", "observe", reason="the options are tried with kvctl's backend, and where it observes SGLang's"
)
FEWER_STAGES = pytest.mark.modes(
    "kvctl", reason="SGLang's NIXL backend lacks layer numbers for it in pools of plain MHA"
)


def check_tokens(prefill: Prefill, decode: Process, undivided: Undivided, seeds: tuple[int, ...]) -> None:
    prompts = [prompt(length, seed) for length in LENGTHS for seed in seeds]
    answers = together([partial(prefill.generate, decode, each) for each in prompts], threads=8)
    for each, (first, all_) in zip(prompts, answers, strict=True):
        assert all_.tokens == undivided.tokens(each), len(each)
        assert first.tokens == all_.tokens[:1]


@pytest.mark.parametrize("servers", ["pp2-tp1+pp2"], indirect=True, scope="session")
@pytest.mark.parametrize("decode", [pytest.param("tp1", marks=FEWER_STAGES), "pp2"])
def test_pipeline_stages(servers: Servers, undivided: Undivided, decode: str) -> None:
    check_tokens(*servers.pair(f"pp2-{decode}"), undivided, (41, 42))


def finished(servers: Servers) -> list[dict[str, Any]]:
    return rows(servers, "rooms", "history", "-n", "1000")


@pytest.mark.parametrize("servers", ["tp1+attention2-attention2"], indirect=True, scope="session")
@pytest.mark.parametrize("prefill", ["tp1", "attention2"])
def test_dp_attention(servers: Servers, prefill: str) -> None:
    """Each of the two ranks holds all heads of its own requests; kvctl shows every room on one rank of each side."""
    assert servers.alone is not None
    before = {row["room"] for row in finished(servers)}
    check_tokens(*servers.pair(f"{prefill}-attention2"), servers.alone, (59, 60))
    rooms = [row for row in finished(servers) if row["room"] not in before]
    assert {row["state"] for row in rooms} == {"Success"}
    for role in ("prefill", "decode"):
        ranks = {row["room"]: row["agent"] for row in rooms if row["role"] == role}
        assert len(ranks) == 2 * len(LENGTHS) == sum(row["role"] == role for row in rooms)
        if (role, prefill) != ("prefill", "tp1"):
            assert {rank.partition("@")[0] for rank in ranks.values()} == {f"{role}-dp0-tp0", f"{role}-dp1-tp0"}


@pytest.mark.parametrize("servers", ["overlap-overlap"], indirect=True, scope="session")
def test_overlap_schedule_and_checksums(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("overlap-overlap")
    logs = prefill.process, decode
    before = [log.log_text().count("host checksum of") for log in logs]
    check_tokens(prefill, decode, undivided, (43, 44))
    for log, count in zip(logs, before, strict=True):
        assert "'disable_overlap_schedule': False" in log.log_text()
        if not GPUS:  # there SGLang's kernel computes them, without a line in the log
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


def change_role(server: Process, role: str) -> None:
    """Gives an idle server a role, `prefill` or `decode`.

    Raises:
        ServerError: SGLang rejects the change; the text has the reason.
    """
    answer = post(f"{server.url}/pd_role_switch", {"new_role": role, "decode_cuda_graph_memory_gb": 0})
    assert answer["success"], answer


@pytest.mark.modes("kvctl", "replace", reason="SGLang's NIXL backend supports no change of roles")
@pytest.mark.parametrize("servers", ["switch-switch"], indirect=True, scope="session")
def test_servers_change_roles_and_back(servers: Servers, undivided: Undivided) -> None:
    prefill, second = servers.pair("switch-switch")
    first = prefill.process
    pairs = ((prefill, second), (Prefill(second, SWITCH_PORT), first), (prefill, second))
    for turn, (prefill, decode) in enumerate(pairs):
        if turn:
            change_role(prefill.process, "prefill")
            change_role(decode, "decode")
        check_tokens(prefill, decode, undivided, (52 + turn,))
        shared = prompt(200, seed=55)
        cached = []
        for suffix in (prompt(20, seed=56), prompt(90, seed=57)):
            _first, answer = prefill.generate(decode, shared + suffix)
            assert answer.tokens == undivided.tokens(shared + suffix)
            cached.append(answer.cached)
        assert cached == [0, 192]  # a cache of another role would have answered the first
    for server in (first, second):
        assert "leak detected" not in server.log_text()


@pytest.mark.modes("kvctl", reason="SGLang's own backends accept it, and leak pages")
@pytest.mark.parametrize("servers", [OPTIMISTIC], indirect=True, scope="session")
def test_prefill_server_without_a_decode_radix_cache_stays_one(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("optimistic-tp1")
    with pytest.raises(ServerError, match="--disaggregation-decode-enable-radix-cache or --disable-radix-cache"):
        change_role(prefill.process, "decode")
    check_tokens(prefill, decode, undivided, (58,))
