"""Measures `kvctl status` beside stock SGLang servers, and what observers cost these servers.

For each side, starts a prefill and a decode server (kvctl/lab/bench/sglang_pairs.py), by default on one GPU. Under each
load it calls `kvctl status` --looks times, one call after another, and counts the calls that got an answer of every
agent. Then it measures the time to the first token in turns with and without observers at --rate Hz. The servers of all
sides start together, each pair with a socket directory of its own.

    PYTHONPATH=. python benchmarks/observed_servers.py --folder /tmp/servers
    PYTHONPATH=. .sglang/bin/python benchmarks/observed_servers.py --folder /tmp/servers --cpu --looks 5

It runs in an environment with SGLang; with --cpu in that of `make venv-sglang`, and with a tiny model. A side is kvctl,
observe or replace, as in `kvctl bench --sides`. FOLDER gets the servers' logs and result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.observers import Watch, look, looks
from kvctl.lab.bench.sglang_checkpoint import Llama, write_checkpoint
from kvctl.lab.bench.sglang_models import model_of
from kvctl.lab.bench.sglang_pairs import Pair, ServerPlan, Side, parse_sides
from kvctl.lab.bench.sglang_servers import ServerError, wait_ready
from kvctl.lab.bench.statistics import percentile

AGENTS = 2
NOTICED_S = 10.0
WARM_UP_REQUESTS = 8
NEW_TOKENS = 4
LONGEST = 16384
SITE = Path(__file__).resolve().parents[1] / "tests" / "sglang_servers" / "site"


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


class Observed(NamedTuple):
    """The servers of a side, and the environment in which `kvctl` finds their agents."""

    pair: Pair
    environment: Mapping[str, str]

    @property
    def side(self) -> str:
        return self.pair.side.text

    @contextlib.contextmanager
    def under(self, load: Load) -> Iterator[list[float]]:
        """Sends requests until the block ends; yields the list that grows by their times to the first token.

        Raises:
            ServerError: a request failed.
        """
        times: list[float] = []
        errors: list[ServerError] = []
        ending = threading.Event()
        source = random.Random(7)

        def one_after_another() -> None:
            try:
                while not ending.is_set():
                    prompt = self.pair.prompt(load.prompt, source)
                    times.append(self.pair.generate(prompt, NEW_TOKENS).first_s)
            except ServerError as error:
                errors.append(error)

        senders = [threading.Thread(target=one_after_another) for _ in range(load.concurrency)]
        for sender in senders:
            sender.start()
        try:
            yield times
        finally:
            ending.set()
            for sender in senders:
                sender.join()
        if errors:
            raise errors[0]

    def wait(self, times: Sequence[float], count: int) -> None:
        """Waits for a number of times; raises ServerError if a server has ended."""
        while len(times) < count:
            for process in self.pair.fleet.processes:
                process.check()
            time.sleep(0.02)


def observed(number: int, side: Side, plan: ServerPlan, folder: Path) -> Observed:
    sockets = folder / f"{number}-sockets"
    sockets.mkdir(mode=0o700)
    environment = {"KVCTL_SOCKET_DIR": str(sockets)}
    plan = plan._replace(environment={**plan.environment, **environment})
    return Observed(Pair(side, plan, folder / f"{number}-{side.text.partition('/')[0]}"), {**os.environ, **environment})


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e3 * each for each in seconds)
    return {
        "requests": len(ordered),
        "mean": statistics.fmean(ordered),
        "p50": percentile(ordered, 0.5),
        "p99": percentile(ordered, 0.99),
    }


def measure_looks(pair: Observed, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Calls `kvctl status` under a load."""
    with pair.under(load) as times:
        pair.wait(times, load.concurrency)
        found = looks(pair.environment, AGENTS, options.looks, options.looks_s)
    print(f"{pair.side}, {load}: {found}", flush=True)
    return {"load": str(load), "status": found._asdict(), "ttft_ms": milliseconds(times) if times else None}


