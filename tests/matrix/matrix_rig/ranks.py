"""All ranks of one role of a case, in this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.content import Content, allocate_pool, own_coord, own_side
from kvctl.lab.ranks.messages import Room, Start
from kvctl.lab.ranks.request import Role
from kvctl.lab.ranks.verify import verify
from kvctl.lab.ranks.worker import build_agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.parts import PartFactories
from kvctl_agent.runtime.handles import Handle, Receive, Send
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.expected import expected
from tests.matrix.matrix_rig.loads import PREFILL_ONLY, RING_MIB, cuts_of, groups_of, rooms_of, starts_of
from tests.support.folded import folded

READY_S = 60.0
ROOMS_S = 60.0
_CLOSE_S = 5.0
_RING_ALIGN_BYTES = 4096

Counts = Counter[tuple[str, str]]
"""Counters by name and label."""


class WentWrong(Exception):
    """Failures by rank and room."""


class Checked(NamedTuple):
    """Result of the verification of one role's pools: bytes compared, and errors."""

    nbytes: int
    problems: list[str]


class RankOf:
    """One rank: its pool, the expected contents, its agent."""

    def __init__(self, start: Start, rooms: Sequence[Room], factories: PartFactories) -> None:
        self.start = start
        self.pool = allocate_pool(start)
        try:
            self.content = Content(self.pool, start)
            self.content.take(rooms)
            self.agent = build_agent(start, self.pool, factories=factories)
        except BaseException:
            self.pool.close()
            raise

    def close(self) -> None:
        self.agent.close(_CLOSE_S)
        self.pool.close()


class Ranks(ABC):
    """The ranks of one role; its methods are the steps of a case, which both roles execute at the same time."""

    def __init__(self, case: Case, role: Role, directory: Path) -> None:
        self.case = case
        self.rooms = rooms_of(case)
        self.ranks: list[RankOf] = []
        # One that has room for a part and a half: whoever writes the next ones has to wait.
        factories = PartFactories(ring=_rings_of(expected(case).largest_part_bytes * 3 // 2))
        try:
            for start in starts_of(case, role, directory):
                self.ranks.append(RankOf(start, [room for room in self.rooms if self.owns(room, start)], factories))
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """Starts all agents and waits until they know their peers."""
        for rank in self.ranks:
            rank.agent.start()
        deadline = time.monotonic() + READY_S
        for rank in self.ranks:
            rank.agent.wait_ready(max(0.1, deadline - time.monotonic()))

    @abstractmethod
    def owns(self, room: Room, start: Start) -> bool:
        """Whether a rank takes part in a room."""

    @abstractmethod
    def run(self) -> Counts:
        """Transfers all rooms.

        Returns:
            The agents' counters, summed over the ranks.

        Raises:
            WentWrong: a room did not succeed; the message contains the causes.
        """

    def settle(self, handles: Sequence[tuple[RankOf, Handle]]) -> Counts:
        """Waits until all rooms have ended on all ranks."""
        deadline = time.monotonic() + ROOMS_S
        wrong = []
        for rank, handle in handles:
            state = handle.wait(max(0.0, deadline - time.monotonic()))
            if state is not RoomState.SUCCESS or not handle.released:
                index = rank.content.rooms[handle.room].index
                cause = handle.error["text"] if handle.error else "no cause"
                held = "" if handle.released else ", its pages still held"
                wrong.append(f"room {index} is {state.label}{held} on {rank.start.name}: {cause}")
        if wrong:
            raise WentWrong("\n".join([*wrong[:12], *self.complaints()[:12]]))
        return self.counters()

    def complaints(self) -> list[str]:
        """Warnings recorded by the agents."""
        return [
            f"{event['agent']} recorded: {event['text']}"
            for rank in self.ranks
            for event in folded(rank.agent.telemetry).recorder.since(None, 64)["events"]
            if event["severity"] in ("warning", "error")
        ]

    def counters(self) -> Counts:
        """Counters that show which paths were used."""
        total: Counts = Counter()
        for rank in self.ranks:
            for name, values in measure.counters(rank.agent.observe.metrics()).items():
                total.update({(name, label): value for label, value in values.items() if value})
        return total

    def check(self) -> Checked:
        """Compares every pool with the expected contents and poison elsewhere."""
        nbytes, problems = 0, []
        for rank in self.ranks:
            report = verify(rank.content, "full")
            nbytes += report["bytes"]
            problems += [
                f"{rank.start.name}: room {wrong['room']} {wrong['where']}: {wrong['found']}, not {wrong['expected']}: "
                f"{wrong['hint']}"
                for wrong in report["mismatches"]
            ]
        return Checked(nbytes, problems)

    def close(self) -> None:
        """Closes all agents."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(RankOf.close, self.ranks))
        self.ranks = []


class PrefillRanks(Ranks):
    """Ranks that compute at once: they send every room, forward by forward, in layer groups if the case says so."""

    def __init__(self, case: Case, directory: Path) -> None:
        super().__init__(case, "prefill", directory)
        for rank in self.ranks:
            # They compute what decode has cached as well.
            rank.content.take([replace(room, prefix_tokens=0) for room in rank.content.rooms.values()])
            rank.content.poison()
            rank.content.fill(0)

    def owns(self, room: Room, start: Start) -> bool:
        return room.instance == start.instance and room.number % own_side(start).dp == own_coord(start).dp

    def run(self) -> Counts:
        handles: list[tuple[RankOf, Send]] = []
        for rank in self.ranks:
            handles += [(rank, rank.agent.send(number)) for number in rank.content.rooms]
        for rank, send in handles:
            self._forward(rank, send)
        return self.settle(handles)

    def _forward(self, rank: RankOf, send: Send) -> None:
        room, pages = rank.content.rooms[send.room], rank.content.pages(send.room)
        groups = groups_of(rank.agent.layers) if self.case.grouped else []
        send.prefetch(groups)
        for first, end in cuts_of(self.case, room):
            # The last room's last pages are only known for such when it is finished.
            last = end == len(pages) and room.index != 2
            for group in groups:
                send.layers(group, pages[first:end], last)
            if not groups:
                send.pages(pages[first:end], last)
        send.finish(rank.content.slots[send.room], rank.content.states(send.room))


class DecodeRanks(Ranks):
    """Ranks that receive the rooms into poisoned pools and verify every byte."""

    def __init__(self, case: Case, directory: Path) -> None:
        super().__init__(case, "decode", directory)
        for rank in self.ranks:
            rank.content.poison()

    def owns(self, room: Room, start: Start) -> bool:
        return room.decode_dp == own_coord(start).dp

    def run(self) -> Counts:
        handles: list[tuple[RankOf, Receive]] = []
        for rank in self.ranks:
            for room in rank.content.rooms.values():
                handles.append((rank, self._open(rank, room)))
        return self.settle(handles)

    def _open(self, rank: RankOf, room: Room) -> Receive:
        alone = room.index == PREFILL_ONLY
        return rank.agent.receive(
            room.number,
            rank.content.pages(room.number)[room.prefix_tokens // self.case.page_size :],
            prefill=rank.start.bootstraps[room.instance],
            prefix_tokens=0 if alone else room.prefix_tokens,
            aux_index=rank.content.slots[room.number],
            state_indices=rank.content.states(room.number),
            prefill_only=alone,
        )


def _rings_of(nbytes: int) -> Callable[..., RingMemory]:
    """Uses rings smaller than the configuration allows."""
    whole = -(-nbytes // _RING_ALIGN_BYTES) * _RING_ALIGN_BYTES
    return lambda asked, *more: RingMemory(asked - (RING_MIB << 20) + whole, *more)
