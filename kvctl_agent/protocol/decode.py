"""The decode rank's machine: rooms, ring and peers composed; events in, actions out, no I/O.

Rules it keeps (design: one room, end to end):

- A room is opened at every rank of the prefill instance, once all of them are known and ready.
- A staging request is answered at once, for as long as the part could ever fit; the same request gets the same
  grant. No grants to a suspect peer, none for a part whose revoke is open.
- An arrival is believed only if it fits the plan, the nonce and, for a staged part, the very grant it names.
- A ring region is freed when its scatter is done, or when its writer has said that nothing is in flight.
- Success when all planned cells are in their pages and the aux row is there; never by counting.
"""

from __future__ import annotations

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, LocalProtocolError, RemoteProtocolError
from kvctl_agent.layout.chunks import grid
from kvctl_agent.layout.plan import PlanInputs, aux_writer, shares_to_reader
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.local import Local, Timing, pair
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.recv_room import RecvRoom, WriterLeg
from kvctl_agent.protocol.staging import RegionState, StagingBook
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.protocol.tombstones import RoomKey, Tombstones
from kvctl_agent.telemetry.hub import Telemetry


class DecodeMachine(Machine):
    """All rooms of one decode rank."""

    def __init__(self, local: Local, timing: Timing, telemetry: Telemetry) -> None:
        super().__init__(local, timing, telemetry)
        self.book = StagingBook(local.ring_bytes)
        self.rooms: dict[int, RecvRoom] = {}
        self.roster: tuple[str, ...] = ()
        self._graves: Tombstones[bool] = Tombstones(timing.bootstrap_ns)

    @property
    def idle(self) -> bool:
        return not self.rooms

    @property
    def expecting(self) -> bool:
        """Whether bytes may arrive now: the arrival loop looks often then, and rarely otherwise."""
        return any(room.state < RoomState.SUCCESS and room.failure is None for room in self.rooms.values())

    @property
    def missing_peers(self) -> list[str]:
        """Ranks of the instance that have not said hello."""
        return [name for name in self.roster if not self._ready(name)]

    def watermark(self) -> list[int]:
        position = self.book.ring.watermark
        return [position.round, position.tail, self.book.ring.sequence]

    # ---- the engine -------------------------------------------------------------------------------------------

    def on_open_room(self, event: ev.OpenRoom) -> None:
        if event.room in self.rooms:
            raise LocalProtocolError(f"room {event.room} is open already; a room number is used once at a time")
        record = self.telemetry.rooms.open(event.room, event.nonce)
        record.pages = event.total_pages - event.prefix_pages
        self.telemetry.metrics.add("kvctl_rooms_opened_total", 1)
        opening = msg.RoomOpen(
            event.room,
            event.nonce,
            event.pages.astype("<i4").tobytes(),
            event.prefix_pages,
            event.total_pages,
            {},
            event.aux_index,
        )
        room = self.rooms[event.room] = RecvRoom(opening, event.pages, record, self.now_ns)
        self._state(room, RoomState.BOOTSTRAPPING)
        self._open(room)

    def on_abort_room(self, event: ev.AbortRoom) -> None:
        if room := self.rooms.get(event.room):
            self._fail(room, self.failure("ABORTED", event.text))

    def _open(self, room: RecvRoom) -> None:
        """Make the plan and open the room everywhere, once the whole instance is there."""
        if room.legs or not self.roster or not all(map(self._ready, self.roster)):
            return
        inputs = self.peers[self.roster[0]].inputs
        assert inputs is not None
        reader = self.local.unique_rank
        try:
            shares = shares_to_reader(inputs, room.room, reader)
            cells = grid(room.opening.total_pages, room.prefix_pages, inputs.chunk_pages)
        except LayoutError as error:
            self._fail(room, self.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        room.plan(shares, cells, aux_writer(inputs, room.room, reader))
        room.opening = _with_inputs(room.opening, inputs)
        for name in self.roster:
            leg = room.legs[name] = WriterLeg(name)
            leg.opened = True
            self.act(ev.Send(name, room.opening))
        room.record.peers = [self.roster[share.writer] for share in shares]
        room.record.event("open", self.now_ns)
        room.resend_ns = self.now_ns + self.timing.resend_ns

    def _ready(self, name: str) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.usable

    # ---- peers ------------------------------------------------------------------------------------------------

    def on_roster_known(self, event: ev.RosterKnown) -> None:
        self.roster = event.names
        for name in event.names:
            if name not in self.peers:
                self.peers[name] = Peer(name, self.timing)
        self._say_hello()

    def _say_hello(self) -> None:
        for name in self.roster:
            peer = self.peers[name]
            if peer.state in (PeerState.CONNECTING, PeerState.LOST) and self.now_ns >= peer.hello_due_ns:
                peer.hello_due_ns = self.now_ns + self.timing.resend_ns
                self.act(ev.Send(name, msg.Hello(msg.PROTOCOL_VERSION, self.local.introduction())))

    def on_hello_ack(self, peer_name: str, incarnation: int, message: msg.HelloAck) -> None:
        peer = self.peers.get(peer_name)
        if peer is None:
            self.drop("incarnation")
            return
        if peer.incarnation == incarnation and peer.usable:
            return
        if peer.incarnation not in (0, incarnation) and peer.usable:
            self._lose(peer, proven=True, text=f"{peer_name} came back as incarnation {incarnation:016x}")
        inputs, differences = pair(self.local, message.who)
        if message.version != msg.PROTOCOL_VERSION:
            inputs, differences = None, (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",)
        if message.differences:
            inputs, differences = None, tuple(message.differences)
        peer.meet(incarnation, message.who, inputs, differences)
        peer.heard_ns = self.now_ns
        if inputs is None:
            text = f"{peer_name} refused: {'; '.join(differences)}"
            self.note("peer-refused", text, "error", peer=peer_name)
            for room in list(self.rooms.values()):
                if not room.legs:
                    self._fail(room, self.failure("KV_COMPAT_MISMATCH", text))
            return
        peer.state = PeerState.READY
        self.note("peer-ready", f"{peer_name} is ready (incarnation {incarnation:016x})", peer=peer_name)
        for room in list(self.rooms.values()):
            if room.failure is None:
                self._open(room)

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self.now_ns)

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        for room in list(self.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None:
                continue
            self._fail(room, self.failure("KV_PEER_LOST", text))
            leg.acked = True
            if peer.proven_dead:
                leg.drained = True
            else:
                for holding in self.book.of_room(_key(room, peer.name)):
                    if holding.state in (RegionState.GRANTED, RegionState.REVOKING):
                        self.book.quarantine(holding)
            self._settle(room)
        if peer.proven_dead:
            self._free_dead(peer)

    def _free_dead(self, peer: Peer) -> None:
        """Nothing of a dead process is in flight: what it held of the ring goes back."""
        moved = False
        for holding in self.book.holdings():
            if holding.room.peer == peer.name and holding.state is not RegionState.LANDED:
                moved |= self.book.free(holding.region.serial)
        if moved:
            self._tell_watermark()

    # ---- messages ---------------------------------------------------------------------------------------------

    def _find(self, peer: Peer, number: int, nonce: int) -> tuple[RecvRoom | None, WriterLeg | None]:
        room = self.rooms.get(number)
        if room is None or room.nonce != nonce:
            self.drop("tombstone" if self._graves.find(RoomKey("", number, nonce)) is not None else "unknown-room")
            return None, None
        return room, room.legs.get(peer.name)

    def on_room_accepted(self, peer: Peer, message: msg.RoomAccepted) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None or leg.accepted:
            return
        leg.accepted = True
        if room.state is RoomState.BOOTSTRAPPING and all(other.accepted for other in room.legs.values()):
            self._state(room, RoomState.WAITING_FOR_INPUT)
            self._complete(room)

    def on_room_refused(self, peer: Peer, message: msg.RoomRefused) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None:
            return
        leg.acked = leg.drained = True  # it has made nothing of the room
        self._fail(room, self.failure(message.code, f"{peer.name} refused room {room.room}: {message.text}"))
        self._settle(room)

    def on_staging_request(self, peer: Peer, message: msg.StagingRequest) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None:
            self._answer_stranger(peer, message.room, message.nonce)
            return
        if room.failure is not None or peer.state is not PeerState.READY:
            return  # the abort is on its way; or it is suspect and asks again when it is back
        assert peer.who is not None
        owner = _key(room, peer.name)
        grants: list[msg.Grant] = []
        for spec in message.parts:
            key = PartKey(peer.who.unique_rank, spec.chunk, spec.lo, spec.hi)
            if spec.lo >= spec.hi or not room.owes(key) or not self._size_fits(room, key, spec.nbytes):
                self.drop("unknown-part")
                continue
            if room.landed.get((key.writer, key.chunk), 0):
                self.drop("late")
                continue
            holding = self.book.of_part(owner, key)
            if holding is None:
                if not self.book.ring.fits(spec.nbytes):
                    self._refuse_staging(peer, message, spec)
                    continue
                holding = self.book.grant(owner, key, spec.nbytes, self.now_ns)
                self.telemetry.metrics.add("kvctl_ring_grants_total", 1)
            if holding.state is RegionState.GRANTED:
                grants.append(holding.grant())
        if grants:
            mark = self.watermark()
            peer.watermark_sent = (mark[0], mark[1], mark[2])
            room.record.event("grant", self.now_ns, writer=peer.who.unique_rank, peer=peer.name)
            self.act(ev.Send(peer.name, msg.StagingGrants(room.room, room.nonce, grants, mark)))

    def _size_fits(self, room: RecvRoom, key: PartKey, nbytes: int) -> bool:
        """The plan, not the writer, says how large a part is."""
        share, chunk = room.shares[key.writer], room.chunks[key.chunk]
        tokens = chunk.count * self.local.page_size
        return nbytes == share.part_bytes(self.local.shape, tokens, key.hi - key.lo)

    def _refuse_staging(self, peer: Peer, message: msg.StagingRequest, spec: msg.PartSpec) -> None:
        self.telemetry.metrics.add("kvctl_ring_refusals_total", 1)
        ring = self.book.ring.size_bytes
        self.note(
            "staging-refused",
            f"a part of {spec.nbytes} bytes can never fit the ring of {ring} bytes: raise staging_ring_mb",
            "warning",
            room=message.room,
            peer=peer.name,
        )
        refused = msg.StagingRefused(message.room, message.nonce, spec.chunk, spec.lo, spec.hi, spec.nbytes, ring)
        self.act(ev.Send(peer.name, refused))

    def _answer_stranger(self, peer: Peer, number: int, nonce: int) -> None:
        """A writer asks for a room that is over or was never here: it must not wait for ever."""
        failure = self.failure("KV_ROOM_UNKNOWN", f"{self.local.name} has no room {number} with this nonce")
        answer = msg.RoomFailed(number, nonce, failure["rank"], failure["code"], failure["at_ns"], failure["text"])
        self.act(ev.Send(peer.name, answer))

    def on_staging_revoked(self, peer: Peer, message: msg.StagingRevoked) -> None:
        holding = self.book.find(message.serial)
        if holding is None or holding.state is not RegionState.REVOKING or holding.room.peer != peer.name:
            self.drop("late")
            return
        self.telemetry.metrics.add("kvctl_ring_revokes_total", 1)
        self._free(message.serial)

    def on_too_late(self, peer: Peer, message: msg.TooLate) -> None:
        holding = self.book.find(message.serial)
        if holding is not None and holding.state is RegionState.REVOKING and holding.room.peer == peer.name:
            holding.state = RegionState.GRANTED
            holding.at_ns = self.now_ns

    def on_part_ready(self, peer: Peer, message: msg.PartReady) -> None:
        known: list[bytes] = []
        for data in message.tags:
            try:
                tag = Tag.unpack(data)
            except RemoteProtocolError:
                self.drop("bad-tag")
                continue
            known.append(data)
            room = self.rooms.get(tag.room)
            if room is not None and room.nonce == tag.nonce:
                self._arrived(tag, self.now_ns)
            elif self._graves.find(RoomKey("", tag.room, tag.nonce)):
                self.act(ev.Send(peer.name, msg.RoomDone(tag.room, tag.nonce)))
            else:
                self._answer_stranger(peer, tag.room, tag.nonce)
        self.act(ev.Send(peer.name, msg.PartAck(known)))

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.act(ev.Send(peer.name, msg.Ack(message.room, message.nonce, "room-failed")))
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None:
            return
        self._fail(room, {"rank": message.rank, "code": message.code, "at_ns": message.at_ns, "text": message.text})

    def on_room_drained(self, peer: Peer, message: msg.RoomDrained) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None or room.failure is None:
            return
        leg.drained = leg.acked = True
        for holding in self.book.of_room(_key(room, peer.name)):
            if holding.state is not RegionState.LANDED:
                self._free(holding.region.serial)
        self._settle(room)

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        if message.of != "room-done":
            return
        room, leg = self._find(peer, message.room, message.nonce)
        if room is not None and leg is not None and room.state is RoomState.SUCCESS:
            leg.acked = True
            self._settle(room)

    # ---- bytes ------------------------------------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived) -> None:
        self._arrived(event.tag, event.at_ns)

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
        if tag.kind is PartKind.AUX:
            if tag.key.writer != room.aux_writer or room.aux_landed:
                return "unplanned" if tag.key.writer != room.aux_writer else "duplicate"
            room.aux_landed = True
            room.record.event("aux", at_ns, writer=tag.key.writer)
            self._complete(room)
            return None
        if not room.owes(tag.key):
            return "unplanned"
        owner = _key(room, self.roster[tag.key.writer])
        holding = self.book.of_part(owner, tag.key)
        if tag.serial and (holding is None or holding.region.serial != tag.serial):
            return "stale-grant"
        if not room.land(tag.key):
            return "duplicate"
        if room.state < RoomState.TRANSFERRING and room.failure is None:
            self._state(room, RoomState.TRANSFERRING)
        share = room.shares[tag.key.writer]
        if tag.serial and holding is not None:
            holding.state = RegionState.LANDED
            holding.at_ns = at_ns
            pages = room.pages_at(tag.key.chunk)
            self.act(ev.Scatter(tag.serial, holding.region.offset, tag.key, share, pages, room.room, room.nonce, at_ns))
            return None
        if holding is not None:
            self._free(holding.region.serial)  # the writer fell back to another path after it was granted
        self._settled(room, tag.key, {"arrive": at_ns}, "direct")
        return None

    def on_scattered(self, event: ev.Scattered) -> None:
        holding = self.book.find(event.serial)
        if holding is None:
            return
        room = self.rooms.get(holding.room.room)
        if room is not None and room.nonce == holding.room.nonce:
            moments = {"arrive": holding.at_ns, "scatter": event.at_ns}
            self._settled(room, holding.key, moments, "staged")
        self._free(event.serial)
        if room is not None and room.failure is not None:
            self._settle(room)

    def _settled(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        room.settle(key)
        share, chunk = room.shares[key.writer], room.chunks[key.chunk]
        tokens = chunk.count * self.local.page_size
        nbytes = share.payload_bytes(self.local.shape, tokens, key.hi - key.lo)
        place = (key.writer, key.chunk, (key.lo, key.hi))
        self.telemetry.part(room.record, place, self.roster[key.writer], path, nbytes, moments)
        self._complete(room)

    def _free(self, serial: int) -> None:
        if self.book.free(serial):
            self._tell_watermark()

    def _tell_watermark(self) -> None:
        """Tell the writers that hold a grant which has opened; heartbeats repair what is lost."""
        opened = self.book.opened()
        if not opened:
            return
        round_, tail, sequence = self.watermark()
        for name in opened:
            if self._ready(name):
                self.peers[name].watermark_sent = (round_, tail, sequence)
                self.act(ev.Send(name, msg.Watermark(round_, tail, sequence)))

    # ---- ends -------------------------------------------------------------------------------------------------

    def _complete(self, room: RecvRoom) -> None:
        if room.failure is not None or room.state is RoomState.SUCCESS or not room.complete:
            return
        if room.state is RoomState.BOOTSTRAPPING:
            return  # a room whose every byte was cached still waits until all ranks have accepted it
        self._state(room, RoomState.SUCCESS)
        room.record.event("success", self.now_ns)
        room.released = True
        self.act(ev.Released(room.room))
        self._say_end(room)

    def _fail(self, room: RecvRoom, failure: Failure) -> None:
        if room.failure is not None or room.state is RoomState.SUCCESS:
            return
        room.failure = failure
        room.record.fail(failure)
        self.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        self.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        self._state(room, RoomState.FAILED)
        self._say_end(room)
        self._settle(room)

    def _say_end(self, room: RecvRoom) -> None:
        """Tell every prefill rank how the room ended, until each has answered."""
        room.resend_ns = self.now_ns + self.timing.resend_ns
        message: msg.Message
        if room.failure is None:
            message = msg.RoomDone(room.room, room.nonce)
        else:
            cause = room.failure
            message = msg.RoomAbort(room.room, room.nonce, cause["rank"], cause["code"], cause["at_ns"], cause["text"])
        for leg in room.legs.values():
            if not leg.acked and self._ready(leg.peer):
                self.act(ev.Send(leg.peer, message))

    def _settle(self, room: RecvRoom) -> None:
        """Release a failed room when all have drained; forget any room when all have answered."""
        if room.failure is not None and not room.released:
            scattering = any(self.book.of_room(_key(room, leg.peer)) for leg in room.legs.values())
            if scattering or not all(leg.drained for leg in room.legs.values()):
                return
            room.released = True
            self.act(ev.Released(room.room))
        if room.released and all(leg.acked for leg in room.legs.values()):
            del self.rooms[room.room]
            self._graves.bury(RoomKey("", room.room, room.nonce), room.failure is None, self.now_ns)
            self.telemetry.finish(room.record, self.now_ns)

    def _state(self, room: RecvRoom, state: RoomState) -> None:
        room.state = state
        room.state_ns = self.now_ns
        room.record.state(state, self.now_ns)
        if state in (RoomState.SUCCESS, RoomState.FAILED):
            room.record.finish(self.now_ns)
        self.act(ev.StateChanged(room.room, state, room.failure))

    # ---- time -------------------------------------------------------------------------------------------------

    def on_time(self) -> None:
        now = self.now_ns
        self._graves.expire(now)
        self._say_hello()
        for room in list(self.rooms.values()):
            if room.failure is None and room.state is not RoomState.SUCCESS:
                self._check_deadline(room)
            if now >= room.resend_ns > 0:
                self._resend(room)
        self._revoke_oldest()

    def _resend(self, room: RecvRoom) -> None:
        if room.state is RoomState.SUCCESS or room.failure is not None:
            self.telemetry.metrics.add("kvctl_control_resends_total", 1, "room-end")
            self._say_end(room)
            return
        room.resend_ns = self.now_ns + self.timing.resend_ns
        for leg in room.legs.values():
            if not leg.accepted and self._ready(leg.peer):
                self.telemetry.metrics.add("kvctl_control_resends_total", 1, "room-open")
                self.act(ev.Send(leg.peer, room.opening))

    def _check_deadline(self, room: RecvRoom) -> None:
        waited = self.now_ns - room.state_ns
        stuck = f"room {room.room} stayed in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING:
            if waited > self.timing.bootstrap_ns:
                silent = [leg.peer for leg in room.legs.values() if not leg.accepted] or self.missing_peers
                text = f"{stuck}: not accepted by {', '.join(silent) or 'an unknown prefill instance'}"
                self._fail(room, self.failure("KV_ROOM_STUCK_BOOTSTRAP", text))
        elif waited > self.timing.waiting_ns:
            landed = room.record.landed == room.record.planned
            code = "KV_ROOM_STUCK_SCATTER" if landed and room.missing else "KV_ROOM_STUCK_TRANSFER"
            if room.state is RoomState.WAITING_FOR_INPUT:
                code = "KV_ROOM_STUCK_WAITING"
            self._fail(room, self.failure(code, f"{stuck}: {room.gaps()}"))

    def _revoke_oldest(self) -> None:
        """An unwritten grant that pins the ring while others wait behind it is taken back."""
        oldest = self.book.oldest()
        if oldest is None or not self.book.gates_somebody:
            return
        if oldest.state not in (RegionState.GRANTED, RegionState.REVOKING):
            return
        if self.now_ns - oldest.at_ns < self.timing.revoke_ns or not self._ready(oldest.room.peer):
            return
        oldest.state = RegionState.REVOKING
        oldest.at_ns = self.now_ns
        key, room = oldest.key, oldest.room
        revoke = msg.StagingRevoke(room.room, room.nonce, key.chunk, key.lo, key.hi, oldest.region.serial)
        self.act(ev.Send(room.peer, revoke))


def _key(room: RecvRoom, peer: str) -> RoomKey:
    return RoomKey(peer, room.room, room.nonce)


def _with_inputs(opening: msg.RoomOpen, inputs: PlanInputs) -> msg.RoomOpen:
    return msg.RoomOpen(
        opening.room,
        opening.nonce,
        opening.pages,
        opening.prefix_pages,
        opening.total_pages,
        inputs.to_wire(),
        opening.aux_index,
    )
