"""The prefill side of a steady fleet: computes rooms in a few forwards, whole or layer by layer, and sends them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvctl.lab.ranks.page_assignment import Pages
from kvctl.lab.ranks.steady.worker import Change, Worker
from kvctl.lab.ranks.steady_messages import Mismatch, News, OpenRoom, SendRoom, Serve
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.runtime.handles import Handle, Send


class PrefillWorker(Worker):
    """Computes a room when it is told of it, or when the decode side waits for it."""

    def __init__(self, serve: Serve, inbox: queue.SimpleQueue[Any], tell: Callable[[News], None]) -> None:
        self._waiting: dict[int, tuple[SendRoom, Send]] = {}
        super().__init__(serve, inbox, tell)

    def begin(self, command: OpenRoom | SendRoom) -> Handle:
        if not isinstance(command, SendRoom):
            raise LocalProtocolError(f"room {command.room}: {self.start.name} is a prefill rank and opens nothing")
        send = self.agent.send(command.room)
        if command.at_once:
            self._compute(command, send)
        else:
            self._waiting[command.room] = command, send
        return send

    def goes_on(self, change: Change) -> None:
        if change.state is RoomState.WAITING_FOR_INPUT and (waiting := self._waiting.pop(change.handle.room, None)):
            self._compute(*waiting)

    def landed(self, number: int) -> tuple[int, Mismatch | None]:
        return 0, None

    def over(self, number: int) -> None:
        self._waiting.pop(number, None)

    def serving(self) -> list[int]:
        return [] if self.agent.waiting_for() else [self.start.instance]

    def _compute(self, command: SendRoom, send: Send) -> None:
        self.tenancy.fill(command.room)
        groups = _cut(self.agent.local.layers, command.groups) if command.groups > 1 else []
        send.prefetch(groups)
        pages = self.tenancy.pages(command.room)
        edges = [len(pages) * cut // command.chunks for cut in range(command.chunks + 1)]
        for at, (first, end) in enumerate(itertools.pairwise(edges)):
            last = at == command.chunks - 1
            if not (last and command.hangs):
                self.later(at * command.gap_s, partial(self._feed, send, groups, pages[first:end], last=last))

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


def _cut(layers: range, groups: int) -> list[range]:
    """Consecutive layer groups, as even as they divide."""
    count = min(groups, len(layers))
    edges = [layers.start + len(layers) * cut // count for cut in range(count + 1)]
    return [range(lo, hi) for lo, hi in itertools.pairwise(edges)]
