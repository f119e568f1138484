"""Compares transfer backends of stock SGLang servers: time to the first token and requests per second, in turns.

The servers of all sides (benchmarks/server_pairs.py) run at the same time, and requests are sent to one side after
another, --rounds times. Every side must generate the same tokens. Prints a line for each side and load: medians of the
rounds, and the ratios to the first side.

    PYTHONPATH=. python benchmarks/pd_servers.py --folder /tmp/pd --decode="--base-gpu-id 1"
    PYTHONPATH=. .sglang/bin/python benchmarks/pd_servers.py --folder /tmp/pd --cpu --loads "256:1 256:4" --rounds 2

FOLDER gets result.json, and for each side the servers' logs and the last rooms, as `kvctl rooms history -o
json` has them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.observers import looks
from benchmarks.server_pairs import Load, Pair, add_options, pairs_of
from kvctl.lab.demo.sglang_servers import ServerError, generation, post, wait_ready

WARM_UP = Load(512, 8)
LEAST_REQUESTS = 12
REQUESTS_A_SLOT = 3
CHECKED_PROMPTS = (1, 15, 17, 100, 1000, 4097)
CHECKED_TOKENS = 16
LOOKS_S = 60.0


async def send(pair: Pair, load: Load, total: int) -> dict[str, float]:
    """Sends `total` requests, `load.concurrency` at a time; returns the mean time to the first token and the rate."""
    slots = asyncio.Semaphore(load.concurrency)
    times: list[float] = []
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def one() -> None:
            async with slots:
                times.append(await pair.request(session, load.prompt))

        started = time.perf_counter()
        await asyncio.gather(*[one() for _ in range(total)])
        took = time.perf_counter() - started
    return {"ttft_ms": 1e3 * statistics.fmean(times), "worst_ms": 1e3 * max(times), "requests_s": total / took}


def tokens(pair: Pair, prompt: Sequence[int]) -> Sequence[int]:
    """Returns the tokens that a side generates after a prompt."""
    if pair.prefill is not None:
        return pair.prefill.generate(pair.decode, list(prompt), CHECKED_TOKENS)[1].tokens
    answer: Mapping[str, Any] = post(f"{pair.decode.url}/generate", generation(list(prompt), CHECKED_TOKENS))
    generated: Sequence[int] = answer["output_ids"]
    return generated


def differing(pairs: Sequence[Pair]) -> list[str]:
    """Returns which sides generate other tokens than the first, and after which prompts."""
    found = []
    for length in CHECKED_PROMPTS:
        prompt = [10 + (7 * position + length) % 400 for position in range(length)]
        wanted = tokens(pairs[0], prompt)
        found += [f"{pair.side}: {length} tokens" for pair in pairs[1:] if tokens(pair, prompt) != wanted]
    return found


def rooms(pair: Pair) -> Any:
    """Returns the rooms that ended last, on all agents."""
    command = [sys.executable, "-m", "kvctl", "rooms", "history", "-n", "400", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=pair.environment, timeout=60, check=False)
    return json.loads(done.stdout) if done.stdout else done.stderr


def measure(pairs: Sequence[Pair], loads: Sequence[Load], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the rounds of each load and side; stops before a round once `options.seconds` have passed."""
    ends = time.monotonic() + options.seconds
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for pair in pairs:
        asyncio.run(send(pair, WARM_UP, 3 * WARM_UP.concurrency))
    found: dict[str, Any] = {"differing": differing(pairs), "loads": rounds}
    print("tokens differ:" if found["differing"] else "tokens equal", *found["differing"], flush=True)
    for number in range(options.rounds):
        for load in loads:
            of_load = rounds.setdefault(str(load), {pair.side: [] for pair in pairs})
            for pair in pairs if number % 2 == 0 else reversed(pairs):
                if time.monotonic() < ends:
                    total = max(LEAST_REQUESTS, REQUESTS_A_SLOT * load.concurrency)
                    of_load[pair.side].append(asyncio.run(send(pair, load, total)))
    for load_name, sides in rounds.items():
        first: dict[str, float] = {}
        for side, results in sides.items():
            if not results:
                continue
            row = {name: statistics.median(each[name] for each in results) for name in results[0]}
            first = first or row
            ratios = ", ".join(f"{name} {row[name] / first[name]:.2f} x" for name in ("ttft_ms", "requests_s"))
            shown = ", ".join(f"{name} {value:.1f}" for name, value in row.items())
            spread = "/".join(f"{each['ttft_ms']:.0f}" for each in results)
            print(f"{load_name}: {side}: {shown} ({ratios}; {spread})", flush=True)
    for pair in pairs:
        if pair.side.split("/")[0] in ("kvctl", "replace", "observe"):
            (pair.fleet.folder / "rooms.json").write_text(json.dumps(rooms(pair)))
            if options.looks:
                print(f"{pair.side}, idle: {looks(pair.environment, pair.agents, options.looks, LOOKS_S)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "nixl,kvctl", "1024:1 1024:16 8192:1 8192:8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--looks", type=int, default=0, help="calls of kvctl status at the end, for sides with agents")
    parser.add_argument("--seconds", type=float, default=300.0, help="no further measurement after this time")
    options = parser.parse_args()
    pairs = pairs_of(options)
    with contextlib.ExitStack() as stack:
        for pair in pairs:
            stack.callback(pair.fleet.end)
            for process in pair.fleet.processes:
                process.start()
        ready = []
        for pair in pairs:
            try:
                wait_ready(pair.fleet.processes)
                ready.append(pair)
            except ServerError as error:
                print(f"{pair.side}: {error}", flush=True)
        result = measure(ready, [Load.parse(each) for each in options.loads.split()], options)
        (options.folder / "result.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
