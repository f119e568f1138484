"""What may happen to a room on a decode rank: opened, granted, landed, scattered, ended, forgotten.

Rules it keeps (design: one room, end to end):

- An arrival is believed only if it fits the plan, the nonce and, for a staged part, the very grant it names.
- A ring region is freed when its scatter is done, when its tag comes too late to matter, or when its writer has said
  that nothing is in flight.
- Success when every rank has accepted, all planned cells are in their pages and all final parts are there; never
  by counting.
- A failed room is released and forgotten when all ranks have drained; one that succeeded, when all know it.
"""

from __future__ import annotations

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.grant_table import GrantedRegion, GrantTable, RegionState
from kvctl_agent.protocol.local_info import LocalInfo, Timing
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import FormerIncarnation, Peer, PeerState
from kvctl_agent.protocol.recv_room import PartChecksum, RecvRoom, WriterTransfer
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.protocol.tombstones import RoomKey, Tombstones
from kvctl_agent.telemetry.hub import Telemetry

CHECKSUM = "KV_CHECKSUM_MISMATCH"
IN_PLACE = "in-place"
"""What parts are shown by that went straight to their pages: by which path is their writer's affair alone."""


class DecodeRooms(Machine):
    """Rooms and ring of one decode rank; `DecodeMachine` adds who says what."""

    def __init__(self, local: LocalInfo, timing: Timing, telemetry: Telemetry) -> None:
        super().__init__(local, timing, telemetry)
        self.book = GrantTable(local.ring_bytes)
        self.rooms: dict[int, RecvRoom] = {}
        self.rosters: dict[str, tuple[str, ...]] = {}  # by instance, the names of its ranks
        self._absent_ranks: dict[str, str] = {}  # by instance that is not complete, what its registry says
        self._clashes: dict[str, str] = {}  # instances of which a rank has a name that another's has, in words
        self._graves: Tombstones[bool] = Tombstones(timing.bootstrap_ns)  # whether the room had succeeded

    @property
    def open_rooms(self) -> int:
        return len(self.rooms)

    def roster(self, instance: str) -> tuple[str, ...]:
        return self.rosters.get(instance, ())

    @property
    def missing_peers(self) -> list[str]:
        """Ranks of the known instances that have not said hello. Safe to read from another thread."""
        return [name for roster in list(self.rosters.values()) for name in roster if not self.is_ready(name)]

    @property
    def quarantined_bytes(self) -> int:
        """Ring and page bytes of failed rooms that a lost rank, not proven dead, may still write, or one that has not
        drained for long. Safe to read from another thread."""
        total = self.book.quarantined_bytes
        for room in list(self.rooms.values()):
            if room.failure is None:
                continue
            for name, leg in room.legs.items():
                if not leg.drained and (room.overdue or not self.answers(leg)):
                    total += room.owed_bytes(name)
        return total

    def knows(self, room: int) -> bool:
        return room in self.rooms

    def on_set_timeouts(self, event: ev.SetTimeouts) -> None:
        super().on_set_timeouts(event)
        self._graves.keep_for(event.bootstrap_ns)

    def on_unsendable(self, event: ev.Unsendable) -> None:
        """Resending would not help, so the room fails instead of waiting for its deadline."""
        peer = self.peers.get(event.peer)
        found = self._find(peer, event.room, event.nonce) if peer is not None else None
        if found is not None:
            self._fail(found[0], self.failure("MESSAGE_UNSENDABLE", event.text))

    def watermark(self) -> list[int]:
        position = self.book.ring.watermark
        return [position.round, position.tail, self.book.ring.sequence]

    def is_ready(self, name: str) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.usable

    def answers(self, leg: WriterTransfer) -> bool:
        """Whether the very process that a room was opened at may be spoken to."""
        peer = self.peers.get(leg.peer)
        return peer is not None and peer.usable and peer.incarnation == leg.incarnation

    def _find(self, peer: Peer, number: int, nonce: int) -> tuple[RecvRoom, WriterTransfer] | None:
        """The room that a message is about; where there is none, that is counted."""
        room = self.rooms.get(number)
        if room is None or room.nonce != nonce:
            self.drop("tombstone" if self._graves.find(RoomKey("", number, nonce)) is not None else "unknown-room")
            return None
        leg = room.legs.get(peer.name)
        if leg is None or leg.incarnation != peer.incarnation:
            self.drop("unexpected")
            return None
        return room, leg

    # ---- states -----------------------------------------------------------------------------------------------

    def _state(self, room: RecvRoom, state: RoomState) -> None:
        room.state = state
        room.since_ns = self.now_ns
        room.record.state(state, self.now_ns)
        if state.finished:
            room.record.finish(self.now_ns)
        self.act(ev.StateChanged(room.room, state, room.failure))

    def _accept(self, room: RecvRoom, leg: WriterTransfer) -> None:
        if leg.accepted:
            return
        leg.accepted = True
        room.unaccepted -= 1
        if room.unaccepted == 0 and room.state is RoomState.BOOTSTRAPPING:
            self._state(room, RoomState.TRANSFERRING if room.begun else RoomState.WAITING_FOR_INPUT)
            self._complete(room)

    def _complete(self, room: RecvRoom) -> None:
        if not room.complete or room.state.finished:
            return
        if room.state is RoomState.BOOTSTRAPPING:
            return  # a rank that has not accepted would never learn how the room ended
        room.record.event("success", self.now_ns)
        self._state(room, RoomState.SUCCESS)
        room.released = True
        self.act(ev.Released(room.room))
        self._say_end(room)

    def _fail(self, room: RecvRoom, failure: Failure) -> None:
        if room.state.finished:
            return
        room.failure = failure
        room.record.fail(failure, self.now_ns)
        self.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        self.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        self._state(room, RoomState.FAILED)
        self._say_end(room)
        self._settle(room)

    def _settle(self, room: RecvRoom) -> None:
        """Forget a room that has ended everywhere; the pages of a failed one are released only then."""
        if room.failure is not None:
            if not all(leg.drained for leg in room.legs.values()):
                return
            if any(self.book.of_room(_key(room, name)) for name in room.legs):
                return  # a scatter is still out
            room.released = True
            self.act(ev.Released(room.room))
        elif room.state is not RoomState.SUCCESS or not all(leg.acked for leg in room.legs.values()):
            return
        self._bury(room)

    def _bury(self, room: RecvRoom) -> None:
        del self.rooms[room.room]
        self._graves.bury(RoomKey("", room.room, room.nonce), room.failure is None, self.now_ns)
        self.telemetry.finish(room.record, self.now_ns)

    # ---- what is said to the prefill ranks ----------------------------------------------------------------------

    def _say_end(self, room: RecvRoom) -> None:
        """Tell every prefill rank how the room ended; said again until each has answered."""
        room.resend_ns = self.now_ns + self.timing.resend_ns
        for leg in room.legs.values():
            self._remind(room, leg)

    def _remind(self, room: RecvRoom, leg: WriterTransfer) -> bool:
        """Say what this rank has not answered yet; False when there is nothing."""
        if room.failure is not None:
            if leg.drained:
                return False
            cause = room.failure
            message: msg.Message = msg.RoomAbort(
                room.room, room.nonce, cause["rank"], cause["code"], cause["at_ns"], cause["text"]
            )
        elif room.state is RoomState.SUCCESS:
            if leg.acked:
                return False
            message = msg.RoomDone(room.room, room.nonce)
        else:
            if leg.accepted:
                return False
            message = msgspec.structs.replace(room.opening, to=leg.incarnation)
        if self.answers(leg):
            self.act(ev.Send(leg.peer, message))
            return True
        if room.failure is not None and (former := self._former(leg)) is not None:
            self.act(ev.Send(leg.peer, message, former.route))
        return False

    def _former(self, leg: WriterTransfer) -> FormerIncarnation | None:
        """The process that a room was opened at, where another one has taken its place since."""
        peer = self.peers.get(leg.peer)
        return peer.former.get(leg.incarnation) if peer is not None else None

    def _resend(self, room: RecvRoom) -> None:
        kind = "room-end" if room.state.finished else "room-open"
        reminded = sum(self._remind(room, leg) for leg in room.legs.values())
        if reminded:
            self.telemetry.metrics.add("kvctl_control_resends_total", reminded, kind)
        # A process that was replaced, or is lost, may never answer, and is asked seldom.
        room.resend_ns = self.now_ns + (self.timing.resend_ns if reminded else self.timing.lost_ns)

    # ---- bytes ------------------------------------------------------------------------------------------------

    def _arrived(self, tag: Tag, at_ns: int) -> None:
        reason = self._take(tag, at_ns)
        if reason:
            self.telemetry.metrics.add("kvctl_tags_dropped_total", 1, reason)

    def _take(self, tag: Tag, at_ns: int) -> str | None:
        """Believe a tag, or say why not."""
        if tag.incarnation != self.local.incarnation:
            return "incarnation"
        room = self.rooms.get(tag.room)
        if room is None or room.nonce != tag.nonce:
            return "unknown-room"
        key = tag.key
        if tag.kind is not PartKind.KV:
            return self._take_final(room, tag, at_ns)
        if not room.owes(key):
            return "unplanned"
        holding = self.book.of_part(_key(room, room.writers[key.writer]), key)
        if tag.serial:
            if holding is None or holding.region.serial != tag.serial:
                return "stale-grant"
            if holding.state is RegionState.LANDED:
                return "duplicate"
            if room.failure is not None:
                self._free([holding])  # the write is over and nobody wants it
                self._settle(room)
                return "late"
        elif not room.grantable(key) if holding is None else holding.state is RegionState.LANDED:
            return "duplicate"
        room.land(key)
        if tag.checksum is not None:
            room.checks[tag.kind, key] = PartChecksum(tag.checksum, {}, IN_PLACE)
        self._begun(room)
        if holding is not None and tag.serial:
            self.book.land(holding, at_ns)
            pages, share = room.pages_at(key), room.share_of(key)
            self.act(ev.Scatter(tag.serial, holding.region.offset, key, share, pages, room.room, room.nonce, at_ns))
            return None
        if holding is not None:
            self._free([holding])  # the writer took another path after it was granted, and says that it is done
        self._in_pages(room, key, {"arrive": at_ns}, IN_PLACE)
        return None

    def _take_final(self, room: RecvRoom, tag: Tag, at_ns: int) -> str | None:
        final = tag.kind, tag.key
        if not room.land_final(final):
            return "duplicate" if final in room.finals_landed else "unplanned"
        room.record.event("aux" if tag.kind is PartKind.AUX else "state", at_ns, writer=tag.key.writer)
        self._begun(room)
        if tag.checksum is not None and room.failure is None:
            room.checks[final] = PartChecksum(tag.checksum, {}, IN_PLACE)
            share, pages = room.final_parts[final]
            self.act(ev.Check(room.room, room.nonce, *final, share, pages))
        self._complete(room)
        return None

    def _begun(self, room: RecvRoom) -> None:
        """Something of the room has arrived."""
        room.since_ns = self.now_ns
        if room.state is RoomState.WAITING_FOR_INPUT:
            self._state(room, RoomState.TRANSFERRING)

    def _in_pages(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        """A part is in its pages; where its writer sent a checksum of it, that is compared first."""
        final = PartKind.KV, key
        check = room.checks.get(final)
        if check is None or room.failure is not None:
            room.checks.pop(final, None)
            self._settled(room, key, moments, path)
            return
        room.checks[final] = PartChecksum(check.checksum, moments, path)
        self.act(ev.Check(room.room, room.nonce, *final, room.share_of(key), room.pages_at(key)))

    def on_scatter_failed(self, event: ev.ScatterFailed) -> None:
        holding = self.book.find(event.serial)
        if holding is None or holding.state is not RegionState.LANDED:
            return
        self._free([holding])
        room = self.rooms[holding.room.room]  # a room outlives the regions it holds
        if room.failure is not None:
            self._settle(room)
            return
        text = f"{holding.key} from {holding.room.peer} landed, but could not be copied to its pages: {event.text}"
        self._fail(room, self.failure("KV_DEVICE", text))

    def on_checked(self, event: ev.Checked) -> None:
        room = self.rooms.get(event.room)
        if room is None or room.nonce != event.nonce or room.failure is not None:
            return
        check = room.checks.pop((event.kind, event.key), None)
        if check is None:
            return
        if event.found is not None and event.found != check.checksum:
            part = "the aux row" if event.kind is PartKind.AUX else str(event.key)
            text = f"{part} from {room.writers[event.key.writer]} ({check.path}) was sent with checksum "
            self._fail(
                room, self.failure(CHECKSUM, f"{text}{check.checksum:08x}, in the pages it is {event.found:08x}")
            )
        elif event.kind is PartKind.KV:
            self._settled(room, event.key, check.moments, check.path)
        else:
            room.since_ns = self.now_ns
            self._complete(room)

    def _settled(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        """A part is in its pages, as it was sent."""
        room.settle(key)
        room.since_ns = self.now_ns
        nbytes = room.share_of(key).payload_bytes(len(room.pages_at(key)), key.hi - key.lo)
        place = (key.writer, key.chunk, (key.lo, key.hi))
        self.telemetry.part(room.record, place, room.writers[key.writer], path, nbytes, moments)
        self._complete(room)

    # ---- the ring ---------------------------------------------------------------------------------------------

    def _free(self, holdings: list[GrantedRegion]) -> None:
        """Give regions back, then tell the writers whose grants that has opened."""
        moved = False
        for holding in holdings:
            room = self.rooms.get(holding.room.room)
            if room is not None and room.nonce == holding.room.nonce:
                room.ungrant(holding.key)
            moved |= self.book.free(holding.region.serial)
        if moved:
            self._tell_opened()

    def _tell_opened(self) -> None:
        opened = self.book.opened()
        if not opened:
            return
        round_, tail, sequence = self.watermark()
        for name in opened:
            if self.is_ready(name):  # heartbeats repair what is lost
                self.peers[name].watermark_sent = (round_, tail, sequence)
                self.act(ev.Send(name, msg.Watermark(round_, tail, sequence)))

    def _unpin(self) -> None:
        """No holding may pin the ring for ever while others wait behind it.

        One that its writer has not written for long is taken back; one that is being written for long, or whose writer
        is silent and may be writing, is set aside.
        """
        moved = False
        while self.book.gates_somebody and (oldest := self.book.oldest()) is not None:
            if oldest.state is RegionState.LANDED:
                break
            stuck = oldest.yields or (oldest.posted and self.now_ns - oldest.at_ns >= self.timing.revoke_ns)
            if not stuck and oldest.state is not RegionState.QUARANTINED and self._fresh(oldest.room.peer):
                if not oldest.posted:
                    self._revoke(oldest, self.timing.revoke_ns)
                break
            # The watermark must not let in who was given these bytes in a later round. (Two of lost writers may
            # overlap: neither is read.)
            heirs = [
                heir for heir in self.book.heirs(oldest) if not oldest.state is heir.state is RegionState.QUARANTINED
            ]
            self.book.ring.avoid(oldest.region.serial)
            if heirs:
                for heir in heirs:
                    self._revoke(heir, 0)
                break
            moved |= self.book.ring.set_aside(oldest.region.serial)
        if moved:
            self._tell_opened()

    def _fresh(self, name: str) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.state is PeerState.READY

    def _revoke(self, holding: GrantedRegion, patience_ns: int) -> None:
        """Ask for an unwritten grant back that is `patience_ns` old, or again where no answer came."""
        if holding.state is RegionState.REVOKING:
            patience_ns = self.timing.resend_ns  # the revoke or its answer was lost
        elif holding.state is not RegionState.GRANTED:
            return
        if self.now_ns - holding.at_ns < patience_ns or not self.is_ready(holding.room.peer):
            return
        holding.state = RegionState.REVOKING
        holding.at_ns = self.now_ns
        key, room = holding.key, holding.room
        revoke = msg.StagingRevoke(room.room, room.nonce, key.chunk, key.lo, key.hi, holding.region.serial)
        self.act(ev.Send(room.peer, revoke))

    # ---- time -------------------------------------------------------------------------------------------------

    def _check_deadline(self, room: RecvRoom) -> None:
        waited = self.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING:
            if not room.legs and waited > self.timing.suspect_ns and (gone := self._gone(room)):
                self._fail(room, self.failure("KV_PEER_LOST", f"{stuck}: {gone}"))
            elif waited > self.timing.bootstrap_ns:
                silent = [leg.peer for leg in room.legs.values() if not leg.accepted]
                silent = silent or [
                    self._absent(name) for name in self.roster(room.instance) if not self.is_ready(name)
                ]
                why = f"not accepted by {', '.join(silent)}"
                if not silent:
                    missing = self._absent_ranks.get(room.instance, "no answer from its registry")
                    why = f"the prefill instance at {room.instance}: {missing}"
                self._fail(room, self.failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {why}"))
        elif waited > self.timing.waiting_ns:
            landed = room.record.landed == room.record.planned
            code = "KV_ROOM_STUCK_SCATTER" if landed and room.missing else "KV_ROOM_STUCK_TRANSFER"
            if room.state is RoomState.WAITING_FOR_INPUT:
                code = "KV_ROOM_STUCK_WAITING"
            self._fail(room, self.failure(code, f"{stuck}: {room.gaps()}"))

    def _check_drained(self, room: RecvRoom) -> None:
        """A rank that is heard well and yet never drains keeps pages and ring from us: said once, counted from then."""
        waited = self.now_ns - room.since_ns
        if room.overdue or waited <= self.timing.waiting_ns:
            return
        room.overdue = True
        undrained = [name for name, leg in room.legs.items() if not leg.drained]
        for name in undrained:
            for holding in self.book.of_room(_key(room, name)):
                if holding.state is not RegionState.LANDED:
                    self.book.quarantine(holding)
        who = ", ".join(undrained) or f"a scatter here ({room.gaps()})"
        text = f"room {room.room} failed {waited / 1e9:.1f} s ago and its memory is still held: not drained by {who}"
        self.note("room-undrained", text, "warning", room=room.room)

    def _gone(self, room: RecvRoom) -> str:
        """A rank of the room's instance that was lost and has not come back soon; "" where there is none.

        Nobody waits for its next life: that will not have heard of the room, which its router sent to this one.
        """
        for name in self.roster(room.instance):
            peer = self.peers.get(name)
            if peer is None or peer.state is not PeerState.LOST:
                continue
            if self.now_ns - peer.heard_ns > self.timing.suspect_ns:
                return peer.last_error or f"{name} is lost"
        return ""

    def _absent(self, name: str) -> str:
        """A rank that is not ready, and why where that is known."""
        peer = self.peers.get(name)
        return f"{name} ({'; '.join(peer.differences)})" if peer is not None and peer.differences else name


def _key(room: RecvRoom, peer: str) -> RoomKey:
    return RoomKey(peer, room.room, room.nonce)