def measure_cost(pair: Observed, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Compares the times to the first token in windows with and without observers, in turns."""
    alone: list[float] = []
    observed: list[float] = []
    readings = 0
    with pair.under(load) as times, Watch(pair.environment, options.rate) as watch:
        watch.wait()
        for number in range(options.rounds):
            for watched in (False, True) if number % 2 else (True, False):
                if not watched:
                    watch.pause()
                pair.wait(times, len(times) + load.concurrency)  # those of the previous window
                first = len(times), watch.readings
                time.sleep(options.seconds)
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


def measure_ends(pair: Observed, load: Load) -> dict[str, Any]:
    """Stops the decode scheduler under load, and then kills it; measures when `kvctl status` says so."""
    found: dict[str, Any] = {}
    # The requests of a server that was killed fail.
    with contextlib.suppress(ServerError), pair.under(load):
        time.sleep(1.0)
        for name, number, said in (
            ("stopped", signal.SIGSTOP, lambda row: row.get("process_state") == "stopped"),
            ("killed", signal.SIGKILL, lambda row: row.get("ended_age_ns") is not None),
        ):
            rows = status_rows(pair.environment)
            pid = next(row["pid"] for row in rows if row.get("role") == "decode")
            os.kill(pid, number)
            started = time.perf_counter()
            row: dict[str, Any] | None = None
            while row is None and time.perf_counter() - started < NOTICED_S:
                rows = status_rows(pair.environment)
                row = next((each for each in rows if each.get("pid") == pid and said(each)), None)
            rooms = sum(row["rooms"].values()) if row is not None else None
            found[name] = {"after_s": time.perf_counter() - started, "found": row is not None, "rooms": rooms}
            if name == "stopped":
                os.kill(pid, signal.SIGCONT)
                time.sleep(2.0)
    print(f"{pair.side}: {rounded(found)}", flush=True)
    return found


def status_rows(environment: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    return look(environment).rows


def measure(pair: Observed, options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything of one pair; what fails is left out, and named."""
    found: dict[str, Any] = {"looks": [], "cost": []}
    loads = [Load.parse(each) for each in options.loads.split()]
    try:
        for load in loads:  # connects the agents, compiles kernels
            with pair.under(load) as times:
                pair.wait(times, WARM_UP_REQUESTS)
        for load in (Load(0, 0), *loads):
            found["looks"].append(measure_looks(pair, load, options))
        for load in loads if options.rounds else ():
            found["cost"].append(measure_cost(pair, load, options))
        if options.ends:
            found["ends"] = measure_ends(pair, loads[0])
    except ServerError as error:
        found["failed"] = repr(error)
        print(f"{pair.side}: failed: {error!r}\n{pair.pair.decode.log_end()}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="must not exist; a short path")
    parser.add_argument("--sides", type=parse_sides, default="kvctl,observe")
    parser.add_argument("--loads", default="256:4 8192:4", help="PROMPT:CONCURRENCY, separated by blanks")
    parser.add_argument("--decode-gpu", type=int, default=0)
    parser.add_argument("--server-args", default="", help="further flags of every server")
    parser.add_argument("--model", help="a known model's shape; default: llama-3.2-1b, with --cpu a tiny one")
    parser.add_argument("--cpu", action="store_true", help="servers without a GPU")
    parser.add_argument("--looks", type=int, default=100, help="calls of kvctl status under each load")
    parser.add_argument("--looks-s", type=float, default=600.0, help="no more of them after this time")
    parser.add_argument("--rate", type=float, default=100.0, help="readings per second of the observers")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of windows with and without observers; 0: none")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--ends", action="store_true", help="stop and kill the decode scheduler of each side, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    model = model_of(options.model or (None if options.cpu else "llama-3.2-1b"), {}, not options.cpu, LONGEST)
    write_checkpoint(options.folder / "model", shape=Llama(**(model.llama or {})))
    plan = ServerPlan(
        str(options.folder / "model"),
        prefill_gpus=() if options.cpu else (0,),
        decode_gpus=() if options.cpu else (options.decode_gpu,),
        longest=LONGEST,
        flags=shlex.split(options.server_args),
        environment={"PYTHONPATH": os.pathsep.join([str(SITE), str(SITE.parents[2])])} if options.cpu else {},
        vocabulary=model.vocabulary,
    )
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        pairs = [observed(number, side, plan, options.folder) for number, side in enumerate(options.sides)]
        for pair in pairs:
            stack.callback(pair.pair.fleet.end)
            for process in pair.pair.fleet.processes:
                process.start()
        for pair in pairs:
            try:
                wait_ready(pair.pair.fleet.processes)
            except ServerError as error:
                print(f"{pair.side}: {error}", flush=True)
                continue
            results[pair.side] = measure(pair, options)
            (options.folder / "result.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
