"""Admission of rooms on a decode rank: registered by the engine, planned and opened at the whole prefill instance.

A room is opened at every rank of the prefill instance, once all of them are known and ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import aux_writer, slices_to_reader, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.decode.rooms import DecodeState, RecvRooms
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.protocol.recv_room import Final, RecvRoom
from kvctl_agent.protocol.tag import PartKey, PartKind


@dataclass(eq=False)
class RecvAdmission:
    """Takes rooms from the engine and opens them."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms

    def on_open_room(self, event: ev.OpenRoom) -> None:
        context = self.context
        ev.check_room(event.room)
        ev.check_room(event.nonce)
        if last := self.state.rooms.get(event.room):
            if last.state is not RoomState.SUCCESS:
                raise LocalProtocolError(f"room {event.room} is open already; a room number is used once at a time")
            self.rooms.forget(last)  # our engine is done with it; a rank that does not know yet asks, and is told
        record = context.telemetry.rooms.open(event.room, event.nonce)
        record.pages = event.total_pages - event.prefix_pages
        context.telemetry.metrics.add("kvctl_rooms_opened_total", 1)
        opening = msg.RoomOpen(
            event.room,
            event.nonce,
            event.pages.astype("<i4").tobytes(),
            event.prefix_pages,
            event.total_pages,
            {},
            event.aux_index,
            [items.astype("<i4").tobytes() for items in event.states],
            event.prefill_only,
        )
        room = RecvRoom(opening, event.instance, event.pages, record, context.now_ns)
        self.state.rooms[event.room] = room
        self.rooms.enter(room, RoomState.BOOTSTRAPPING)
        if clash := self.state.clashes.get(event.instance):
            self.rooms.fail(room, context.failure("KV_COMPAT_MISMATCH", clash))
            return
        if event.instance not in self.state.rosters:
            self.state.rosters[event.instance] = ()
            context.act(ev.FindInstance(event.instance))
        for name in self.state.rosters[event.instance]:
            peer = context.peers[name]
            if peer.state is PeerState.REFUSED:
                self.fail_waiting(event.instance, context.failure("KV_COMPAT_MISMATCH", peer.refusal))
                return
        self._open(room)

    def open_waiting(self) -> None:
        """Open the rooms whose instance is complete by now."""
        for room in list(self.state.rooms.values()):
            if room.failure is None:
                self._open(room)

    def fail_waiting(self, instance: str, failure: Failure) -> None:
        """Rooms that wait for an instance which does not fit us would wait for ever."""
        for room in list(self.state.rooms.values()):
            if not room.legs and room.instance == instance:
                self.rooms.fail(room, failure)

    def _open(self, room: RecvRoom) -> None:
        """Make the plan and open the room everywhere, once the whole instance is there."""
        context = self.context
        roster = self.state.rosters[room.instance]
        if room.legs or not roster or not all(map(context.is_ready, roster)):
            return
        first = context.peers[roster[0]]
        inputs = first.inputs
        assert inputs is not None
        try:
            self._plan(room, inputs, roster)
        except LayoutError as error:
            self.rooms.fail(room, context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        room.opening = msgspec.structs.replace(room.opening, inputs=first.wire)
        for leg in room.legs.values():
            self.rooms.remind(room, leg)
        room.record.peers = [room.writers[writer] for writer in room.shares]
        room.record.event("open", context.now_ns)
        room.resend_ns = context.now_ns + context.timing.resend_ns

    def _plan(self, room: RecvRoom, inputs: PlanInputs, roster: tuple[str, ...]) -> None:
        opening = room.opening
        total, prefix = opening.total_pages, opening.prefix_pages
        if len(room.pages) != total - prefix:
            raise LayoutError(f"{len(room.pages)} pages for {prefix}..{total}")
        wanted = [] if opening.prefill_only else slices_to_reader(inputs, room.room, self.context.rank)
        finals: dict[Final, tuple[TransferSlice | None, ev.Pages]] = {}
        if opening.aux_index >= 0:
            key = PartKey(aux_writer(inputs, room.room, self.context.rank), 0, 0, 0)
            finals[PartKind.AUX, key] = None, np.array([opening.aux_index], np.int32)
        if any(opening.states):
            components = [segment.index for segment in inputs.segments if segment.state]
            asked = [index for index, items in zip(components, opening.states, strict=False) if items]
            for share in state_slices_to_reader(inputs, room.room, self.context.rank):
                if share.segment in asked:
                    key = PartKey(share.writer, share.segment, share.layer_lo, share.layer_hi)
                    items = np.frombuffer(opening.states[components.index(share.segment)], "<i4")
                    finals[PartKind.STATE, key] = share, items
        cells: dict[int, Sequence[Chunk]] = {}  # by cp rank, which alone decides

        def cells_of(writer: int) -> Sequence[Chunk]:
            cp = inputs.prefill.coord(writer).cp
            if cp not in cells:
                cells[cp] = writer_cells(inputs, room.room, writer, total, prefix)
            return cells[cp]

        room.plan(wanted, cells_of, finals, {name: self.context.peers[name].incarnation for name in roster})
