"""Measures `kvctl status` beside stock SGLang servers, and what observers cost these servers.

For each side, starts a prefill and a decode server (benchmarks/server_pairs.py), by default on one GPU. Under each load
it calls `kvctl status` --looks times, one call after another, and counts the calls that got an answer of every agent.
Then it measures the time to the first token in turns with and without observers at --rate Hz. The servers of all sides
start together, each pair with a socket directory of its own.

    PYTHONPATH=. python benchmarks/observed_servers.py --folder /tmp/servers
    PYTHONPATH=. .sglang/bin/python benchmarks/observed_servers.py --folder /tmp/servers --cpu --looks 5

It runs in an environment with SGLang; with --cpu in that of `make venv-sglang`, and with a tiny model. A side is kvctl,
observe or replace, as in benchmarks/server_pairs.py. FOLDER gets the servers' logs and result.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.observers import Watch, look, looks
from benchmarks.server_pairs import Load, Pair, add_options, pairs_of
from kvctl.lab.bench.statistics import percentile
from kvctl.lab.demo.sglang_servers import ServerError, wait_ready

AGENTS = 2
NOTICED_S = 10.0
WARM_UP_REQUESTS = 8


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
    add_options(parser, "kvctl,observe", "256:4 8192:4")
    parser.add_argument("--looks", type=int, default=100, help="calls of kvctl status under each load")
    parser.add_argument("--looks-s", type=float, default=600.0, help="no more of them after this time")
    parser.add_argument("--rate", type=float, default=100.0, help="readings per second of the observers")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of windows with and without observers; 0: none")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--ends", action="store_true", help="stop and kill the decode scheduler of each side, too")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        pairs = pairs_of(options)
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
