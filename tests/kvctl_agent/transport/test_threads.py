"""Two threads post, one collects, one connects and disconnects a peer; no tag is lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.kvctl_agent.transport.conftest import WITH_THREADS

pytestmark = WITH_THREADS
WRITES = 300


def test_every_call_may_come_from_any_thread(crew: Any, engine: str) -> None:
    one, two, bystander = (crew.agent(engine, name) for name in ("one", "two", "bystander"))
    one.transport.connect("two", two.transport.metadata())
    two.transport.connect("one", one.transport.metadata())
    coming_and_going = bystander.transport.metadata()
    stop = threading.Event()

    def post(sender: int) -> None:
        for number in range(WRITES):
            offset = sender << 16
            write = one.transport.write(
                "two", one.at(offset), two.at(offset), np.full(1, 4096, np.uint64), b"%d.%d" % (sender, number)
            )
            one.finish(write)

    def collect() -> list[bytes]:
        tags: list[bytes] = []
        until = time.monotonic() + 60
        while len(tags) < 2 * WRITES and time.monotonic() < until:
            tags += [arrival.tag for arrival in two.transport.arrivals()]  # others call two.progress() meanwhile
            one.transport.arrivals()
            time.sleep(0.0001)
        stop.set()
        return tags

    def come_and_go() -> None:
        while not stop.wait(0.002):
            one.transport.connect("bystander", coming_and_going)
            one.transport.disconnect("bystander")

    with ThreadPoolExecutor(4) as pool:
        collected, *others = [
            pool.submit(collect),
            pool.submit(post, 0),
            pool.submit(post, 1),
            pool.submit(come_and_go),
        ]
        for other in others:
            other.result(60)
        tags = collected.result(60)
    assert sorted(tags) == sorted(b"%d.%d" % (sender, number) for sender in (0, 1) for number in range(WRITES))
