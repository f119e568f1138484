"""A prefill server of SGLang, a decode server of vLLM and the proxy before them, all with the same tiny Llama."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.bench.sglang_servers import CPU_FLAGS, HOST, Process, Tokens, free_port, wait_ready
from tests.sglang_servers.conftest import ENVIRONMENT as SGLANG
from tests.support.sglang_fleet import Fleet, Prefill, post
from tests.vllm_engines.checkpoints import VOCABULARY, write_model
from tests.vllm_engines.conftest import ENVIRONMENT as VLLM
from tests.vllm_engines.processes import CONNECTOR

ROOT = Path(__file__).parents[2]
# Of SGLang's pages of 16 tokens and vLLM's blocks of 32, prompts that are longer than this are prefilled in chunks.
CHUNK_TOKENS = 64
# How long decode waits for a request that never arrives at SGLang.
UNCLAIMED_S = 4.0
PROXY_S = 60.0


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Servers outlive the test that starts them."""


@pytest.fixture(autouse=True)
def socket_dir() -> None:
    """The directory of admin sockets belongs to the servers."""


@dataclass(frozen=True)
class Servers:
    """The servers.

    Attributes:
        prefill: SGLang.
        decode: vLLM; without the proxy it computes prompts itself.
        proxy: URL of the proxy.
        sockets: directory of the admin sockets.
    """

    prefill: Prefill
    decode: Process
    proxy: str
    model: Path
    sockets: Path

    def ask(self, url: str, prompt: Tokens, tokens: int = 16, **more: Any) -> Tokens:
        """Returns the tokens that a completion of greedy sampling has."""
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = post(f"{url}/v1/completions", {**body, "return_token_ids": True, **more})
        return list(answer["choices"][0]["token_ids"])

    def forget(self) -> None:
        """Empties the prefix cache of decode."""
        post(f"{self.decode.url}/reset_prefix_cache", {})

    def alone(self, prompt: Tokens, tokens: int = 16) -> Tokens:
        """Returns the tokens of vLLM alone; its prefix cache is empty before and afterwards."""
        self.forget()
        found = self.ask(self.decode.url, prompt, tokens)
        self.forget()
        return found


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    folder = Path(tempfile.mkdtemp(prefix="kv-both-", dir="/tmp"))  # short enough for sun_path
    print(f"logs: {folder}")
    sockets = folder / "sockets"
    sockets.mkdir(mode=0o700)
    write_model(folder / "model", "llama")
    common = {"KVCTL_SOCKET_DIR": str(sockets)}
    fleet = Fleet(
        Path(os.environ["SGLANG_VENV"]) / "bin" / "python",
        folder / "model",
        folder,
        CPU_FLAGS,
        {**SGLANG, **common, "KVCTL_UNCLAIMED_S": str(UNCLAIMED_S)},
    )
    prefill = fleet.prefill("prefill", "kvctl", "--chunked-prefill-size", str(CHUNK_TOKENS))
    port = free_port()
    transfer = {**CONNECTOR, "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
    command = [os.environ["VLLM_VENV"] + "/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder / "model"), "--host", HOST, "--port", str(port), "--skip-tokenizer-init"]
    command += ["--dtype", "float32", "--block-size", "32", "--num-gpu-blocks-override", "256", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 28)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {**VLLM, **common, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    decode = Process("decode", command, environment, folder / "decode.log", port)
    fleet.processes.append(decode)
    proxy_port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "vllm_proxy.py"), "--port", str(proxy_port)]
    command += ["--sglang-prefill", prefill.process.url, str(prefill.bootstrap_port), "--decode", decode.url]
    proxy = Process("proxy", command, {}, folder / "proxy.log", proxy_port)
    with fleet:
        proxy.start()
        try:
            wait_port(proxy_port)
            yield Servers(prefill, decode, proxy.url, folder / "model", sockets)
        finally:
            proxy.end()


def wait_port(port: int) -> None:
    """Waits until the proxy accepts connections."""
    deadline = time.monotonic() + PROXY_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex((HOST, port)):
                return
        assert time.monotonic() < deadline, f"the proxy does not listen after {PROXY_S:g} s"
        time.sleep(0.1)


def restart(process: Process) -> None:
    """Starts a killed server again."""
    process.start()
    wait_ready([process])


def prompt_of(length: int, seed: object = 0) -> Tokens:
    chance = random.Random(f"{seed}/{length}")
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]
