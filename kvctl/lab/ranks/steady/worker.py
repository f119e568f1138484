"""Worker of a demo or soak: rooms come at any time, and none of them is ever waited for.

Everything runs on the rank's main thread: commands and state changes are taken from one queue, and what is due later is
kept in order of time.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_faults
from kvctl.lab.ranks.content import allocate_pool, own_coord, own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.messages import (
    Abort,
    Command,
    Ended,
    Met,
    Mismatch,
    OpenRoom,
    Released,
    SendRoom,
    SetFault,
    Start,
    Tell,
    Usage,
)
from kvctl.lab.ranks.pattern import Pages
from kvctl.lab.ranks.steady.agent import make_agent, set_fault
from kvctl.lab.ranks.steady.page_allocator import PageAllocator
from kvctl.lab.ranks.worker import CLOSE_TIMEOUT_S, Change
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError, LocalProtocolError
from kvctl_agent.runtime.handles import Handle, Send

SendMessage = Callable[[str, Mapping[str, Any]], None]
"""Sends a message of a kind."""

_LOOK_S = 0.01  # how often rooms that have ended are looked at: nobody calls when their pages are free
_MEET_S = 0.02
_IDLE_S = 0.5
_PROGRESS_EVERY_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SteadyWorker:
    """Pool, agent and rooms of one rank of either role.

    A decode rank opens each room when it is told to, and compares every byte of those that succeed. A prefill rank
    computes a room, in a few forwards, when it is told of it or when the decode side waits for it, and sends it whole
    or by groups of layers.

    Attributes:
        rooms: handles of rooms that have not ended, or whose pages are not free yet.
    """

    def __init__(self, start: Start, inbox: queue.SimpleQueue[Any], send: SendMessage) -> None:
        """Allocate the pool and start the agent; state changes go to `inbox`, messages to `send`."""
        self.start = start
        self.at = own_coord(start)
        self.rooms: dict[int, Handle] = {}
        self._send = send
        self._inbox = inbox
        self._ending: set[int] = set()
        self._waiting: dict[int, SendRoom] = {}  # rooms that are computed once the decode side waits for them
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._met: list[int] | None = None
        self._progress_at = 0.0
        self._pool = allocate_pool(start)
        self.tenancy = PageAllocator(self._pool, start, start.verify)
        self.faults = FaultInjector(start.name, start.seed)
        for fault in parse_faults(start.faults) if start.faults else ():
            self.faults.set(fault)
        self.agent = make_agent(
            start,
            self.faults,
            self._pool,
            own_side(start),
            self.at,
            model_shape(start.shape, start.page_size),
            self._on_state,
        )
        self.agent.start()

    # ---- what the fleet says ------------------------------------------------------------------------------------

    def handle(self, item: Command | Change) -> None:
        """Carry out a command, or take note of a room's state change.

        Raises:
            LocalProtocolError: it is a command of a bench.
        """
        match item:
            case Change():
                self._changed(item)
            case OpenRoom() | SendRoom():
                self._open(item)
            case Abort():
                if handle := self.rooms.get(item.room):
                    handle.abort(item.reason)
            case SetFault():
                self._send("faults", set_fault(self.faults, item))
            case Tell():
                self._send("usage", self._usage(item))
            case _:
                raise LocalProtocolError(f"{self.start.name} belongs to no bench and has no {item.do}")

    def _open(self, command: OpenRoom | SendRoom) -> None:
        try:
            self.tenancy.take(command.room, command.index, command.tokens, command.prefix_tokens)
            self._receive(command) if isinstance(command, OpenRoom) else self._send_room(command)
        except KvctlError as error:
            self.rooms.pop(command.room, None)
            self.tenancy.give_back(command.room)
            cause = Failure(rank=self.start.name, code=type(error).__name__, at_ns=time.time_ns(), text=str(error))
            now_ns = time.monotonic_ns()
            self._ended(command.room, RoomState.FAILED, cause, now_ns, 0, None)
            self._send("released", Released(room=command.room, at_ns=now_ns))

    def _receive(self, command: OpenRoom) -> None:
        self.rooms[command.room] = self.agent.receive(
            command.room,
            self.tenancy.pages(command.room)[command.prefix_tokens // self.start.page_size :],
            prefill=self.start.bootstraps[command.instance],
            prefix_tokens=command.prefix_tokens,
            aux_index=self.tenancy.content.rooms[command.room].slot,
        )

    def _send_room(self, command: SendRoom) -> None:
        send = self.rooms[command.room] = self.agent.send(command.room)
        if command.at_once:
            self._compute(command, send)
        else:
            self._waiting[command.room] = command

    def _compute(self, command: SendRoom, send: Send) -> None:
        self.tenancy.fill(command.room)
        groups = _cut(self.agent.layers, command.groups) if command.groups > 1 else []
        send.prefetch(groups)
        pages = self.tenancy.pages(command.room)
        edges = [len(pages) * cut // command.chunks for cut in range(command.chunks + 1)]
        for at, (first, end) in enumerate(itertools.pairwise(edges)):
            last = at == command.chunks - 1
            if not (last and command.hangs):
                self._later(at * command.gap_s, partial(self._feed, send, groups, pages[first:end], last=last))

    def _feed(self, send: Send, groups: Sequence[range], pages: Pages, last: bool) -> None:
        """One forward is done."""
        if self.rooms.get(send.room) is not send:
            return  # it has ended, and its pages may be another's by now
        if not groups:
            send.pages(pages, last=last)
        for group in groups:
            send.layers(group, pages, last=last)
        if last:
            send.finish(self.tenancy.content.rooms[send.room].slot)

    # ---- what the agent says ------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        """A room has reached a state."""
        number = change.handle.room
        if self.rooms.get(number) is not change.handle:
            return
        if not change.state.finished:
            if change.state is RoomState.WAITING_FOR_INPUT and (command := self._waiting.pop(number, None)):
                assert isinstance(change.handle, Send)
                self._compute(command, change.handle)
            return
        if number in self._ending:
            return
        self._ending.add(number)
        nbytes, mismatch = 0, None
        if change.state is RoomState.SUCCESS and self.start.verify and self.start.role == "decode":
            nbytes, mismatch = self.tenancy.verify(number)
        self._ended(number, change.state, change.handle.error, change.at_ns, nbytes, mismatch)

    def _serving(self) -> list[int]:
        """The prefill instances that this rank can exchange rooms with by now."""
        if self.start.role == "prefill":
            return [] if self.agent.waiting_for() else [self.start.instance]
        serving = set(self.agent.serving())
        return [number for number, bootstrap in enumerate(self.start.bootstraps) if bootstrap in serving]

    # ---- time ---------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def look(self) -> float:
        """Do what is due, and see which rooms' pages are free and which peers have come.

        Returns:
            Seconds until the next look is due.
        """
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for number in [number for number in self._ending if self.rooms[number].released]:
            self._ending.discard(number)
            del self.rooms[number]
            self.tenancy.give_back(number)
            self._waiting.pop(number, None)
            self._send("released", Released(room=number, at_ns=time.monotonic_ns()))
        serving = self._serving()
        if serving != self._met and (serving or self._met):
            self._met = serving
            self._send("met", Met(instances=serving, incarnation=f"{self.agent.incarnation:016x}"))
        now = time.monotonic()
        if now - self._progress_at >= _PROGRESS_EVERY_S and (missing := self.agent.waiting_for()):
            self._progress_at = now
            self._send("progress", {"doing": missing})
        return self._wait_s()

    def close(self) -> None:
        """Close the agent, then the pool that it wrote to."""
        self.agent.close(CLOSE_TIMEOUT_S)
        self._pool.close()

    def _wait_s(self) -> float:
        waits = [_IDLE_S]
        if self._ending:
            waits.append(_LOOK_S)
        if self._met is None or len(self._met) < len(self.start.bootstraps):
            waits.append(_MEET_S)
        if self._due:
            waits.append(max(0.0, self._due[0][0] - time.monotonic()))
        return min(waits)

    def _usage(self, command: Tell) -> Usage:
        """Everything that could leak, in one answer."""
        statistics, staging = self.agent.observe.statistics(), self.agent.observe.staging()
        ring, buffers = staging["ring"], staging["buffers"]
        return Usage(
            token=command.token,
            at_ns=time.monotonic_ns(),
            rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
            fds=sum(1 for _ in Path("/proc/self/fd").iterdir()),
            threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
            rooms=len(self.rooms),
            records=statistics.rooms,
            ring_bytes=ring["size_bytes"] if ring else 0,
            ring_used_bytes=statistics.ring_used_bytes,
            quarantined_bytes=statistics.quarantined_bytes,
            buffers_in_use=buffers["pieces_used"] if buffers else 0,
            strays=self.tenancy.sweep() if command.sweep else [],
        )

    def _ended(
        self, room: int, state: RoomState, cause: Failure | None, at_ns: int, nbytes: int, mismatch: Mismatch | None
    ) -> None:
        ended = Ended(room=room, state=state.label, cause=cause, at_ns=at_ns, verified_bytes=nbytes, mismatch=mismatch)
        self._send("ended", ended)

    def _on_state(self, handle: Handle, state: RoomState) -> None:
        # On the agent's control thread: only note the time and pass it on.
        self._inbox.put(Change(handle, state, time.monotonic_ns()))


def _cut(layers: range, groups: int) -> list[range]:
    """Consecutive layer groups, as even as they divide."""
    count = min(groups, len(layers))
    edges = [layers.start + len(layers) * cut // count for cut in range(count + 1)]
    return [range(lo, hi) for lo, hi in itertools.pairwise(edges)]
