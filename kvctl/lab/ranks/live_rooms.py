"""Rooms of a rank in a live fleet (`kvctl demo`), which are opened one by one on commands of the parent.

A decode rank receives each room and compares every byte of the rooms that succeed. A prefill rank computes each room in
one or more simulated forwards, at once or when the decode side waits for it, and sends all layers together or in layer
groups. Nothing blocks: delayed work is kept in a heap ordered by time.

Under the fault `preempt` an engine takes the pages of a room back, fills them with poison as soon as the agent permits
their reuse, and goes on with the room in other pages: it computes the prompt again, or opens the room again.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.ranks.content import Content
from kvctl.lab.ranks.messages import Abort, Ended, Mismatch, OpenRoom, Released, Room, SendRoom, Start
from kvctl.lab.ranks.pattern import Pages
from kvctl.lab.ranks.verify import LiveVerifier
from kvctl_agent.agent import Agent
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.protocol.machine import RECALLED
from kvctl_agent.runtime.handles import Handle, Receive, Send

if TYPE_CHECKING:
    from kvctl.lab.ranks.worker import StateChange

_RELEASE_POLL_S = 0.01  # the agent does not report when the pages of a finished room become free
_IDLE_S = 0.5
_LONGEST_RUN_S = 0.5  # until a room is preempted; most are preempted early


class LiveRooms:
    """Opens, computes, verifies and releases the rooms of one live rank.

    Attributes:
        handles: the agent's handles, by room number, of rooms that have not ended or whose pages are not free yet.
        verifier: checks received rooms and free pages.
    """

    def __init__(
        self,
        start: Start,
        agent: Agent,
        content: Content,
        faults: FaultInjector,
        send: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """Fills the whole pool with poison.

        Args:
            faults: decides which rooms are preempted.
            send: sends a message to the parent; called with its kind and its data.
        """
        self._start = start
        self._agent = agent
        self._content = content
        self._faults = faults
        self._send = send
        self.handles: dict[int, Handle] = {}
        self._ended_rooms: set[int] = set()
        self._to_compute: dict[int, SendRoom] = {}  # rooms that are computed once the decode side waits for them
        self._commands: dict[int, OpenRoom | SendRoom] = {}  # by room, while it has a handle
        self._recalled: dict[int, Send | Receive] = {}  # rooms whose pages the engine has taken back, not reused yet
        self._forwards: dict[int, int] = {}  # by room: number of times that it was computed
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
            self._commands[number] = command
            if isinstance(command, OpenRoom):
                handle: Send | Receive = self._agent.receive(
                    number,
                    self._content.pages(number)[command.prefix_tokens // self._start.page_size :],
                    prefill=self._start.bootstraps[command.instance],
                    prefix_tokens=command.prefix_tokens,
                    aux_index=self._content.slots[number],
                    state_indices=self._content.states(number),
                )
            else:
                handle = self._agent.send(number)
                if command.at_once:
                    self._compute(command, handle)
                else:
                    self._to_compute[number] = command
            self.handles[number] = handle
            if draw := self._faults.should_fire("preempt"):
                self._later(_LONGEST_RUN_S * draw.random() ** 2, partial(self._recall, handle))
        except KvctlError as error:
            self.handles.pop(number, None)
            self._commands.pop(number, None)
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
        if number in self._ended_rooms or (number in self._recalled and _was_recalled(change.handle)):
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
            self._recalled.pop(number, None)
            self._forwards.pop(number, None)
            del self._commands[number]
            self._send("released", Released(room=number, at_ns=time.monotonic_ns()))
        for number in [number for number, handle in self._recalled.items() if handle.recalled]:
            self._go_on(self._recalled.pop(number))
        waits = [_RELEASE_POLL_S if self._ended_rooms or self._recalled else _IDLE_S]
        if self._due:
            waits.append(max(0.0, self._due[0][0] - time.monotonic()))
        return min(waits)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def _recall(self, handle: Send | Receive) -> None:
        """Takes the pages of a room back; `_go_on` follows once they may be reused."""
        number = handle.room
        if self.handles.get(number) is not handle or handle.state.finished or handle.released:
            return
        handle.recall()
        self._recalled[number] = handle
        self._to_compute.pop(number, None)
        self._forwards[number] = self._forwards.get(number, 0) + 1  # forwards of the old pages end without effect

    def _go_on(self, handle: Send | Receive) -> None:
        """Gives a recalled room other pages, and computes it or opens it again."""
        number, command = handle.room, self._commands[handle.room]
        if isinstance(handle, Send):
            if handle.released:  # all parts were sent, or the room has failed
                return
            room = self._content.rooms[number]
            self._content.remove(number)
            self._content.add(room)
            assert isinstance(command, SendRoom)
            if command.at_once or handle.state is not RoomState.BOOTSTRAPPING:
                self._compute(command, handle)
            else:
                self._to_compute[number] = command
            return
        del self.handles[number]
        self._content.remove(number)
        self.open(command)

    def _compute(self, command: SendRoom, send: Send) -> None:
        if self._start.verify:  # otherwise nobody looks at the bytes, and the fill takes longer than the transfer
            self._content.fill_room(self._content.rooms[command.room])
        groups = _split(self._agent.layers, command.groups) if command.groups > 1 else []
        send.prefetch(groups)
        pages = self._content.pages(command.room)
        edges = [len(pages) * cut // command.chunks for cut in range(command.chunks + 1)]
        for at, (first, end) in enumerate(itertools.pairwise(edges)):
            last = at == command.chunks - 1
            if not (last and command.hangs):
                number = self._forwards.get(send.room, 0)
                self._later(
                    at * command.gap_s, partial(self._forward_done, send, groups, pages[first:end], last, number)
                )

    def _forward_done(self, send: Send, groups: Sequence[range], pages: Pages, last: bool, forward: int) -> None:
        number = send.room
        if self.handles.get(number) is not send or self._forwards.get(number, 0) != forward:
            return  # the room was released or preempted, and another room may own its pages
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


def _was_recalled(handle: Handle) -> bool:
    """Whether a decode rank's room has ended because this engine took its pages back."""
    return isinstance(handle, Receive) and handle.error is not None and handle.error["code"] == RECALLED


def _split(layers: range, groups: int) -> list[range]:
    """Splits layers into consecutive groups of nearly equal size."""
    count = min(groups, len(layers))
    edges = [layers.start + len(layers) * cut // count for cut in range(count + 1)]
    return [range(lo, hi) for lo, hi in itertools.pairwise(edges)]
