"""Measures what a room costs an agent's process, and what part of that is telemetry, of one or two source trees.

"telemetry" is the processor time of the calls that record one room of PARTS parts on a prefill rank: open, its events,
its parts, its end, and what the control loop does for telemetry in each turn. "room" is the processor time of a process
with a prefill and a decode agent, over the loopback transport, for each room of 16 pages: all threads, with what they
do for observers, and without an observer process, whose share is "observer".

    python benchmarks/room_cost.py
    python benchmarks/room_cost.py --beside ../other-checkout --rounds 9
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 200
PAGES, PAGE_SIZE = 16, 16
STAGES = ("queue", "ready", "post", "wire")


def measure_telemetry(rooms: int, parts: int) -> float:
    """Returns microseconds of this thread for the calls that record one room."""
    from kvctl_agent.contract.states import RoomState
    from kvctl_agent.telemetry.hub import Telemetry

    create: Any = Telemetry
    if hasattr(Telemetry, "flush"):
        telemetry = create("prefill-0", "prefill")
        turn = telemetry.flush
    else:  # of a tree in which the agent itself keeps histograms and finished rooms
        telemetry = create("prefill-0", "prefill", history=1000, timeline_events=256, recorder_events=4096)
        turn = telemetry.count_pending

    def record(number: int) -> None:
        now = time.monotonic_ns()
        room = telemetry.open(number, 0)
        room.tokens, room.pages, room.planned = 4096, 256, parts
        room.event("accept", now, peer="decode-0")
        room.peers.append("decode-0")
        room.event("request", now, peer="decode-0")
        room.state(RoomState.TRANSFERRING, now)
        turn()
        for part in range(parts):
            key = (0, 0, (part, part + 1))
            room.event("grant", now, *key, peer="decode-0")
            room.sent += 1
            moments = {stage: now + 1000 * place for place, stage in enumerate(STAGES)}
            telemetry.part(room, key, "decode-0", "staged", 1 << 20, moments, now)
            if part % 4 == 3:
                turn()
        room.event("finish", now)
        room.state(RoomState.SUCCESS, now)
        room.event("sent", now)
        room.event("done", now, peer="decode-0")
        telemetry.finish(room, now + 20_000)
        turn()

    for number in range(WARM_UP):
        record(number)
    started = time.thread_time_ns()
    for number in range(WARM_UP, WARM_UP + rooms):
        record(number)
    return (time.thread_time_ns() - started) / rooms / 1e3


def measure_rooms(rooms: int) -> tuple[float, float]:
    """Returns microseconds of this process for each room, and those of processes that it started."""
    import numpy as np

    from kvctl_agent import Agent, KVPool, ModelShape, Rank, RoomState, local_shards

    shape, rank = ModelShape(2, 8, 8, 8, 2), Rank()
    with _socket_directory() as directory, contextlib.ExitStack() as stack:

        def agent(role: Any) -> Agent:
            shards = local_shards(shape, PAGE_SIZE, rank.parallel_config, rank.coord)
            options: dict[str, Any] = {"staging_buffer_mb": 4, "staging_ring_mb": 4, "transport": "loopback"}
            options |= {"bootstrap": f"ipc://{directory}/registry", "model": shape, "name": f"{role}-0"}
            pool = KVPool.allocate(shards, PAGE_SIZE, 4 * PAGES)
            return stack.enter_context(Agent(role=role, rank=rank, pool=pool, **options).start())

        prefill, decode = agent("prefill"), agent("decode")
        decode.wait_ready(30)
        pages = np.arange(PAGES)

        def transfer(room: int) -> None:
            receive, send = decode.receive(room, pages), prefill.send(room)
            send.prefetch()
            send.pages(pages, last=True)
            send.finish()
            states = {handle.wait(30) for handle in (receive, send)}
            assert states == {RoomState.SUCCESS}, receive.error

        for number in range(1, WARM_UP):
            transfer(number)
        started, observers = time.process_time_ns(), _observers_ns(directory)
        for number in range(WARM_UP, WARM_UP + rooms):
            transfer(number)
        used, observed = time.process_time_ns() - started, _observers_ns(directory) - observers
    return used / rooms / 1e3, observed / rooms / 1e3


def _observers_ns(directory: str) -> int:
    """Returns the processor time so far of observer processes of a socket directory."""
    total = 0
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if directory.encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) * (10**9 // os.sysconf("SC_CLK_TCK"))
    return total


@contextlib.contextmanager
def _socket_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as directory:
        os.environ["KVCTL_SOCKET_DIR"] = directory
        yield directory


def run(tree: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measures one tree in a new process."""
    command = [sys.executable, __file__, "--run", "--rooms", str(options.rooms), "--parts", str(options.parts)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=tree)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another source tree, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rooms", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        telemetry = measure_telemetry(options.rooms, options.parts)
        room, observer = measure_rooms(options.rooms)
        print(json.dumps({"telemetry": telemetry, "room": room, "observer": observer}))
        return
    trees = [ROOT, *([options.beside.resolve()] if options.beside else [])]
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            found[tree].append(run(tree, options))
    print(f"medians of {options.rounds}, µs of a processor for each room; load {os.getloadavg()[0]:.1f}")
    for tree, runs in found.items():
        figures = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
        print(f"{tree}: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
