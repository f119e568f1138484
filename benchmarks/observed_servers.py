"""Measures `kvctl status` beside stock SGLang servers, and what observers cost these servers.

For each side, starts a prefill and a decode server on one GPU, with random weights and without `--sleep-on-idle`: an
idle scheduler spins, as by default. Under each load it calls `kvctl status` --looks times, one call after another, and
counts the calls that got an answer of every agent. Then it measures the time to the first token in turns with and
without observers at --rate Hz. The servers of all sides start together, each pair with a socket directory of its own.

    PYTHONPATH=. python benchmarks/observed_servers.py --folder /tmp/servers
    PYTHONPATH=. .sglang/bin/python benchmarks/observed_servers.py --folder /tmp/servers --cpu --looks 5

It runs in an environment with SGLang; with --cpu in that of `make venv-sglang`, and with a tiny model. A side is kvctl,
observe (SGLang's NIXL backend with the plugin in that mode) or replace, with KEY=VALUE after slashes for its
environment, as in kvctl/KVCTL_PATH=staged. FOLDER gets the servers' logs and result.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.observers import Watch, look, looks
from kvctl.lab.bench.statistics import percentile
from kvctl.lab.demo.sglang_servers import CPU_ENVIRONMENT, CPU_FLAGS, Fleet, Prefill, Process, ServerError, wait_ready

BACKENDS = {"kvctl": ("kvctl", "backend"), "replace": ("nixl", "replace"), "observe": ("nixl", "observe")}
"""--disaggregation-transfer-backend and KVCTL_SGLANG of each side."""
AGENTS = 2
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
NOTICED_S = 10.0
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


TINY = Model(4, 128, 8, 4, 16, 256, 512)


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
    """A prefill and a decode server of one side.

    Attributes:
        environment: variables under which `kvctl` finds their agents.
    """

    def __init__(self, side: str, options: argparse.Namespace, vocabulary: int) -> None:
        name, *settings = side.split("/")
        backend, plugin = BACKENDS[name]
        folder = options.folder / side.replace("/", "-").replace("=", "-")
        sockets = folder / "sockets"
        sockets.mkdir(parents=True, mode=0o700)
        variables = {"KVCTL_SOCKET_DIR": str(sockets), "KVCTL_SGLANG": plugin}
        variables |= dict(setting.split("=", 1) for setting in settings)
        if options.cpu:
            site = ROOT / "tests" / "sglang_servers" / "site"
            variables |= {**CPU_ENVIRONMENT, "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models"}
            variables["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
        flags = (*CPU_FLAGS, *TINY_POOL) if options.cpu else GPU_FLAGS
        python = Path(sys.executable)
        self.fleet = Fleet(python, options.folder / "model", folder, flags, variables, common=FLAGS)
        self.side = side
        self.environment = {**os.environ, "KVCTL_SOCKET_DIR": str(sockets)}
        self.prefill: Prefill = self.fleet.prefill("prefill", backend)
        self.decode: Process = self.fleet.decode("decode", backend)
        self._random = random.Random(7)
        self._vocabulary = vocabulary

    async def request(self, session: aiohttp.ClientSession, prompt: int) -> float:
        """Returns the seconds to the first token on decode.

        Raises:
            ServerError: the request failed.
        """
        ids = [self._random.randrange(10, self._vocabulary) for _ in range(prompt)]
        body = self.prefill.request(ids, NEW_TOKENS)
        started = time.perf_counter()

        async def at_prefill() -> None:
            async with session.post(f"{self.prefill.process.url}/generate", json=body) as reply:
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


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e3 * each for each in seconds)
    return {
        "requests": len(ordered),
        "mean": statistics.fmean(ordered),
        "p50": percentile(ordered, 0.5),
        "p99": percentile(ordered, 0.99),
    }


async def measure_looks(pair: Pair, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Calls `kvctl status` under a load."""
    async with pair.under(load) as times:
        if load.concurrency:
            while len(times) < load.concurrency:
                await asyncio.sleep(0.05)
        # In a thread that only waits for processes.
        found = await asyncio.to_thread(looks, pair.environment, AGENTS, options.looks, options.looks_s)
    print(f"{pair.side}, {load}: {found}", flush=True)
    return {"load": str(load), "status": found._asdict(), "ttft_ms": milliseconds(times) if times else None}


