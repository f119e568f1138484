"""Pairs of stock SGLang servers, a prefill and a decode server each, with random weights, for benchmarks.

A side is kvctl, observe (SGLang's NIXL backend with the plugin in that mode), replace, nixl or staging (SGLang's own,
without kvctl), or undivided (one server that does both), with KEY=VALUE after slashes for its environment, as in
kvctl/KVCTL_PATH=staged. Servers run without `--sleep-on-idle`: an idle scheduler spins, as by default.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.lab.demo.sglang_servers import CPU_ENVIRONMENT, CPU_FLAGS, Fleet, Prefill, Process, ServerError, generation

BACKENDS = {
    "kvctl": ("kvctl", {"KVCTL_SGLANG": "backend"}),
    "replace": ("nixl", {"KVCTL_SGLANG": "replace"}),
    "observe": ("nixl", {"KVCTL_SGLANG": "observe"}),
    "nixl": ("nixl", {"KVCTL_SGLANG": "off"}),
    "staging": ("nixl", {"KVCTL_SGLANG": "off", "SGLANG_DISAGG_STAGING_BUFFER": "1"}),
    "undivided": ("", {"KVCTL_SGLANG": "off"}),
}
"""--disaggregation-transfer-backend and environment of each side."""
FLAGS = (
    *("--skip-tokenizer-init", "--random-seed", "7", "--page-size", "16", "--max-running-requests", "256"),
    *("--load-format", "dummy"),
)
GPU_FLAGS = (
    *(
        "--max-total-tokens",
        "100000",
        "--mem-fraction-static",
        "0.3",
        "--context-length",
        "32768",
        "--dtype",
        "bfloat16",
    ),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-custom-all-reduce", "--cuda-graph-max-bs-decode", "16", "--cuda-graph-backend-prefill", "disabled"),
)
ROOT = Path(__file__).resolve().parents[1]
TINY_POOL = ("--max-total-tokens", "32768")
NEW_TOKENS = 4
REQUEST_S = 30.0
WARM_UP_REQUESTS = 8


class Model(NamedTuple):
    """Shape of a Llama; the default takes 64 KiB of KV cache a token."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 5632
    vocabulary: int = 32000

    def write(self, folder: Path) -> None:
        """Writes config.json; servers fill the weights with random numbers."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config))


MODELS = {
    "small": Model(),
    "8b": Model(32, 4096, 32, 8, 128, 14336),  # the shape of Llama 3.1 8B, 128 KiB a token
    "8b-mqa": Model(32, 4096, 32, 1, 128, 14336),  # the same with one KV head, 16 KiB a token
    "tiny": Model(8, 128, 8, 4, 16, 256, 512),  # for CPUs
}


class Load(NamedTuple):
    """Prompts of equal length, `concurrency` of which are under way at once; 0: none."""

    prompt: int
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> Load:
        prompt, _, concurrency = text.partition(":")
        return cls(int(prompt), int(concurrency))

    def __str__(self) -> str:
        return f"{self.concurrency} prompts of {self.prompt:,} tokens at once" if self.concurrency else "idle"


class Pair:
    """The servers of one side, which nobody has started.

    Attributes:
        fleet: the servers' processes.
        environment: variables under which `kvctl` finds their agents.
        agents: number of the agents that they have.
    """

    def __init__(self, number: int, side: str, options: argparse.Namespace, vocabulary: int) -> None:
        name, *settings = re.split(r"/(?=\w+=)", side)
        backend, variables = BACKENDS[name]
        folder = options.folder / f"{number}-{name}"
        sockets = folder / "sockets"
        sockets.mkdir(parents=True, mode=0o700)
        variables = {"KVCTL_SOCKET_DIR": str(sockets), **variables}
        variables |= dict(setting.split("=", 1) for setting in settings)
        if options.cpu:
            site = ROOT / "tests" / "sglang_servers" / "site"
            variables |= {**CPU_ENVIRONMENT, "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models"}
            variables["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
        flags = (*CPU_FLAGS, *TINY_POOL) if options.cpu else GPU_FLAGS
        python = Path(sys.executable)
        self.fleet = Fleet(python, options.folder / "model", folder, flags, variables, common=FLAGS)
        self.side = side
        self.agents = sum(tp_size(flags) for flags in (options.prefill, options.decode))
        self.environment = {**os.environ, "KVCTL_SOCKET_DIR": str(sockets)}
        self.prefill: Prefill | None = None
        if name == "undivided":
            self.decode: Process = self.fleet.server("undivided", *shlex.split(options.decode))
        else:
            self.prefill = self.fleet.prefill("prefill", backend, *shlex.split(options.prefill))
            self.decode = self.fleet.decode("decode", backend, *shlex.split(options.decode))
        self._random = random.Random(7)
        self._vocabulary = vocabulary

    async def request(self, session: aiohttp.ClientSession, prompt: int) -> float:
        """Returns the seconds to the first token on decode.

        Raises:
            ServerError: the request failed.
        """
        ids = [self._random.randrange(10, self._vocabulary) for _ in range(prompt)]
        prefill = self.prefill
        body = generation(ids, NEW_TOKENS) if prefill is None else prefill.request(ids, NEW_TOKENS)
        started = time.perf_counter()

        async def at_prefill() -> None:
            if prefill is not None:
                async with session.post(f"{prefill.process.url}/generate", json=body) as reply:
                    await reply.read()

        async def at_decode() -> float:
            first = 0.0
            async with session.post(f"{self.decode.url}/generate", json={**body, "stream": True}) as reply:
                async for line in reply.content:
                    if not line.startswith(b"data:") or b"[DONE]" in line:
                        continue
                    if "error" in (event := json.loads(line[5:])):
                        raise ServerError(str(event)[:300])
                    first = first or time.perf_counter() - started
            if not first:
                raise ServerError(f"no token: status {reply.status}")
            return first

        _, first = await asyncio.gather(at_prefill(), at_decode())
        return first

    @contextlib.asynccontextmanager
    async def under(self, load: Load) -> AsyncIterator[list[float]]:
        """Sends requests until the block ends; yields the list that grows by their times to the first token."""
        times: list[float] = []
        going = True
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one_after_another() -> None:
                while going:
                    times.append(await self.request(session, load.prompt))

            senders = [asyncio.create_task(one_after_another()) for _ in range(load.concurrency)]
            try:
                yield times
            finally:
                going = False
                ended, late = await asyncio.wait(senders, timeout=REQUEST_S) if senders else (set(), set())
                for sender in late:
                    sender.cancel()
                errors = [error for sender in ended if (error := sender.exception()) is not None]
                if errors:
                    raise errors[0]


def tp_size(flags: str) -> int:
    words = shlex.split(flags)
    return int(words[words.index("--tp-size") + 1]) if "--tp-size" in words else 1


def add_options(parser: argparse.ArgumentParser, sides: str, loads: str) -> None:
    """Adds the options that `Pair` reads, and those of all benchmarks of pairs."""
    parser.add_argument("--folder", type=Path, required=True, help="must not exist; a short path")
    parser.add_argument("--sides", default=sides)
    parser.add_argument("--loads", default=loads, help="PROMPT:CONCURRENCY, separated by blanks")
    parser.add_argument("--prefill", default="", help="flags of prefill servers, as in '--base-gpu-id 0 --tp-size 2'")
    parser.add_argument("--decode", default="", help="flags of decode servers, and of an undivided one")
    parser.add_argument("--model", choices=[*MODELS], help="default: small, tiny with --cpu")
    parser.add_argument("--cpu", action="store_true", help="servers without a GPU")


def pairs_of(options: argparse.Namespace) -> Sequence[Pair]:
    """Writes the model to the new folder and returns the pairs of all sides."""
    options.folder.mkdir(parents=True)
    model = MODELS[options.model or ("tiny" if options.cpu else "small")]
    model.write(options.folder / "model")
    # A comma may be in the value of a variable.
    sides = re.split(f",(?=(?:{'|'.join(BACKENDS)})(?:[,/]|$))", options.sides)
    return [Pair(number, side, options, model.vocabulary) for number, side in enumerate(sides)]
