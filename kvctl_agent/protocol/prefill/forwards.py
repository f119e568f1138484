"""Calls of the prefill engine: a room is begun, its forward runs, pages are computed, nothing follows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.prefill.dispatch import Dispatch
from kvctl_agent.protocol.prefill.rooms import PrefillState, SendRooms
from kvctl_agent.protocol.prefill.staging import StagingRequests
from kvctl_agent.protocol.send_room import SendRoom


@dataclass(eq=False)
class Forwards:
    """Takes what the engine computes into the rooms' ledgers."""

    context: MachineContext
    state: PrefillState
    rooms: SendRooms
    staging: StagingRequests
    dispatch: Dispatch

    def on_send_room(self, event: ev.SendRoom) -> None:
        ev.check_room(event.room)
        ended = self.state.ended.get(event.room)
        if ended is not None and not ended.claimed:
            self.state.ended[event.room] = ended._replace(claimed=True)
            self.context.act(ev.StateChanged(event.room, ended.state, ended.failure))
            self.context.act(ev.Released(event.room))
            return
        room = self.state.rooms.get(event.room) or self.rooms.begin(event.room)
        if room.claimed:
            raise LocalProtocolError(f"room {event.room} is being sent already; a room number is used once at a time")
        room.claimed = True
        self.context.act(ev.StateChanged(room.room, room.state, room.failure))
        if room.released:  # it failed before our engine came
            self.context.act(ev.Released(room.room))

    def on_prefetch(self, event: ev.Prefetch) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return
        layers = self.rooms.layers
        if event.groups and not _tiles(event.groups, layers.start, layers.stop):
            groups = ", ".join(layer_range(lo, hi) for lo, hi in event.groups)
            own = layer_range(layers.start, layers.stop)
            text = f"room {room.room}: layer groups {groups} do not tile layers {own}"
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", text))
            return
        room.groups = event.groups
        room.prefetched = True
        if not room.ledger.given and not room.launched:  # else it is the next chunk's forward that begins
            room.forward_begun_ns = room.record.forward_begun_at = event.at_ns or self.context.now_ns
        self.staging.request_all(room)

    def on_launched(self, event: ev.Launched) -> None:
        room = self._claimed(event.room)
        if room is not None and room.failure is None:
            room.launched += 1

    def on_forward_failed(self, event: ev.ForwardFailed) -> None:
        room = self._claimed(event.room)
        if room is not None and not room.state.finished:
            self.rooms.fail(room, self.context.failure("KV_DEVICE", f"room {room.room}: {event.text}"))

    def on_send_pages(self, event: ev.SendPages) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return  # failed meanwhile; the handle says why
        if event.launched:
            room.launched -= 1
        if self.state.holds_back and not room.finished:
            room.held.append(event)
            room.since_ns = self.context.now_ns
        else:
            self._take_pages(room, event)
            if room.failure is None:
                self.rooms.progress(room)

    def _take_pages(self, room: SendRoom, event: ev.SendPages) -> None:
        if room.failure is not None:
            return
        try:
            steps = room.ledger.take(event.layers, event.pages, event.last)
        except LayoutError as error:
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        if room.ledger.complete:
            room.forward_done_ns = room.computed_ns = room.record.forward_done_at = event.at_ns
        if event.layers is None and not room.prefetched:
            room.prefetched = True  # cells go whole from here on
            self.staging.request_all(room)
        for leg in room.legs.values():
            self.dispatch.advance(room, leg, steps, event.at_ns)
            if room.failure is not None:
                return

    def on_finish(self, event: ev.Finish) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return
        room.finished = True
        room.aux_src, room.state_src = event.aux_index, event.states
        kept, room.held = room.held, []
        for pages in kept:
            self._take_pages(room, pages)
        if not room.ledger.complete:
            self._take_pages(room, ev.SendPages(event.room, np.empty(0, np.int32), True, event.at_ns))
        if room.failure is not None:
            return
        room.forward_done_ns = event.at_ns  # of what goes last; the forward's own end was told with its last pages
        room.record.event("finish", self.context.now_ns)
        for leg in room.legs.values():
            self.dispatch.queue_finals(room, leg)
        self.rooms.progress(room)

    def _claimed(self, number: int) -> SendRoom | None:
        """The room that our engine computes; one that it has not come for is a later life of the number."""
        room = self.state.rooms.get(number)
        return room if room is not None and room.claimed else None


def _tiles(groups: tuple[tuple[int, int], ...], lo: int, hi: int) -> bool:
    """Whether the groups lie one after the other from `lo` to `hi`."""
    edges = [lo, *(edge for group in groups for edge in group), hi]
    return edges[::2] == edges[1::2] and all(first < end for first, end in groups)
