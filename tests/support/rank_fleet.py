"""A planned fleet in this process, driven as a bench drives it; and scripted rank processes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from kvctl.lab.ranks.group import RankGroup
from kvctl.lab.ranks.messages import (
    Command,
    Connect,
    Prepare,
    Room,
    Run,
    RunReport,
    Start,
    Verify,
    VerifyReport,
    planned_room,
)
from kvctl.lab.ranks.plan import Plan, PlannedRank
from kvctl.lab.ranks.planner import rank_start
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens
from kvctl.lab.ranks.resolve import make_plan
from kvctl.lab.ranks.worker import Worker

MIB = 1 << 20
TIMEOUT_S = 60.0


def small_request(**changes: Any) -> PlanRequest:
    """Returns a request for a model so small that its fleet starts and runs quickly."""
    wanted: dict[str, Any] = {
        "prefill": (Sizes(),),
        "decode": Sizes(),
        "loads": (Load(4, Tokens(values=(40, 7))),),
        "memory_bytes": 256 * MIB,
        "seed": 7,
        "layers": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "page_size": 4,
        "chunk_tokens": 16,
        "rooms": 6,
        **changes,
    }
    return PlanRequest(**wanted)


class Fleet:
    """All ranks of a plan, in threads of this process; `run` runs the first batch of its load."""

    def __init__(self, request: PlanRequest, directory: str) -> None:
        self.plan: Plan = make_plan(request)
        self._request = request
        self._laps = 0
        self.timeout_s = TIMEOUT_S
        self.workers: dict[str, Worker] = {}
        self._answers: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(len(self.plan["ranks"]))
        try:
            for rank in self.plan["ranks"]:
                start = self._start(rank, directory)
                self.workers[start.name] = Worker(start, SimpleQueue(), partial(self._receive, start.name))
            self._all(Worker.begin)
            self._ask(Connect(TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def rooms(self) -> tuple[Room, ...]:
        """Returns the rooms of the first batch under new numbers."""
        self._laps += 1
        load = self.plan["loads"][0]
        first, end = load["batches"][0]
        return tuple(
            planned_room(load["rooms"][index], index, self._laps * self.plan["room_stride"] + index)
            for index in range(first, end)
        )

    def run(self, path: str, pipeline: str = "off", **command: Any) -> dict[str, RunReport]:
        """Runs the first batch of rooms; returns the reports of the ranks by name."""
        prepare = Prepare(0, path, self.rooms(), poison=True, pipeline=pipeline)
        self._ask(prepare)
        return self._ask(Run(tuple(self.plan["loads"][0]["windows"]), self.timeout_s, **command))

    def verify(self) -> dict[str, VerifyReport]:
        """Returns the decode ranks' verification reports by name."""
        return {name: found for name, found in self._ask(Verify("full")).items() if name.startswith("decode")}

    def close(self) -> None:
        list(self._pool.map(Worker.close, self.workers.values()))
        self._pool.shutdown()

    def ask(self, name: str, command: Command) -> Any:
        """Has one rank obey a command; returns its answer."""
        worker = self.workers[name]
        worker.inbox.put(command)
        while (item := worker.next()) is not None:
            worker.handle(item)
        return self._answers[name]

    def _ask(self, command: Command) -> dict[str, Any]:
        """Has all ranks obey a command, each in its thread; returns the answers by name."""
        return self._all(lambda worker: self.ask(worker.start.name, command))

    def _all(self, action: Callable[[Worker], Any]) -> dict[str, Any]:
        return dict(zip(self.workers, self._pool.map(action, self.workers.values()), strict=True))

    def _start(self, rank: PlannedRank, directory: str) -> Start:
        prefix = f"p{rank['instance']}-" if rank["instance"] >= 0 else ""
        name = f"{prefix}{rank['role']}-{rank['unique']}"
        return rank_start(self.plan, self._request, rank, name, directory)

    def _receive(self, name: str, kind: str, data: Any) -> None:
        """Keeps the answer to a command; None in the rank's inbox then ends the wait for it."""
        if kind == "answer":
            self._answers[name] = data
            self.workers[name].inbox.put(None)


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    """Yields a function that starts a fleet from the arguments of `small_request`; closes the fleets after the test."""
    with ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="rig-", dir="/tmp")  # socket paths must stay short
        stack.callback(shutil.rmtree, directory, ignore_errors=True)

        def start(**changes: Any) -> Fleet:
            started = Fleet(small_request(**changes), directory)
            stack.callback(started.close)
            return started

        yield start


_SCRIPT = """
import json, os, signal, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[-1]))
lines = channel.makefile("rwb")
def say(kind, **data):
    lines.write(json.dumps(dict(kind=kind, data=data)).encode() + b"\\n"); lines.flush()
def answer(line, **data):
    say("answer", **data)
BODY
"""

StartRank = Callable[..., None]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr("kvctl.lab.ranks.group.CLOSE_S", 0.2)  # most scripted ranks ignore that their channel closes
    with RankGroup() as group:
        yield group


@pytest.fixture
def start(group: RankGroup) -> StartRank:
    """Returns a function that starts a rank process with the script `body`; it may use `lines`, `say`, `answer`."""

    def start(name: str, body: str = "for line in lines: answer(line, pid=os.getpid())") -> None:
        group.launch(name, program=[sys.executable, "-c", _SCRIPT.replace("BODY", body)])

    return start
