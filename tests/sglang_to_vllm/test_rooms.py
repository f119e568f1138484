"""Prompts computed by SGLang and continued by vLLM: the tokens are those of vLLM alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.bench.sglang_servers import CPU_FLAGS, Tokens, generation, together
from tests.sglang_servers.conftest import ENVIRONMENT
from tests.sglang_to_vllm.conftest import UNCLAIMED_S, Servers, prompt_of, restart
from tests.support.sglang_fleet import Fleet, post

# Around pages of 16 tokens, blocks of 32 and chunks of 64.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 500, 1200)
# The answer to a request whose prefill is lost, on a busy host.
RECOMPUTED_S = 15.0


def kvctl(servers: Servers, *arguments: str) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-m", "kvctl", *arguments, "-o", "json"],
        env={**os.environ, "KVCTL_SOCKET_DIR": str(servers.sockets)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run
    return list(json.loads(run.stdout)["data"])


def received(servers: Servers) -> list[dict[str, Any]]:
    """Returns the finished rooms of decode, the latest first."""
    return [row for row in kvctl(servers, "rooms", "history") if row["role"] == "decode"]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt(servers: Servers, length: int) -> None:
    prompt = prompt_of(length)
    expected = servers.alone(prompt)
    before = {row["room"] for row in received(servers)}
    assert servers.ask(servers.proxy, prompt) == expected
    [room] = [row for row in received(servers) if row["room"] not in before]
    assert room["state"] == "Success"


def test_concurrent_prompts(servers: Servers) -> None:
    prompts = [prompt_of(length, seed=1) for length in (40, 300, 7, 64, 301, 129, 650, 33)]
    expected = [servers.alone(prompt) for prompt in prompts]
    assert together([partial(servers.ask, servers.proxy, prompt) for prompt in prompts]) == expected


def test_a_prefix_that_both_have_cached(servers: Servers) -> None:
    shared = prompt_of(200, seed=2)
    prompts = [shared + prompt_of(rest, seed=3) for rest in (20, 90)]
    expected = [servers.alone(prompt) for prompt in prompts]
    servers.ask(servers.proxy, shared)
    assert [servers.ask(servers.proxy, prompt) for prompt in prompts] == expected


def test_the_fleet_shows_both_engines(servers: Servers) -> None:
    agents = {row["role"]: row for row in kvctl(servers, "status")}
    engines = {role: row["integration"]["engine"] for role, row in agents.items()}
    assert engines == {"prefill": "sglang", "decode": "vllm"}
    assert agents["prefill"]["dtypes"]["kv"] == "float32"
    assert "float32" in agents["decode"]["dtypes"]["kv"].split(", ")


def test_a_request_that_never_reaches_prefill(servers: Servers) -> None:
    prompt = prompt_of(90, seed=4)
    expected = servers.alone(prompt)
    [row] = kvctl(servers, "bootstrap")
    params = {"do_remote_prefill": True, "transfer_id": 7, "kvctl_prefill": row["registry"]}
    began = time.monotonic()
    assert servers.ask(servers.decode.url, prompt, kv_transfer_params=params) == expected
    assert UNCLAIMED_S < time.monotonic() - began < UNCLAIMED_S + RECOMPUTED_S


def test_prefill_is_killed_under_load(servers: Servers) -> None:
    prompts = [prompt_of(300, seed=seed) for seed in range(4)]
    expected = [servers.alone(prompt) for prompt in prompts]
    stop = threading.Event()
    wrong: list[Tokens] = []
    longest = [0.0] * len(prompts)
    answers = [0] * len(prompts)

    def load(number: int) -> None:
        while not stop.is_set():
            began = time.monotonic()
            if (found := servers.ask(servers.proxy, prompts[number])) != expected[number]:
                wrong.append(found)
            longest[number] = max(longest[number], time.monotonic() - began)
            answers[number] += 1

    def wait_answers(count: int) -> None:
        deadline = time.monotonic() + 60
        wanted = [each + count for each in answers]
        while any(each < most for each, most in zip(answers, wanted, strict=True)):
            assert time.monotonic() < deadline, f"{answers} answers, not {wanted}"
            time.sleep(0.05)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    try:
        wait_answers(3)
        servers.prefill.process.kill()
        wait_answers(3)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert max(longest) < RECOMPUTED_S
    restart(servers.prefill.process)
    servers.forget()
    before = {row["room"] for row in received(servers)}
    assert servers.ask(servers.proxy, prompts[0]) == expected[0]
    assert [row["state"] for row in received(servers) if row["room"] not in before] == ["Success"]


def test_sglang_alone_has_the_same_tokens(servers: Servers) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [servers.alone(prompt) for prompt in prompts]
    python = Path(os.environ["SGLANG_VENV"]) / "bin" / "python"
    environment = {**ENVIRONMENT, "KVCTL_SGLANG": "off"}
    fleet = Fleet(python, servers.model, servers.sockets.parent, CPU_FLAGS, environment)
    undivided = fleet.server("undivided")
    with fleet:
        found = [post(f"{undivided.url}/generate", generation(prompt, 16))["output_ids"] for prompt in prompts]
    assert found == expected
