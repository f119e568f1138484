"""Rooms of a rank in a live fleet (`kvctl demo`), which are opened one by one on commands of the parent.

A decode rank receives each room and compares every byte of the rooms that succeed. A prefill rank computes each room in
one or more simulated forwards, at once or when the decode side waits for it, and sends all layers together or in layer
groups. Nothing blocks: delayed work is kept in a heap ordered by time.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvctl.lab.ranks.content import Content
from kvctl.lab.ranks.messages import Abort, Ended, Mismatch, OpenRoom, Released, Room, SendRoom, Start
from kvctl.lab.ranks.pattern import Pages
from kvctl.lab.ranks.verify import LiveVerifier
from kvctl_agent.agent import Agent
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.runtime.handles import Handle, Send

if TYPE_CHECKING:
    from kvctl.lab.ranks.worker import StateChange

_RELEASE_POLL_S = 0.01  # the agent does not report when the pages of a finished room become free
_IDLE_S = 0.5


class LiveRooms:
    """Opens, computes, verifies and releases the rooms of one live rank.

    Attributes:
        handles: the agent's handles, by room number, of rooms that have not ended or whose pages are not free yet.
        verifier: checks received rooms and free pages.
    """

    def __init__(
        self, start: Start, agent: Agent, content: Content, send: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        """Fills the whole pool with poison.

        Args:
            send: sends a message to the parent; called with its kind and its data.
        """
        self._start = start
        self._agent = agent
        self._content = content
        self._send = send
        self.handles: dict[int, Handle] = {}
        self._ended_rooms: set[int] = set()
        self._to_compute: dict[int, SendRoom] = {}  # rooms that are computed once the decode side waits for them
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.verifier = LiveVerifier(content, start.verify)
        content.poison()

    def open(self, command: OpenRoom | SendRoom) -> None:
        """Opens a room on this rank; reports the room as failed and released if the agent refuses it."""
        number = command.room
        try:
            self._content.add(Room(command.index, number, command.tokens, command.prefix_tokens))
            self.verifier.opened(number)
            if isinstance(command, OpenRoom):
                self.handles[number] = self._agent.receive(
                    number,
                    self._content.pages(number)[command.prefix_tokens // self._start.page_size :],
                    prefill=self._start.bootstraps[command.instance],
                    prefix_tokens=command.prefix_tokens,
                    aux_index=self._content.slots[number],
                    state_indices=self._content.states(number),
                )
            else:
                send = self.handles[number] = self._agent.send(number)
                if command.at_once:
                    self._compute(command, send)
                else:
                    self._to_compute[number] = command
        except KvctlError as error:
            self.handles.pop(number, None)
            self._content.remove(number)
            cause = Failure(rank=self._start.name, code=type(error).__name__, at_ns=time.time_ns(), text=str(error))
            now_ns = time.monotonic_ns()
            self._report_end(number, RoomState.FAILED, cause, now_ns, 0, None)
            self._send("released", Released(room=number, at_ns=now_ns))

    def abort(self, command: Abort) -> None:
        """Aborts a room; no effect if the room has ended or is unknown."""
        if handle := self.handles.get(command.room):
            handle.abort(command.reason)

    def changed(self, change: StateChange) -> None:
        """Handles a state change: computes a room that decode waits for; verifies and reports a room that has ended."""
        number = change.handle.room
        if self.handles.get(number) is not change.handle:
            return
        if not change.state.finished:
            if change.state is RoomState.WAITING_FOR_INPUT and (command := self._to_compute.pop(number, None)):
                assert isinstance(change.handle, Send)
                self._compute(command, change.handle)
            return
        if number in self._ended_rooms:
            return
        self._ended_rooms.add(number)
        nbytes, mismatch = 0, None
        if change.state is RoomState.SUCCESS and self._start.role == "decode":
            nbytes, mismatch = self.verifier.verify(number)
        self._report_end(number, change.state, change.handle.error, change.at_ns, nbytes, mismatch)

    def poll(self) -> float:
        """Does the work that is due and reports rooms whose pages have become free.

        Returns:
            Seconds after which `poll` should be called again.
        """
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for number in [number for number in self._ended_rooms if self.handles[number].released]:
            self._ended_rooms.discard(number)
            del self.handles[number]
            self._content.remove(number)
            self._to_compute.pop(number, None)
            self._send("released", Released(room=number, at_ns=time.monotonic_ns()))
        waits = [_RELEASE_POLL_S if self._ended_rooms else _IDLE_S]
        if self._due:
            waits.append(max(0.0, self._due[0][0] - time.monotonic()))
        return min(waits)

    def _compute(self, command: SendRoom, send: Send) -> None:
        self._content.fill_room(self._content.rooms[command.room])
        groups = _split(self._agent.layers, command.groups) if command.groups > 1 else []
        send.prefetch(groups)
        pages = self._content.pages(command.room)
        edges = [len(pages) * cut // command.chunks for cut in range(command.chunks + 1)]
        for at, (first, end) in enumerate(itertools.pairwise(edges)):
            last = at == command.chunks - 1
            if not (last and command.hangs):
                forward: Callable[[], None] = partial(self._forward_done, send, groups, pages[first:end], last=last)
                heapq.heappush(self._due, (time.monotonic() + at * command.gap_s, next(self._order), forward))

    def _forward_done(self, send: Send, groups: Sequence[range], pages: Pages, last: bool) -> None:
        number = send.room
        if self.handles.get(number) is not send:
            return  # the room was released, and another room may own its pages
        if not groups:
            send.pages(pages, last=last)
        for group in groups:
            send.layers(group, pages, last=last)
        if last:
            send.finish(self._content.slots[number], self._content.states(number))

    def _report_end(
        self, room: int, state: RoomState, cause: Failure | None, at_ns: int, nbytes: int, mismatch: Mismatch | None
    ) -> None:
        ended = Ended(room=room, state=state.label, cause=cause, at_ns=at_ns, verified_bytes=nbytes, mismatch=mismatch)
        self._send("ended", ended)


def _split(layers: range, groups: int) -> list[range]:
    """Splits layers into consecutive groups of nearly equal size."""
    count = min(groups, len(layers))
    edges = [layers.start + len(layers) * cut // count for cut in range(count + 1)]
    return [range(lo, hi) for lo, hi in itertools.pairwise(edges)]
