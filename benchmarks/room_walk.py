"""Counts the calls between modules of kvctl_agent that one staged room takes, from `Send.pages` to `Receive.wait`.

    python -m benchmarks.room_walk [--calls]

Two prefill ranks and one decode rank run in this process over the loopback transport, and every thread is traced. A
crossing is a call of a function of one module by another module; a call through the standard library counts for the
caller behind it. Threads also poll for work, and how often they do so depends on timing only: a call of one of the
functions in `_POLLS` that finds nothing is not counted, nor are the calls that it makes. A poll that finds something
counts like any other call. Each agent also handles a tick ten times a second, whether a room is under way or not, and
on a busy machine a room takes long enough for several ticks. So of several rooms the one with the fewest crossings is
reported, during which no tick was due; the median of all rooms is printed for comparison.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from kvctl_agent import Agent, KVPool, ModelShape, Rank, RoomState, local_shards

_PAGES, _PAGE_SIZE, _ROOMS, _WARM_UP = 8, 4, 9, 3
_SETTLE_S = 0.25  # until grants have arrived and the agents are idle
_SHAPE = ModelShape(2, 8, 8, 8, 2)
_PACKAGE = "kvctl_agent."
_POLLS = {
    ("kvctl_agent.transport.loopback", "arrivals"),
    ("kvctl_agent.transport.loopback", "poll"),
    ("kvctl_agent.transport.loopback", "progress"),
    ("kvctl_agent.security.unix_router", "recv_multipart"),
}
"""Module and function of each poll; its result is false, or it raises, if it finds nothing."""

Call = tuple[str, str, str, str]  # module and function, of the caller and of the called


class Tracer:
    """Counts crossings while `on` is set, on all threads that start after the tracer was created."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[Call] = Counter()
        self._polls: dict[int, list[Counter[Call]]] = {}  # by thread: a counter for each of its running polls
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self) -> None:
        """Starts counting at zero; polls that were running when counting stopped are forgotten."""
        self.calls, self._polls = Counter(), {}
        self.on = True

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        if not self.on or not (called := _module(frame)).startswith(_PACKAGE):
            return
        running = self._polls.setdefault(threading.get_ident(), [])
        poll = (called, frame.f_code.co_name) in _POLLS
        if event == "return" and poll and running:
            found = running.pop()
            if result:
                (running[-1] if running else self.calls).update(found)
        if event != "call":
            return
        if poll:
            running.append(Counter())
        caller = frame.f_back
        while caller is not None and not _module(caller).startswith(_PACKAGE):
            caller = caller.f_back
        if caller is not None and _module(caller) != called:
            call = _module(caller), caller.f_code.co_name, called, frame.f_code.co_name
            (running[-1] if running else self.calls)[call] += 1


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _agent(role: Any, tp: int, tp_size: int, bootstrap: str) -> Agent:
    rank = Rank(tp=tp, tp_size=tp_size)
    pool = KVPool.allocate(local_shards(_SHAPE, _PAGE_SIZE, rank.parallel_config, rank.coord), _PAGE_SIZE, 4 * _PAGES)
    small: dict[str, Any] = {"staging_buffer_mb": 4, "staging_ring_mb": 1, "transport": "loopback", "path": "staged"}
    return Agent(
        role=role, rank=rank, pool=pool, name=f"{role}-{tp}", bootstrap=bootstrap, model=_SHAPE, **small
    ).start()


def walk(tracer: Tracer, writers: list[Agent], reader: Agent, room: int) -> Counter[Call]:
    """Transfers one room; returns how often each call between modules was made."""
    pages = np.arange(_PAGES)
    receive = reader.receive(room, pages)
    sends = [writer.send(room) for writer in writers]
    for send in sends:
        send.prefetch()
    time.sleep(_SETTLE_S)
    tracer.start()
    for send in sends:
        send.pages(pages, last=True)
        send.finish()
    states = {handle.wait(10) for handle in (receive, *sends)}
    tracer.on = False
    assert states == {RoomState.SUCCESS}, receive.error
    return tracer.calls


def main() -> None:
    """Prints the crossings and modules of one room; with --calls also each call between modules."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.environ["KVCTL_SOCKET_DIR"] = directory
        tracer = Tracer()
        bootstrap = f"ipc://{Path(directory)}/boot"
        writers = [_agent("prefill", tp, 2, bootstrap) for tp in range(2)]
        reader = _agent("decode", 0, 1, bootstrap)
        for agent in (*writers, reader):
            agent.wait_ready(10)
        walks = [walk(tracer, writers, reader, room) for room in range(1, 1 + _WARM_UP + _ROOMS)][_WARM_UP:]
        sys.setprofile(None)
        for agent in (*writers, reader):
            agent.close()
    fewest = min(walks, key=Counter.total)
    print(f"crossings {fewest.total()} (median of {_ROOMS} rooms {statistics.median(map(Counter.total, walks)):g})")
    print(f"distinct calls {len(fewest)}")
    print(f"modules {len({module for call in fewest for module in (call[0], call[2])})}")
    if "--calls" in sys.argv[1:]:
        for call, count in fewest.most_common():
            print(count, "{}.{} -> {}.{}".format(*call))


if __name__ == "__main__":
    main()
