"""Compares two ways to notify a Mooncake reader of a write: the engine's notification, and a tag on a connection.

`TransferNotify` requires the engine's blocking call, which spins until the bytes are written; it then opens a new TCP
connection per notification, and one thread of the reader's engine reads them one at a time, as JSON. The `mooncake`
transport instead posts the write, polls for its completion and sends a tag on a separate connection that stays open;
its caller may spin, or poll every 50 µs. Each way is measured in use: a write of this process, seen by another process
that answers with a write of the same size and kind. The ways take turns, so that other load on the machine affects all
alike.

    python benchmarks/mooncake_arrival.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl_agent.transport import Region, open_transport
from kvctl_agent.transport.mooncake.engine import start

POOL_BYTES = 4 << 20
SIZES = ((0, "none"), (4096, "4 KiB"), (2 << 20, "2 MiB"))
ROUNDS = 10
SLEEP_S = 50e-6
GIVE_UP_S = 10.0


class Way(Protocol):
    """Way to notify another process of a write."""

    def hello(self) -> list[Any]:
        """Returns the address of this process, as JSON values for the other process's `meet`."""
        ...

    def meet(self, hello: list[Any]) -> None: ...

    def send(self, nbytes: int) -> None:
        """Writes `nbytes` into the other process's pool and notifies it; 0 bytes only notify."""
        ...

    def arrived(self) -> int:
        """Returns the number of notifications that have arrived since the last call."""
        ...

    def close(self) -> None: ...


class Notification:
    """Notification by Mooncake: `transfer_sync` with a `TransferNotify`."""

    def __init__(self) -> None:
        self._pool = np.ones(POOL_BYTES, np.uint8)
        self._started = start("tcp", "", "127.0.0.1")
        from mooncake.engine import TransferNotify, TransferOpcode

        self._started.register([Region(self._pool.ctypes.data, POOL_BYTES)])
        self._engine = self._started._engine
        self._notify = TransferNotify("near", "tag")
        self._opcode = TransferOpcode.Write

    def hello(self) -> list[Any]:
        return [self._started.session, self._pool.ctypes.data]

    def meet(self, hello: list[Any]) -> None:
        self._session, self._target = hello

    def send(self, nbytes: int) -> None:
        # A notification requires a write; an empty write completes at once.
        code = self._engine.transfer_sync(
            self._session, self._pool.ctypes.data, self._target, nbytes, self._opcode, self._notify
        )
        if code:
            raise SystemExit(f"transfer_sync failed: {code}")

    def arrived(self) -> int:
        return len(self._engine.get_notifies())

    def close(self) -> None:
        del self._engine
        self._started.stop()


class Link:
    """Notification by the `mooncake` transport, a tag on a separate connection.

    Args:
        sleep_s: pause between polls for the completion of a write; 0 spins.
    """

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s
        self._pool = np.ones(POOL_BYTES, np.uint8)
        self._transport = open_transport("mooncake", "a")
        self._transport.register([Region(self._pool.ctypes.data, POOL_BYTES)])
        self._here = np.array([self._pool.ctypes.data], np.uint64)

    def hello(self) -> list[Any]:
        return [self._transport.metadata().hex(), self._pool.ctypes.data]

    def meet(self, hello: list[Any]) -> None:
        self._transport.connect("peer", bytes.fromhex(hello[0]))
        self._there = np.array([hello[1]], np.uint64)

    def send(self, nbytes: int) -> None:
        if not nbytes:
            self._transport.tell("peer", b"tag")
            return
        write = self._transport.write("peer", self._here, self._there, np.array([nbytes], np.uint64), b"tag")
        while not write.poll():
            time.sleep(self._sleep_s)

    def arrived(self) -> int:
        return len(self._transport.arrivals())

    def close(self) -> None:
        self._transport.close()


WAYS: dict[str, Callable[[], Way]] = {
    "TransferNotify": Notification,
    "own link": partial(Link, SLEEP_S),
    "own link, spun": partial(Link, 0.0),
}


def wait(way: Way) -> None:
    """Waits for an arrival with short sleeps, as the users of the transport do; exits if nothing arrives in time."""
    until = time.monotonic() + GIVE_UP_S
    while not way.arrived():
        if time.monotonic() > until:
            raise SystemExit("nothing arrives")
        time.sleep(SLEEP_S)


def echo() -> None:
    """Runs in the other process: answers as many writes as requested, and prints the processor time used for them."""
    ways: dict[str, Way] = {name: kind() for name, kind in WAYS.items()}
    print(json.dumps({name: way.hello() for name, way in ways.items()}), flush=True)
    for name, hello in json.loads(sys.stdin.readline()).items():
        ways[name].meet(hello)
    for line in sys.stdin:
        name, nbytes, count = json.loads(line)
        cpu = time.process_time()
        for _ in range(count):
            wait(ways[name])
            ways[name].send(nbytes)
        print(time.process_time() - cpu, flush=True)
    for way in ways.values():
        way.close()


def main() -> None:
    """Starts the other process, measures the ways in turns and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="round trips per row (default: %(default)s)")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        echo()
        return
    far = subprocess.Popen(
        [sys.executable, __file__, "--echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert far.stdin is not None
    assert far.stdout is not None
    ways: dict[str, Way] = {name: kind() for name, kind in WAYS.items()}
    for name, hello in json.loads(far.stdout.readline()).items():
        ways[name].meet(hello)
    far.stdin.write(json.dumps({name: way.hello() for name, way in ways.items()}) + "\n")
    took: dict[tuple[str, int], list[float]] = {(name, nbytes): [] for nbytes, _ in SIZES for name in ways}
    cpu_s = dict.fromkeys(took, 0.0)
    batch = max(1, args.count // ROUNDS)
    for _ in range(ROUNDS):
        for name, nbytes in took:
            far.stdin.write(json.dumps([name, nbytes, batch]) + "\n")
            far.stdin.flush()
            cpu = time.process_time()
            for _ in range(batch):
                started = time.perf_counter()
                ways[name].send(nbytes)
                wait(ways[name])
                took[name, nbytes].append((time.perf_counter() - started) * 1e6)
            cpu_s[name, nbytes] += time.process_time() - cpu + float(far.stdout.readline())
    print(f"{'told by':<16} {'write':<8} {'count':>6} {'median µs':>10} {'p99 µs':>10} {'CPU µs':>8}")
    for nbytes, size in SIZES:
        for name in ways:
            times = sorted(took[name, nbytes])
            print(
                f"{name:<16} {size:<8} {len(times):>6} {statistics.median(times):>10.0f} "
                f"{times[int(len(times) * 0.99)]:>10.0f} {cpu_s[name, nbytes] / len(times) * 1e6:>8.0f}"
            )
    for way in ways.values():
        way.close()
    far.stdin.close()
    far.stdout.close()
    far.wait(10)


if __name__ == "__main__":
    main()
