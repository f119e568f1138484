"""A second process with one agent, controlled by the tests: JSON lines in on stdin, out on the descriptor in argv.

Between commands it progresses its transport every few milliseconds, as a rank's threads do. stdout is not used, so that
a test sees everything an engine prints there.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvctl_agent.transport import Region, Transport
from tests.support.engines import open_engine

POOL_BYTES = int(os.environ.get("PEER_POOL_BYTES", 4 << 20))
DUTY_S = 0.005


def commands(transport: Transport) -> Iterator[dict[str, Any]]:
    """Yields the commands from stdin, progressing the engine meanwhile."""
    stdin = sys.stdin.fileno()
    pending = b""
    while True:
        while b"\n" not in pending:
            while not select.select([stdin], [], [], DUTY_S)[0]:
                transport.progress()
            more = os.read(stdin, 1 << 16)
            if not more:
                return
            pending += more
        line, _, pending = pending.partition(b"\n")
        yield json.loads(line)


def collect(transport: Transport, pool: np.ndarray, count: int, timeout_s: float) -> list[dict[str, Any]]:
    """Waits for `count` arrivals; each with the first byte of the pool at that moment."""
    until = time.monotonic() + timeout_s
    landed: list[dict[str, Any]] = []
    while len(landed) < count and time.monotonic() < until:
        landed += [
            {"peer": arrival.peer, "tag": arrival.tag.hex(), "first": int(pool[0])} for arrival in transport.arrivals()
        ]
        time.sleep(0.0002)
    return landed


def idle(transport: Transport, seconds: float, poll_s: float) -> float:
    """CPU time of the whole process, all threads, as a share of one core."""
    started, cpu = time.monotonic(), time.process_time()
    if poll_s:
        while time.monotonic() - started < seconds:
            transport.arrivals()
            time.sleep(poll_s)
    else:
        time.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - started)


def flood(transport: Transport, pool: np.ndarray, peer: str, addr: int) -> None:
    """Writes the pool to a peer again and again, with other bytes each time."""
    everything = np.array([pool.nbytes], np.uint64)
    while True:
        pool += 1
        write = transport.write(
            peer, np.array([pool.ctypes.data], np.uint64), np.array([addr], np.uint64), everything, b"flood"
        )
        while not write.poll():
            time.sleep(0.0001)


def main() -> None:
    engine, name, answers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    transport = open_engine(engine, name)
    pool = np.zeros(POOL_BYTES, np.uint8)
    transport.register([Region(pool.ctypes.data, POOL_BYTES)])
    with os.fdopen(answers, "w") as out:

        def answer(**fields: Any) -> None:
            print(json.dumps(fields), file=out, flush=True)

        answer(metadata=transport.metadata().hex(), addr=pool.ctypes.data, pid=os.getpid())
        for ask in commands(transport):
            match ask.pop("do"):
                case "connect":
                    answer(done=transport.connect(ask["peer"], bytes.fromhex(ask["metadata"])))
                case "collect":
                    answer(arrivals=collect(transport, pool, **ask))
                case "read":
                    answer(hex=pool[ask["offset"] : ask["offset"] + ask["nbytes"]].tobytes().hex())
                case "tell":
                    answer(done=transport.tell(ask["peer"], bytes.fromhex(ask["tag"])))
                case "rest":
                    answer(done=None)
                    select.select([sys.stdin], [], [])  # no duty is done until there is another command
                case "flood":
                    answer(done=None)
                    flood(transport, pool, **ask)
                case "idle":
                    answer(share=idle(transport, **ask))
    transport.close()


if __name__ == "__main__":
    main()
