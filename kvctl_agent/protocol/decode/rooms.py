"""Rooms of a decode rank: which one a message is about, and their states from the opening to the tombstone.

Rules it keeps (design: one room, end to end):

- Success when every rank has accepted, all planned cells are in their pages and all final parts are there; never
  by counting.
- A failed room is released and forgotten when all ranks have drained; one that succeeded, when all know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext, failure_of
from kvctl_agent.protocol.grant_table import GrantTable
from kvctl_agent.protocol.local_info import LocalInfo, Timing
from kvctl_agent.protocol.peer import FormerIncarnation, Peer, PeerState
from kvctl_agent.protocol.recv_room import RecvRoom, WriterTransfer
from kvctl_agent.protocol.tombstones import RoomKey, Tombstones


class DecodeState:
    """Everything that a decode machine remembers between two events.

    Attributes:
        peers: by name; see `instances`.
        rosters: by instance, the names of its ranks; see `instances`.
        absent_ranks: by instance that is not complete, what its registry says; see `instances`.
        clashes: instances of which a rank has a name that another's has, in words; see `instances`.
        rooms: by number; `admission` adds, `RecvRooms` removes.
        tombstones: ended rooms, and whether each had succeeded; see `RecvRooms`.
        book: who holds which region of the ring; see `grants`.
    """

    def __init__(self, local: LocalInfo, timing: Timing) -> None:
        self.peers: dict[str, Peer] = {}
        self.rosters: dict[str, tuple[str, ...]] = {}
        self.absent_ranks: dict[str, str] = {}
        self.clashes: dict[str, str] = {}
        self.rooms: dict[int, RecvRoom] = {}
        self.tombstones: Tombstones[bool] = Tombstones(timing.bootstrap_ns)
        self.book = GrantTable(local.ring_bytes)


@dataclass(eq=False)
class RecvRooms:
    """Moves rooms from state to state, and tells the prefill ranks until each has answered."""

    context: MachineContext
    state: DecodeState

    def find(self, peer: Peer, number: int, nonce: int) -> tuple[RecvRoom, WriterTransfer] | None:
        """The room that a message is about; where there is none, that is counted."""
        room = self.state.rooms.get(number)
        if room is None or room.nonce != nonce:
            known = self.state.tombstones.find(RoomKey("", number, nonce)) is not None
            self.context.drop("tombstone" if known else "unknown-room")
            return None
        leg = room.legs.get(peer.name)
        if leg is None or leg.incarnation != peer.incarnation:
            self.context.drop("unexpected")
            return None
        return room, leg

    def answers(self, leg: WriterTransfer) -> bool:
        """Whether the very process that a room was opened at may be spoken to."""
        peer = self.context.peers.get(leg.peer)
        return peer is not None and peer.usable and peer.incarnation == leg.incarnation

    def answer_unknown(self, peer: Peer, number: int, nonce: int) -> None:
        """A writer speaks of a room that is over or was never here: it must not wait for ever."""
        if self.state.tombstones.find(RoomKey("", number, nonce)):
            self.context.send(peer.name, msg.RoomDone(number, nonce))
            return
        text = f"{self.context.local.name} has no room {number} with this nonce"
        failure = self.context.failure("KV_ROOM_UNKNOWN", text)
        self.context.send(peer.name, msg.RoomFailed(number, nonce, **failure))

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_room_accepted(self, peer: Peer, message: msg.RoomAccepted) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is None or found[1].accepted:
            return
        room, leg = found
        leg.accepted = True
        room.unaccepted -= 1
        if room.unaccepted == 0 and room.state is RoomState.BOOTSTRAPPING:
            self.enter(room, RoomState.TRANSFERRING if room.begun else RoomState.WAITING_FOR_INPUT)
            self.complete(room)

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-failed"))
        if found := self.find(peer, message.room, message.nonce):
            self.fail(found[0], failure_of(message))

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is not None and found[0].state is RoomState.SUCCESS and message.of == "room-done":
            found[1].acked = True
            self.settle(found[0])

    # ---- states -----------------------------------------------------------------------------------------------

    def enter(self, room: RecvRoom, state: RoomState) -> None:
        now_ns = self.context.now_ns
        room.state = state
        room.since_ns = now_ns
        room.record.state(state, now_ns)
        if state.finished:
            room.record.finish(now_ns)
        self.context.act(ev.StateChanged(room.room, state, room.failure))

    def complete(self, room: RecvRoom) -> None:
        """Let a room succeed to which nothing is missing any more."""
        if not room.complete or room.state.finished:
            return
        if room.state is RoomState.BOOTSTRAPPING:
            return  # a rank that has not accepted would never learn how the room ended
        room.record.event("success", self.context.now_ns)
        self.enter(room, RoomState.SUCCESS)
        room.released = True
        self.context.act(ev.Released(room.room))
        self._say_end(room)

    def fail(self, room: RecvRoom, failure: Failure) -> None:
        """End a room for this cause, unless it has ended."""
        if room.state.finished:
            return
        room.failure = failure
        room.record.fail(failure, self.context.now_ns)
        self.context.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        self.context.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        self.enter(room, RoomState.FAILED)
        self._say_end(room)
        self.settle(room)

    def settle(self, room: RecvRoom) -> None:
        """Forget a room that has ended everywhere; the pages of a failed one are released only then."""
        if room.failure is not None:
            if not all(leg.drained for leg in room.legs.values()):
                return
            if any(self.state.book.of_room(room.key_of(name)) for name in room.legs):
                return  # a scatter is still out
            room.released = True
            self.context.act(ev.Released(room.room))
        elif room.state is not RoomState.SUCCESS or not all(leg.acked for leg in room.legs.values()):
            return
        self.forget(room)

    def forget(self, room: RecvRoom) -> None:
        """Leave a tombstone in the place of a room."""
        del self.state.rooms[room.room]
        key = RoomKey("", room.room, room.nonce)
        self.state.tombstones.bury(key, room.failure is None, self.context.now_ns)
        self.context.telemetry.finish(room.record, self.context.now_ns)

    # ---- what the prefill ranks are told ----------------------------------------------------------------------

    def _say_end(self, room: RecvRoom) -> None:
        """Tell every prefill rank how the room ended; said again until each has answered."""
        room.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        for leg in room.legs.values():
            self.remind(room, leg)

    def remind(self, room: RecvRoom, leg: WriterTransfer) -> bool:
        """Say what this rank has not answered yet; False when there is nothing."""
        if room.failure is not None:
            if leg.drained:
                return False
            message: msg.Message = msg.RoomAbort(room.room, room.nonce, **room.failure)
        elif room.state is RoomState.SUCCESS:
            if leg.acked:
                return False
            message = msg.RoomDone(room.room, room.nonce)
        else:
            if leg.accepted:
                return False
            message = msgspec.structs.replace(room.opening, to=leg.incarnation)
        if self.answers(leg):
            self.context.send(leg.peer, message)
            return True
        if room.failure is not None and (former := self._former(leg)) is not None:
            self.context.send(leg.peer, message, former.route)
        return False

    def _former(self, leg: WriterTransfer) -> FormerIncarnation | None:
        """The process that a room was opened at, where another one has taken its place since."""
        peer = self.context.peers.get(leg.peer)
        return peer.former.get(leg.incarnation) if peer is not None else None

    # ---- time -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Deadlines and resends."""
        now_ns = self.context.now_ns
        for room in list(self.state.rooms.values()):
            if not room.state.finished:
                self._check_deadline(room)
            elif room.failure is not None:
                self._check_drained(room)
            if now_ns >= room.resend_ns > 0:
                self._resend(room)

    def _resend(self, room: RecvRoom) -> None:
        kind = "room-end" if room.state.finished else "room-open"
        reminded = sum(self.remind(room, leg) for leg in room.legs.values())
        if reminded:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", reminded, kind)
        # A process that was replaced, or is lost, may never answer, and is asked seldom.
        timing = self.context.timing
        room.resend_ns = self.context.now_ns + (timing.resend_ns if reminded else timing.lost_ns)

    def _check_deadline(self, room: RecvRoom) -> None:
        timing, failure = self.context.timing, self.context.failure
        waited = self.context.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING:
            roster = self.state.rosters.get(room.instance, ())
            if not room.legs and waited > timing.suspect_ns and (gone := self._gone(roster)):
                self.fail(room, failure("KV_PEER_LOST", f"{stuck}: {gone}"))
            elif waited > timing.bootstrap_ns:
                silent = [leg.peer for leg in room.legs.values() if not leg.accepted]
                silent = silent or [self._absent(name) for name in roster if not self.context.is_ready(name)]
                why = f"not accepted by {', '.join(silent)}"
                if not silent:
                    missing = self.state.absent_ranks.get(room.instance, "no answer from its registry")
                    why = f"the prefill instance at {room.instance}: {missing}"
                self.fail(room, failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {why}"))
        elif waited > timing.waiting_ns:
            code = "KV_ROOM_STUCK_SCATTER" if room.missing and room.all_landed else "KV_ROOM_STUCK_TRANSFER"
            if room.state is RoomState.WAITING_FOR_INPUT:
                code = "KV_ROOM_STUCK_WAITING"
            self.fail(room, failure(code, f"{stuck}: {room.gaps()}"))

    def _check_drained(self, room: RecvRoom) -> None:
        """A rank that is heard well and yet never drains keeps pages and ring from us: said once, counted from then."""
        waited = self.context.now_ns - room.since_ns
        if room.overdue or waited <= self.context.timing.waiting_ns:
            return
        room.overdue = True
        undrained = [name for name, leg in room.legs.items() if not leg.drained]
        for name in undrained:
            self.state.book.quarantine_room(room.key_of(name))
        who = ", ".join(undrained) or f"a scatter here ({room.gaps()})"
        text = f"room {room.room} failed {waited / 1e9:.1f} s ago and its memory is still held: not drained by {who}"
        self.context.note("room-undrained", text, "warning", room=room.room)

    def _gone(self, roster: tuple[str, ...]) -> str:
        """A rank of a room's instance that was lost and has not come back soon; "" where there is none.

        Nobody waits for its next life: that will not have heard of the room, which its router sent to this one.
        """
        for name in roster:
            peer = self.context.peers.get(name)
            if peer is None or peer.state is not PeerState.LOST:
                continue
            if self.context.now_ns - peer.heard_ns > self.context.timing.suspect_ns:
                return peer.last_error or f"{name} is lost"
        return ""

    def _absent(self, name: str) -> str:
        """A rank that is not ready, and why where that is known."""
        peer = self.context.peers.get(name)
        return f"{name} ({'; '.join(peer.differences)})" if peer is not None and peer.differences else name
