"""Measures SGLang's own transfer classes beside a busy engine thread, as `kvctl bench --busy-engine` measures kvctl.

The thread of each prefill rank that calls SGLang's sender and polls it runs `BusyLoop` where it otherwise sleeps. Rooms
arrive at random, RATE per second, the same as in `kvctl bench --rate RATE --seed SEED`; a room that finds no free slot
waits. The classes are driven by the harness of `side_by_side.py`; its options follow `--`. Prints one line of JSON,
whose names are those of a run in the result of `kvctl bench`.

    python benchmarks/busy_engine_peer.py --peer DIR --rate 30 -- --prefill-tp 1 --page 16 --rooms 60 --concurrency 8
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.lab.bench.statistics import percentile
from kvctl.lab.ranks.busy_loop import BusyLoop, LoopTimes, measure_idle, slowdown
from kvctl.lab.ranks.request import ENGINE_KINDS

IDLE_LOOP_S = 1.0
TIMEOUT_S = 600.0
CHILD = "KVCTL_BUSY_ENGINE_PEER"
"""Environment variable with the options of the harness's processes as JSON; present in these only."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", type=Path, required=True, help="folder with sglang_pd.py, src/ and, unless this Python has all, venv/"
    )
    parser.add_argument("--rate", type=float, required=True, help="rooms per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=ENGINE_KINDS, default=ENGINE_KINDS[0], help="loop of the engine's thread")
    parser.add_argument("--idle", action="store_true", help="let the engine's thread sleep instead")
    parser.add_argument("options", nargs="*", help="options of sglang_pd.py, after --")
    print(json.dumps(measure(parser.parse_args())))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Runs the harness once and returns the figures, named as in the result of `kvctl bench`.

    Raises:
        RuntimeError: the harness failed; the text is its last output.
    """
    peer = given.peer.resolve()
    with tempfile.TemporaryDirectory() as directory:
        child = {
            "directory": directory,
            "rate": given.rate,
            "seed": given.seed,
            "busy": "" if given.idle else given.kind,
        }
        child["harness"] = str(peer)
        environment = {**os.environ, "SGLANG_SRC": str(peer / "src"), CHILD: json.dumps(child)}
        python = peer / "venv" / "bin" / "python"
        ran = subprocess.run(
            [str(python) if python.exists() else sys.executable, "-W", "ignore", __file__, *given.options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if ran.returncode != 0:
            raise RuntimeError(f"{peer}/sglang_pd.py failed: {(ran.stdout + ran.stderr)[-2000:]}")
        reports = [json.loads(path.read_text()) for path in Path(directory).iterdir()]
    prefill = [report for report in reports if "tsend" in report]
    sent, done = _latest(report["tsend"] for report in prefill), _latest(r["tdone"] for r in reports if "tmeta" in r)
    latencies_ms = sorted(1e3 * (done[room] - sent[room]) for room in done)
    arrivals, successes = _arrivals(given.rate, len(done), given.seed), sorted(done.values())
    row = {
        "busy_engine": "off" if given.idle else "prefill" if given.kind == ENGINE_KINDS[0] else f"prefill:{given.kind}",
        "rooms": len(done),
        "verified": json.loads(ran.stdout.splitlines()[-1])["bad"] == 0,
        "asked_rooms_per_s": (len(arrivals) - 1) / arrivals[-1],
        "served_rooms_per_s": (len(successes) - 1) / (successes[-1] - successes[0]),
        "latency_ms": {"p50": percentile(latencies_ms, 0.5), "p99": percentile(latencies_ms, 0.99)},
    }
    if given.idle:
        return row
    busy, idle = [report["busy"] for report in prefill], [each for report in prefill for each in report["idle"]]
    return row | {
        "engine_slowdown_ratio": slowdown(busy, idle),
        "engine_stall_ms": max(each["longest_ns"] for each in busy) / 1e6,
        "engine_idle_stall_ms": max(each["longest_ns"] for each in idle) / 1e6,
    }


def _latest(reports: Any) -> dict[str, float]:
    """Returns the latest time of each room over the reports of several ranks."""
    latest: dict[str, float] = {}
    for report in reports:
        for room, at in report.items():
            latest[room] = max(at, latest.get(room, at))
    return latest


def _arrivals(rate: float, rooms: int, seed: int) -> list[float]:
    """Returns the arrival of each room in seconds after the first, as `workload.draw_arrivals` draws them."""
    source = random.Random(f"arrivals {seed}")
    return list(accumulate((source.expovariate(rate) for _ in range(rooms - 1)), initial=0.0))


# ---- in the harness's processes -------------------------------------------------------------------------------------


class Commands:
    """The commands of the harness to a rank; calls `before_run` before the measured run."""

    def __init__(self, commands: Any, before_run: Any) -> None:
        self._commands = commands
        self._before_run = before_run
        self._runs = 0

    def get(self) -> Any:
        command = self._commands.get()
        if command[0] == "run":
            self._runs += 1
            if self._runs == 2:  # the first run warms up
                self._before_run(*command[1:])
        return command


class Reports:
    """The harness's queue of reports; those of the measured run are also written to a file for the parent."""

    def __init__(self, reports: Any, number: int, more: Callable[[], dict[str, Any]]) -> None:
        self._reports = reports
        self._path = Path(options["directory"]) / f"{os.getpid()}-{number}.json"
        self._more = more

    def put(self, report: Any) -> None:
        if report[0] == "done":
            self._path.write_text(json.dumps({**report[3], **self._more()}))
        self._reports.put(report)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reports, name)


