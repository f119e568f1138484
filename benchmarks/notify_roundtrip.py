"""Measures the round trip of a notification between two processes, and the processor time of an idle agent.

Every grant, tag and watermark takes such a notification, so this is the lower bound of a room's latency. It depends on
how both sides wait, because an engine without threads of its own works only inside calls: a side that spins answers
fastest while there are idle cores, and takes processor time from the other side when there are none; `adaptive` spins
for 100 µs and then sleeps 50 µs at a time. Both sides wait in the same way here.

    python benchmarks/notify_roundtrip.py --transport nixl
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl_agent.transport import Arrival, Region, Transport, open_transport

POOL_BYTES = 1 << 20
WRITE_BYTES = 4096
STOP = b"stop"
SPIN_S = 100e-6
ADAPTIVE_SLEEP_S = 50e-6
GIVE_UP_S = 5.0


class Waiting(NamedTuple):
    """Way to wait for arrivals: spins for `spin_s`, then sleeps `sleep_s` between polls."""

    name: str
    spin_s: float
    sleep_s: float


WAITINGS = (
    Waiting("spinning", GIVE_UP_S, 0.0),
    Waiting("50 µs sleeps", 0.0, 50e-6),
    Waiting("100 µs sleeps", 0.0, 100e-6),
    Waiting("adaptive", SPIN_S, ADAPTIVE_SLEEP_S),
)


class Side:
    """Transport of one process, with a small registered pool."""

    def __init__(self, engine: str, name: str) -> None:
        self.transport: Transport = open_transport(engine, name)
        self.pool = np.ones(POOL_BYTES, np.uint8)
        self.transport.register([Region(self.pool.ctypes.data, POOL_BYTES)])

    def wait(self, how: Waiting) -> list[Arrival]:
        """Waits for arrivals in the given way and returns them; exits if nothing arrives in time."""
        started = time.perf_counter()
        while True:
            landed = self.transport.arrivals()
            if landed:
                return landed
            waited = time.perf_counter() - started
            if waited > GIVE_UP_S:
                raise SystemExit(f"no answer within {GIVE_UP_S} s")
            if waited >= how.spin_s:
                time.sleep(how.sleep_s)


def echo(engine: str) -> None:
    """Runs in the other process: answers every tag with the same tag."""
    side = Side(engine, "echo")
    print(json.dumps([side.transport.metadata().hex(), side.pool.ctypes.data]), flush=True)
    side.transport.connect("near", bytes.fromhex(sys.stdin.readline()))
    for line in sys.stdin:
        ask = json.loads(line)
        if "idle_s" in ask:
            print(idle_share(side.transport, ask["idle_s"], ask["poll_s"]), flush=True)
            continue
        how = WAITINGS[ask["waiting"]]
        print("ready", flush=True)
        tag = b""
        while tag != STOP:
            for _, tag in side.wait(how):
                side.transport.tell("near", tag)
    side.transport.close()


def idle_share(transport: Transport, seconds: float, poll_s: float) -> float:
    """Returns the processor time of all threads of this process while nothing happens, as a share of one core.

    Args:
        seconds: duration of the measurement.
        poll_s: time between polls for arrivals; 0 for no polls.
    """
    started, cpu = time.monotonic(), time.process_time()
    while (left := seconds - (time.monotonic() - started)) > 0:
        if poll_s:
            transport.arrivals()
        time.sleep(min(poll_s or left, left))
    return (time.process_time() - cpu) / (time.monotonic() - started)


def round_trips(side: Side, target: int, how: Waiting, with_write: bool, count: int, limit_s: float) -> list[float]:
    """Returns the durations of up to `count` round trips in µs, sorted; stops after `limit_s`.

    Args:
        target: address of the other process's pool.
        how: way to wait for the answer.
        with_write: whether each round trip begins with a write of `WRITE_BYTES`, instead of only a tag.
    """
    here, there = (np.array([addr], np.uint64) for addr in (side.pool.ctypes.data, target))
    sizes = np.array([WRITE_BYTES], np.uint64)
    took: list[float] = []
    until = time.perf_counter() + limit_s
    while len(took) < count and time.perf_counter() < until:
        started = time.perf_counter()
        if with_write:
            write = side.transport.write("far", here, there, sizes, b"tag")
            while not write.poll():
                time.sleep(how.sleep_s)
        else:
            side.transport.tell("far", b"tag")
        side.wait(how)
        took.append((time.perf_counter() - started) * 1e6)
    return sorted(took)


def main() -> None:
    """Starts the other process, measures each way to wait, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", default="nixl", help="nixl, mooncake or loopback (default: %(default)s)")
    parser.add_argument("--count", type=int, default=500, help="round trips per row at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.7, help="per row at most (default: %(default)s)")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        echo(args.transport)
        return

    far = subprocess.Popen(
        [sys.executable, __file__, "--echo", "--transport", args.transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert far.stdin is not None
    assert far.stdout is not None
    asks, answers = far.stdin, far.stdout

    def ask(question: str) -> str:
        asks.write(question + "\n")
        asks.flush()
        return answers.readline()

    side = Side(args.transport, "near")
    try:
        metadata, target = json.loads(answers.readline())
        side.transport.connect("far", bytes.fromhex(metadata))
        asks.write(side.transport.metadata().hex() + "\n")
        print(side.transport.describe()["engine"])
        print(f"{'both sides wait by':<16} {'what':<14} {'count':>6} {'median µs':>10} {'p99 µs':>10}")
        for number, how in enumerate(WAITINGS):
            for with_write, what in ((False, "bare tag"), (True, "4 KiB write")):
                ask(json.dumps({"waiting": number}))
                round_trips(side, target, how, with_write, 5, args.seconds)
                took = round_trips(side, target, how, with_write, args.count, args.seconds)
                side.transport.tell("far", STOP)
                side.wait(how)
                p99 = took[int(len(took) * 0.99)]
                print(f"{how.name:<16} {what:<14} {len(took):>6} {statistics.median(took):>10.0f} {p99:>10.0f}")
        for poll_s, what in ((0.0, "that nobody polls"), (0.005, "polled every 5 ms")):
            share = float(ask(json.dumps({"idle_s": 1.0, "poll_s": poll_s})))
            print(f"an idle agent {what} takes {share:.2%} of a core")
    finally:
        asks.close()
        answers.close()
        side.transport.close()
        far.wait(10)


if __name__ == "__main__":
    main()
