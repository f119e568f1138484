"""Runs the agents of one role of a small fleet, controlled by JSON lines on stdin; answers go to stdout.

Prefill and decode run the same numbered rooms independently, several at a time. The room's number and the seed
determine which rooms are aborted, by which rank and when, so neither process needs to ask the other.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvctl_agent.transport.environment import prepare_environment

prepare_environment()

import numpy as np  # noqa: E402

from benchmarks.leaks.census import Sizes, census, instances  # noqa: E402
from kvctl_agent import Agent, KVPool, Rank, RoomState, local_shards  # noqa: E402
from kvctl_agent.layout.shape import ModelShape  # noqa: E402

SHAPE = ModelShape(num_layers=2, num_kv_heads=4, k_dim=64, v_dim=64, dtype_bytes=1)
PAGE_SIZE, PAGES, ROOM_PAGES = 4, 1024, 6
LATEST_ABORT_S = 0.025  # a room takes 5 to 50 ms, depending on the number in flight

Answer = dict[str, Any]


class Abort(NamedTuple):
    """Planned abort of a room: the role and rank that abort it, and the delay after the rank joined the room."""

    role: str
    rank: int
    after_s: float


def planned_abort(seed: int, room: int, share: float, ranks: dict[str, int]) -> Abort | None:
    """Returns the abort of a room, the same in both processes; None for a room that may succeed.

    Args:
        seed: seed of the run.
        room: number of the room.
        share: share of rooms to abort, from 0 to 1.
        ranks: number of ranks by role.
    """
    dice = random.Random(f"{seed}/{room}")
    if dice.random() >= share:
        return None
    role = dice.choice(("prefill", "decode"))
    return Abort(role, dice.randrange(ranks[role]), dice.uniform(0, LATEST_ABORT_S))


class Side:
    """Agents of one role: all ranks of a prefill instance of some TP size, or a decode instance with TP 1."""

    def __init__(self, role: Any, sizes: dict[str, int], name: str, bootstrap: str, config: dict[str, Any]) -> None:
        self.role = role
        self.sizes = sizes
        self._handles: dict[int, list[Any]] = {}
        self._slots: dict[int, int] = {}
        self._free = list(range(PAGES // ROOM_PAGES))
        self._pools: list[KVPool] = []
        self.agents: list[Agent] = []
        for number in range(sizes[role]):
            rank = Rank(tp=number, tp_size=sizes[role])
            pool = KVPool.allocate(local_shards(SHAPE, PAGE_SIZE, rank.parallel_config, rank.coord), PAGE_SIZE, PAGES)
            self._pools.append(pool)
            self.agents.append(
                Agent(
                    role=role,
                    rank=rank,
                    pool=pool,
                    name=f"{name}-{number}",
                    bootstrap=bootstrap,
                    model=SHAPE,
                    **config,
                )
            )

    def start(self) -> None:
        for agent in self.agents:
            agent.start()

    def ready(self, timeout: float) -> None:
        for agent in self.agents:
            agent.wait_ready(timeout)

    # ---- single rooms -----------------------------------------------------------------------------------------

    def receive(self, room: int, pages: int = ROOM_PAGES, prefill_only: bool = False, fake: bool = False) -> None:
        slot = self._slots[room] = self._free.pop()
        indices = np.arange(slot * ROOM_PAGES, slot * ROOM_PAGES + (0 if prefill_only else pages))
        (agent,) = self.agents
        self._handles[room] = [agent.receive(room, indices, prefill_only=prefill_only, fake=fake)]

    def claim(self, room: int, fake: bool = False) -> None:
        self._handles[room] = [agent.send(room, fake=fake) for agent in self.agents]

    def feed(self, room: int) -> None:
        source = (np.arange(ROOM_PAGES) * 7 + room) % PAGES
        for send in self._handles[room]:
            send.prefetch()
            send.pages(source, last=True)
            send.finish()

    def abort(self, room: int, rank: int = 0) -> None:
        self._handles[room][rank].abort("given up by the test")

    def known(self, room: int, timeout: float) -> None:
        """Waits until the room has left Bootstrapping on every rank, so that its peers know it.

        Raises:
            TimeoutError: a rank still has the room in Bootstrapping.
        """
        deadline = time.monotonic() + timeout
        while any(handle.state < RoomState.WAITING_FOR_INPUT for handle in self._handles[room]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.role}: after {timeout:g} s room {room} is not known on the other side")
            time.sleep(0.002)

    def wait(self, room: int, timeout: float) -> list[Answer]:
        """Waits for the end of the room, returns its outcome on each rank, and forgets a room that has ended."""
        deadline = time.monotonic() + timeout
        handles = self._handles[room]
        for handle in handles:
            handle.wait(max(0.0, deadline - time.monotonic()))
        ends = [{"state": each.state.name, "released": each.released, "error": each.error} for each in handles]
        if all(each.state.finished and each.released for each in handles):
            self._forget(room)
        return ends

    # ---- many rooms -------------------------------------------------------------------------------------------

    def run(self, first: int, count: int, window: int, aborts: float, seed: int, timeout: float) -> Answer:
        """Runs rooms `first` to `first + count`, at most `window` at a time, and counts them by outcome on this role.

        Raises:
            TimeoutError: rooms have not ended; the message names them.
        """
        ends: Counter[str] = Counter()
        due: list[tuple[float, int, int]] = []
        todo = iter(range(first, first + count))
        room = next(todo, None)
        deadline = time.monotonic() + timeout
        while self._handles or room is not None:
            while room is not None and len(self._handles) < window:
                self._begin(room)
                plan = planned_abort(seed, room, aborts, self.sizes)
                if plan is not None and plan.role == self.role:
                    heapq.heappush(due, (time.monotonic() + plan.after_s, room, plan.rank))
                room = next(todo, None)
            while due and due[0][0] <= time.monotonic():
                _, given_up, rank = heapq.heappop(due)
                if given_up in self._handles:
                    self.abort(given_up, rank)
            over = [number for number, handles in self._handles.items() if _over(handles)]
            for number in over:
                ends[self._end_of(number)] += 1
                self._forget(number)
            if time.monotonic() > deadline:
                left = {number: [h.state.name for h in handles] for number, handles in self._handles.items()}
                raise TimeoutError(f"{self.role}: rooms that have not ended after {timeout:g} s: {left}")
            if not over:
                time.sleep(0.001)
        return dict(ends)

    def _begin(self, room: int) -> None:
        if self.role == "decode":
            self.receive(room)
        else:
            self.claim(room)
            self.feed(room)

    def _end_of(self, room: int) -> str:
        """Returns the final state of a room, or the code of its first cause of failure."""
        for handle in self._handles[room]:
            if handle.state is not RoomState.SUCCESS:
                return str(handle.error["code"])
        return "SUCCESS"

    def _forget(self, room: int) -> None:
        del self._handles[room]
        slot = self._slots.pop(room, None)
        if slot is not None:
            self._free.append(slot)

    # ---- what agents hold -------------------------------------------------------------------------------------

    def census(self) -> Sizes:
        """Returns the container sizes of all agents; paths begin with the agent's name."""
        return {f"{agent.name}: {path}": size for agent in self.agents for path, size in census(agent.parts).items()}

    def instances(self) -> Sizes:
        return instances(*(root for agent in self.agents for root in (agent.parts, agent.admin.worker.folded)))

    def errors(self) -> list[str]:
        """Returns the texts of exceptions that control, arrival and transfer threads caught, which are bugs."""
        rows = [row for agent in self.agents for row in agent.observe.events()["events"]]
        return [row["text"] for row in rows if row["kind"] in ("control", "scatter", "transport", "engine")]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for pool in self._pools:
            pool.close()


def _over(handles: list[Any]) -> bool:
    return all(handle.state.finished and handle.released for handle in handles)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    # Engines print to stdout: redirect that to stderr, and write the answers to a copy of the original stdout.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        side = Side(**arguments)
        for line in sys.stdin:
            ask = json.loads(line)
            do = ask.pop("do")
            print(json.dumps({"answer": getattr(side, do)(**ask)}), file=out, flush=True)


if __name__ == "__main__":
    main()