def prefill_rank(a: Any, rank: int, port: int, commands: Any, reports: Any) -> None:
    """Runs a prefill rank of the harness whose thread is busy, in the measured run, where it otherwise sleeps."""
    loop: BusyLoop | None = None
    idle: list[LoopTimes] = []

    def begin(base: int, rooms: int) -> None:
        nonlocal loop
        if options["busy"]:
            idle.append(measure_idle(options["busy"], IDLE_LOOP_S))
            loop = BusyLoop(options["busy"])

    def measured() -> dict[str, Any]:
        return {} if loop is None else {"idle": idle, "busy": loop.times}

    def wait(seconds: float) -> None:
        if loop is None:
            time.sleep(seconds)
            return
        end = time.monotonic() + seconds
        loop.turn()
        while time.monotonic() < end:
            loop.turn()

    harness.time = SimpleNamespace(
        sleep=wait, monotonic=time.monotonic, perf_counter=time.perf_counter, process_time=time.process_time
    )
    _prefill_main(a, rank, port, Commands(commands, begin), Reports(reports, rank, measured))


def decode_rank(a: Any, group: int, rank: int, port: int, commands: Any, reports: Any) -> None:
    """Runs a decode rank of the harness that asks for each room of the measured run when it arrives."""
    due: dict[int, float] = {}
    load = harness.load_sglang

    def begin(base: int, rooms: int) -> None:
        if options["busy"]:
            time.sleep(IDLE_LOOP_S)  # the prefill ranks measure their loop
        now = time.monotonic()
        for number, at_s in enumerate(_arrivals(options["rate"], rooms, options["seed"])):
            due[base + number] = now + at_s

    def paced(*args: Any, **more: Any) -> Any:
        engine, utilities, agent = load(*args, **more)
        plain = engine.NixlKVReceiver

        class PacedReceiver(plain):  # type: ignore[misc, valid-type]
            def __init__(self, manager: Any, address: Any, room: int) -> None:
                super().__init__(manager, address, room)
                self._due, self._later = due.get(room, 0.0), ()

            def send_metadata(self, *args: Any) -> None:
                self._later = args

            def poll(self) -> Any:
                if self._later and time.monotonic() >= self._due:
                    later, self._later = self._later, ()
                    super().send_metadata(*later)
                return super().poll()

        engine.NixlKVReceiver = PacedReceiver
        return engine, utilities, agent

    harness.load_sglang = paced
    number = 1000 + group * a.decode_tp + rank
    _decode_main(a, group, rank, port, Commands(commands, begin), Reports(reports, number, dict))


if CHILD in os.environ:
    options: dict[str, Any] = json.loads(os.environ[CHILD])
    sys.path.insert(0, options["harness"])
    harness: Any = importlib.import_module("sglang_pd")
    _prefill_main, _decode_main = harness.prefill_main, harness.decode_main
    harness.prefill_main, harness.decode_main = prefill_rank, decode_rank

if __name__ == "__main__":
    if CHILD in os.environ:
        harness.main()
    else:
        main()
