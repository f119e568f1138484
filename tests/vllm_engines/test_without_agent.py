"""Faults of stock servers with NixlConnector that `kvctl doctor -e URL` names by their metrics alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.bench.sglang_servers import HOST, Process, ServerError, together, wait_ready
from kvctl.lab.tcp_ports import free_port
from tests.support.sglang_fleet import post
from tests.vllm_engines.checkpoints import write_model
from tests.vllm_engines.conftest import ENVIRONMENT, prompt_of
from tests.vllm_engines.processes import Params, Tokens

# A reading takes seven seconds, and several may be needed.
NAMED_S = 300.0
LEASE_S = 6
ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--seed", "7", "--enforce-eager", "--max-model-len", "2048"),
    *("--block-size", "32", "--num-gpu-blocks-override", "256", "--kv-cache-memory-bytes", str(1 << 28)),
)


@dataclass(frozen=True)
class Servers:
    """A prefill and a decode server without kvctl, and their model."""

    prefill: Process
    decode: Process
    model: str

    def complete(self, server: Process, prompt: Tokens, tokens: int, params: Params) -> Any:
        document = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return post(f"{server.url}/v1/completions", {**document, "kv_transfer_params": params})

    def computed(self, prompt: Tokens) -> Params:
        """Lets prefill compute a prompt; returns the parameters for decode."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        return dict(self.complete(self.prefill, prompt, 1, wanted)["kv_transfer_params"])


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Servers]:
    model = folder / "llama"
    if not model.exists():
        write_model(model, model.name)
    prefill, decode = both = [server(folder, model, role) for role in ("kv_producer", "kv_consumer")]
    try:
        for each in both:
            each.start()
        wait_ready(both)
        yield Servers(prefill, decode, str(model))
    finally:
        together([each.end for each in both])


def server(folder: Path, model: Path, role: str) -> Process:
    port = free_port()
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    environment = {
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    command = [f"{os.environ['VLLM_VENV']}/bin/python", "-m", "vllm.entrypoints.openai.api_server", *ARGUMENTS]
    command += ["--model", str(model), "--host", HOST, "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return Process(role, command, environment, folder / f"{role}.log", port)


def kvctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvctl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def wait_named(servers: Servers, expected: set[tuple[str, str]]) -> None:
    """Waits until `kvctl doctor` has named all codes, each with the server that it is about."""
    urls = [option for each in (servers.prefill, servers.decode) for option in ("-e", each.url)]
    deadline, seen = time.monotonic() + NAMED_S, set[tuple[str, str]]()
    while not expected <= seen:
        report = kvctl("doctor", *urls, "-o", "json").stdout
        seen |= {(row["code"], row["subject"]) for row in json.loads(report)["data"]}
        assert time.monotonic() < deadline, f"{expected - seen} not among {seen}; at last {report}"


def place(server: Process) -> str:
    return server.url.removeprefix("http://")


def test_healthy_servers_have_no_problem(servers: Servers) -> None:
    prompt = prompt_of(200, "healthy")
    answer = servers.complete(servers.decode, prompt, 8, servers.computed(prompt))
    assert answer["usage"]["completion_tokens"] == 8
    report = kvctl("doctor", "-e", servers.prefill.url, "-e", servers.decode.url)
    assert report.returncode == 0, report.stdout + report.stderr
    rows = json.loads(kvctl("status", "-e", servers.decode.url, "-o", "json").stdout)["data"]
    assert [(row["role"], row["rooms_finished_total"]["Success"], row["latency"]["count"]) for row in rows] == [
        ("decode", 1, 1)
    ]


def test_leases_expire(servers: Servers) -> None:
    """Nobody reads prompts that prefill has computed."""
    for number in range(3):
        servers.computed(prompt_of(200, f"unread {number}"))
    wait_named(servers, {("KV_HOLD_EXPIRED", place(servers.prefill))})
    found = json.loads(kvctl("logs", str(servers.prefill.log), "-o", "json").stdout)["data"]
    assert [(row["code"], row["lines"]) for row in found] == [("vllm-lease-expired", 3)]


def test_prefill_is_gone(servers: Servers) -> None:
    """Decode reads from a process that has ended; it comes last, since prefill stays away."""
    prompts = [prompt_of(200, f"lost {number}") for number in range(3)]
    computed = [(prompt, servers.computed(prompt)) for prompt in prompts]
    servers.prefill.kill()
    for prompt, params in computed:
        with pytest.raises(ServerError):
            servers.complete(servers.decode, prompt, 8, params)
    wait_named(servers, {("unreachable", place(servers.prefill)), ("KV_REQUESTS_FAILED", place(servers.decode))})
    report = kvctl("logs", str(servers.decode.log), "-o", "json")
    assert report.returncode == 1
    assert {row["code"] for row in json.loads(report.stdout)["data"]} >= {"nixl-disconnected"}