async def measure_cost(pair: Pair, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Compares the times to the first token in windows with and without observers, in turns."""
    alone: list[float] = []
    observed: list[float] = []
    readings = 0
    async with pair.under(load) as times:
        with Watch(pair.environment, options.rate) as watch:
            await asyncio.to_thread(watch.wait)
            for number in range(options.rounds):
                for watched in (False, True) if number % 2 else (True, False):
                    if not watched:
                        watch.pause()
                    ended = len(times)
                    while len(times) < ended + load.concurrency:  # those of the previous window
                        await asyncio.sleep(0.01)
                    first = len(times), watch.readings
                    await asyncio.sleep(options.seconds)
                    (observed if watched else alone).extend(times[first[0] :])
                    if watched:
                        readings += watch.readings - first[1]
                    else:
                        watch.resume()
    row = {
        "load": str(load),
        "readings_per_s": readings / options.rounds / options.seconds,
        "alone_ms": milliseconds(alone),
        "observed_ms": milliseconds(observed),
        "mean_longer": statistics.fmean(observed) / statistics.fmean(alone) - 1,
        "error": math.hypot(standard_error(observed), standard_error(alone)) / statistics.fmean(alone),
    }
    print(f"{pair.side}, observed: {rounded(row)}", flush=True)
    return row


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


async def measure_ends(pair: Pair, load: Load) -> dict[str, Any]:
    """Stops the decode scheduler under load, and then kills it; measures when `kvctl status` says so."""
    found: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.push(lambda *_: True)  # the requests of a server that was killed fail
        await stack.enter_async_context(pair.under(load))
        await asyncio.sleep(1.0)
        for name, number, said in (
            ("stopped", signal.SIGSTOP, lambda row: row.get("process_state") == "stopped"),
            ("killed", signal.SIGKILL, lambda row: row.get("ended_age_ns") is not None),
        ):
            rows = await asyncio.to_thread(status_rows, pair.environment)
            pid = next(row["pid"] for row in rows if row.get("role") == "decode")
            os.kill(pid, number)
            started = time.perf_counter()
            row: dict[str, Any] | None = None
            while row is None and time.perf_counter() - started < NOTICED_S:
                rows = await asyncio.to_thread(status_rows, pair.environment)
                row = next((each for each in rows if each.get("pid") == pid and said(each)), None)
            rooms = sum(row["rooms"].values()) if row is not None else None
            found[name] = {"after_s": time.perf_counter() - started, "found": row is not None, "rooms": rooms}
            if name == "stopped":
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(2.0)
    print(f"{pair.side}: {rounded(found)}", flush=True)
    return found


def status_rows(environment: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    return look(environment).rows


async def measure(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything of one pair; what fails is left out, and named."""
    found: dict[str, Any] = {"looks": [], "cost": []}
    loads = [Load.parse(each) for each in options.loads.split()]
    try:
        for load in loads:  # connects the agents, compiles kernels
            async with pair.under(load) as times:
                while len(times) < WARM_UP_REQUESTS:
                    await asyncio.sleep(0.05)
        for load in (Load(0, 0), *loads):
            found["looks"].append(await measure_looks(pair, load, options))
        for load in loads if options.rounds else ():
            found["cost"].append(await measure_cost(pair, load, options))
        if options.ends:
            found["ends"] = await measure_ends(pair, loads[0])
    except (ServerError, aiohttp.ClientError, TimeoutError) as error:
        found["failed"] = repr(error)
        print(f"{pair.side}: failed: {error!r}\n{pair.decode.log_end()}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="must not exist; a short path")
    parser.add_argument("--sides", default="kvctl,observe")
    parser.add_argument("--loads", default="256:4 8192:4", help="PROMPT:CONCURRENCY, separated by blanks")
    parser.add_argument("--looks", type=int, default=100, help="calls of kvctl status under each load")
    parser.add_argument("--looks-s", type=float, default=600.0, help="no more of them after this time")
    parser.add_argument("--rate", type=float, default=100.0, help="readings per second of the observers")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of windows with and without observers; 0: none")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--ends", action="store_true", help="stop and kill the decode scheduler of each side, too")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    model = TINY if options.cpu else Model()
    model.write(options.folder / "model")
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        pairs = [Pair(side, options, model.vocabulary) for side in options.sides.split(",")]
        for pair in pairs:
            stack.callback(pair.fleet.end)
            for process in pair.fleet.processes:
                process.start()
        for pair in pairs:
            try:
                wait_ready(pair.fleet.processes)
            except ServerError as error:
                print(f"{pair.side}: {error}", flush=True)
                continue
            results[pair.side] = asyncio.run(measure(pair, options))
            (options.folder / "result.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
