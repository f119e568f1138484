"""The prefill rank's machine: what its engine, its workers, its peers and the clock say. Events in, actions out, no I/O.

A room waits for input once every decode rank that expects it has opened it; staging is asked for in one message per
decode rank, so that grants are there when data is. What then may happen to a room is in `prefill_rooms`.
"""

from __future__ import annotations

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout.chunks import ChunkCutter, grid
from kvctl_agent.layout.plan import PlanInputs, aux_writer, shares_of_writer
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.local import pair
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.prefill_rooms import STAGED, PrefillRooms, place
from kvctl_agent.protocol.send_room import Leg, Part, PartState, SendRoom
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.protocol.tombstones import RoomKey


class PrefillMachine(PrefillRooms):
    """All rooms of one prefill rank."""

    # ---- the engine -------------------------------------------------------------------------------------------

    def on_send_room(self, event: ev.SendRoom) -> None:
        if ended := self._ended.pop(event.room, None):
            _, state, failure = ended
            self.act(ev.StateChanged(event.room, state, failure))
            self.act(ev.Released(event.room))
            return
        room = self.rooms.get(event.room) or self._new_room(event.room)
        if room.claimed:
            raise LocalProtocolError(f"room {event.room} is being sent already; a room number is used once at a time")
        room.claimed = True
        self.act(ev.StateChanged(room.room, room.state, room.failure))
        if room.failure is not None:
            self._settle(room)

    def on_prefetch(self, event: ev.Prefetch) -> None:
        room = self.rooms.get(event.room)
        if room is not None and room.failure is None:
            room.prefetched = True
            self._request_all(room)

    def on_send_pages(self, event: ev.SendPages) -> None:
        room = self.rooms.get(event.room)
        if room is None or room.failure is not None:
            return  # failed meanwhile; the handle says why
        if room.last:
            raise LocalProtocolError(f"room {event.room}: pages after the last ones")
        room.pages.append(event.pages)
        room.fed += len(event.pages)
        room.last = event.last
        room.prefetched = True
        if event.last:
            room.forward_done_ns = event.at_ns
        self._request_all(room)
        for leg in list(room.legs.values()):
            self._feed(room, leg, len(event.pages), event.last, event.at_ns)

    def on_finish(self, event: ev.Finish) -> None:
        room = self.rooms.get(event.room)
        if room is None or room.failure is not None:
            return
        if not room.last:
            self.on_send_pages(ev.SendPages(event.room, np.empty(0, np.int32), True, event.at_ns))
        if room.failure is not None:
            return
        room.finished = True
        room.aux_src = event.aux_index
        room.forward_done_ns = event.at_ns
        room.record.event("finish", self.now_ns)
        for leg in room.legs.values():
            self._queue_aux(room, leg)
        self._progress(room)

    def on_abort_room(self, event: ev.AbortRoom) -> None:
        if room := self.rooms.get(event.room):
            self._fail(room, self.failure("ABORTED", event.text))

    # ---- the workers ------------------------------------------------------------------------------------------

    def on_part_sent(self, event: ev.PartSent) -> None:
        leg = self._legs.get(RoomKey(event.peer, event.room, event.nonce))
        room = self.rooms.get(event.room)
        if leg is None or room is None:
            return
        leg.in_flight -= 1
        if not event.dropped:
            leg.to_send -= 1
            if event.kind is PartKind.AUX:
                leg.aux_state = PartState.SENT
            else:
                part = leg.parts[event.key]
                part.state = PartState.SENT
                record = room.record
                record.sent = (record.sent or 0) + event.key.hi - event.key.lo
                done = room.forward_done_ns or None
                self.telemetry.part(record, place(event.key), leg.peer, part.path, part.nbytes, event.moments, done)
            if leg.sent:
                leg.resend_ns = self.now_ns + 2 * self.timing.resend_ns
        self._progress(room)

    def on_part_failed(self, event: ev.PartFailed) -> None:
        leg = self._legs.get(RoomKey(event.peer, event.room, event.nonce))
        room = self.rooms.get(event.room)
        if leg is None or room is None:
            return
        leg.in_flight -= 1
        leg.in_flight_for_ever |= event.in_flight
        self._fail(room, self.failure(event.code, event.text))
        self._progress(room)

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_hello(self, peer_name: str, incarnation: int, message: msg.Hello) -> None:
        peer = self.peers.get(peer_name)
        if peer is None:
            peer = self.peers[peer_name] = Peer(peer_name, self.timing)
        if peer.incarnation == incarnation and peer.usable:
            self._say_hello(peer)  # our answer was lost
            return
        if peer.incarnation not in (0, incarnation):
            self._lose(peer, proven=True, text=f"{peer_name} came back as incarnation {incarnation:016x}")
            self.act(ev.DropPeer(peer_name))
        inputs, differences = pair(self.local, message.who)
        if message.version != msg.PROTOCOL_VERSION:
            differences = (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",)
            inputs = None
        peer.meet(incarnation, message.who, inputs, differences)
        peer.heard_ns = self.now_ns
        self._parked.setdefault(peer_name, {})
        if inputs is None:
            self.note("peer-refused", f"{peer_name} refused: {'; '.join(differences)}", "error", peer=peer_name)
            self._say_hello(peer)
        else:
            self.act(ev.ConnectPeer(peer_name, incarnation, message.who))

    def on_peer_connected(self, event: ev.PeerConnected) -> None:
        peer = self.peers[event.peer]
        peer.state = PeerState.READY
        self.note("peer-ready", f"{peer.name} is ready (incarnation {peer.incarnation:016x})", peer=peer.name)
        self._say_hello(peer)

    def on_peer_unusable(self, event: ev.PeerUnusable) -> None:
        peer = self.peers[event.peer]
        peer.differences = (event.text,)
        peer.state = PeerState.REFUSED
        peer.fail(event.text)
        self.note("peer-refused", f"{peer.name} cannot be written to: {event.text}", "error", peer=peer.name)
        self._say_hello(peer)

    def _say_hello(self, peer: Peer) -> None:
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.local.introduction(), list(peer.differences))
        self.act(ev.Send(peer.name, ack))

    def on_room_open(self, peer: Peer, message: msg.RoomOpen) -> None:
        key = RoomKey(peer.name, message.room, message.nonce)
        if key in self._legs:
            self.act(ev.Send(peer.name, msg.RoomAccepted(message.room, message.nonce)))
            return
        if self._graves.find(key) is not None:
            self.drop("tombstone")
            return
        assert peer.inputs is not None
        room = self.rooms.get(message.room)
        if room is not None and peer.name in room.legs:
            other = room.legs[peer.name].nonce
            self._refuse(peer, message, "KV_ROOM_DUPLICATE", f"room {message.room} is active with nonce {other:016x}")
            return
        if room is not None and room.failure is not None:
            self._refuse(peer, message, room.failure["code"], room.failure["text"])
            return
        try:
            leg = self._leg_of(peer, peer.inputs, message)
        except LayoutError as error:
            self._refuse(peer, message, "KV_PLAN_MISMATCH", str(error))
            return
        if room is None:
            room = self._new_room(message.room)
        room.expected = peer.inputs.decode.tp * peer.inputs.decode.pp
        room.legs[peer.name] = leg
        self._legs[key] = leg
        record = room.record
        record.nonce = record.nonce or message.nonce  # of several decode ranks, the first one's stands for all
        record.pages = message.total_pages - message.prefix_pages
        record.planned += sum(part.key.hi - part.key.lo for part in leg.parts.values())
        record.peers.append(peer.name)
        record.event("accept", self.now_ns, peer=peer.name)
        leg.accepted = True
        self.act(ev.Send(peer.name, msg.RoomAccepted(message.room, message.nonce)))
        if room.opened and room.state is RoomState.BOOTSTRAPPING:
            self._state(room, RoomState.WAITING_FOR_INPUT)
        if room.prefetched:
            self._request(room, leg)
        if room.pages:
            self._feed(room, leg, room.fed, room.last, self.now_ns)
            self._queue_aux(room, leg)
            self._progress(room)

    def _leg_of(self, peer: Peer, inputs: PlanInputs, message: msg.RoomOpen) -> Leg:
        """What we owe for this opening; raises LayoutError where the two sides do not agree on it."""
        if message.inputs != inputs.to_wire():
            factors = inputs.diff(PlanInputs.from_wire(message.inputs))
            raise LayoutError("; ".join(map(str, factors)))
        pages = np.frombuffer(message.pages, dtype="<i4")
        if len(pages) != message.total_pages - message.prefix_pages:
            raise LayoutError(f"{len(pages)} pages given for {message.prefix_pages}..{message.total_pages}")
        assert peer.who is not None
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < int(peer.who.pool["num_pages"]):  # type: ignore[arg-type]
            raise LayoutError(f"page {int(pages.max())} is outside {peer.name}'s pool")
        if message.aux_index >= int(peer.who.pool["aux_slots"]):  # type: ignore[arg-type]
            raise LayoutError(f"aux row {message.aux_index} is outside {peer.name}'s pool")
        reader = peer.who.unique_rank
        decode_dp = inputs.decode.coord(reader).dp
        me = self.local.unique_rank
        owed = [share for share in shares_of_writer(inputs, message.room, decode_dp, me) if share.reader == reader]
        share = owed[0] if owed else None
        parts: dict[PartKey, Part] = {}
        if share is not None:
            for chunk in grid(message.total_pages, message.prefix_pages, inputs.chunk_pages):
                key = PartKey(me, chunk.index, share.layer_lo, share.layer_hi)
                parts[key] = Part(key, chunk, share.part_bytes(inputs.shape, chunk.count * inputs.page_size))
        aux_mine = message.aux_index >= 0 and aux_writer(inputs, message.room, reader) == me
        cutter = ChunkCutter(message.prefix_pages, inputs.chunk_pages)
        return Leg(
            message.room,
            peer.name,
            message.nonce,
            share,
            pages,
            message.prefix_pages,
            message.total_pages,
            cutter,
            parts,
            message.aux_index,
            aux_mine,
        )

    def _refuse(self, peer: Peer, message: msg.RoomOpen, code: str, text: str) -> None:
        self.note("room-refused", text, "warning", room=message.room, peer=peer.name)
        self.act(ev.Send(peer.name, msg.RoomRefused(message.room, message.nonce, code, text)))

    def on_staging_grants(self, peer: Peer, message: msg.StagingGrants) -> None:
        self._hear_watermark(peer, message.watermark)
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None:
            self.drop("tombstone")
            return
        for grant in message.grants:
            part = leg.parts.get(PartKey(self.local.unique_rank, grant.chunk, grant.lo, grant.hi))
            if part is None:
                self.drop("unknown-part")
            elif part.grant is None and grant.serial > part.revoked and part.state < PartState.QUEUED:
                part.grant = grant
                room.record.event("grant", self.now_ns, *place(part.key), peer=peer.name)
                if part.state is PartState.READY:
                    self._try(room, leg, part)
        self._progress(room)

    def on_staging_refused(self, peer: Peer, message: msg.StagingRefused) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None:
            self.drop("tombstone")
            return
        part = leg.parts.get(PartKey(self.local.unique_rank, message.chunk, message.lo, message.hi))
        if part is None or part.path != STAGED or part.state >= PartState.QUEUED:
            return
        text = f"{part.key} needs {message.needs} bytes, the ring of {peer.name} has {message.ring}"
        self._fall_back(room, leg, part, "ring-too-small", text)
        self._progress(room)

    def _fall_back(self, room: SendRoom, leg: Leg, part: Part, reason: str, text: str) -> None:
        who = self.peers[leg.peer].who
        assert who is not None
        assert leg.share is not None
        self._unpark(leg, part)
        part.path = self._fallback(who, leg.share, part.key.hi - part.key.lo, leg.pages_at(part.chunk))
        self.telemetry.metrics.add("kvctl_fallbacks_total", 1, reason)
        self.note("fallback", f"{text}: sent by {part.path}", "warning", room=room.room, peer=leg.peer)
        if part.state is PartState.READY:
            self._try(room, leg, part)

    def on_staging_revoke(self, peer: Peer, message: msg.StagingRevoke) -> None:
        answer: msg.Message = msg.StagingRevoked(message.room, message.nonce, message.serial)
        room, leg = self._find(peer, message.room, message.nonce)
        key = PartKey(self.local.unique_rank, message.chunk, message.lo, message.hi)
        part = leg.parts.get(key) if leg is not None else None
        if room is not None and leg is not None and part is not None:
            held = part.grant.serial if part.grant else 0
            if held == message.serial and part.state >= PartState.QUEUED:
                answer = msg.TooLate(message.room, message.nonce, message.serial)
            else:
                part.revoked = max(part.revoked, message.serial)
                if held == message.serial:
                    part.grant = None
                    part.requested = False
        self.act(ev.Send(peer.name, answer))
        if room is not None and leg is not None and part is not None and not part.requested:
            self._request(room, leg)

    def on_watermark(self, peer: Peer, message: msg.Watermark) -> None:
        self._hear_watermark(peer, [message.round, message.tail, message.sequence])

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self.now_ns)
        if message.watermark:
            self._hear_watermark(peer, message.watermark)

    def _hear_watermark(self, peer: Peer, watermark: list[int]) -> None:
        if peer.gate.hear(watermark, self.now_ns):
            self._retry_parked(peer)

    def on_heard(self, peer: Peer) -> None:
        if self._parked.get(peer.name):
            self._retry_parked(peer)

    def on_part_ack(self, peer: Peer, message: msg.PartAck) -> None:
        pass  # the receipt that matters is RoomDone; PartAck only says that the reader lives and knows the tags

    def on_room_done(self, peer: Peer, message: msg.RoomDone) -> None:
        self.act(ev.Send(peer.name, msg.Ack(message.room, message.nonce, "room-done")))
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None or leg.done:
            return
        leg.done = True
        room.record.event("done", self.now_ns, peer=peer.name)
        self._progress(room)

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.act(ev.Send(peer.name, msg.Ack(message.room, message.nonce, "room-failed")))
        room, leg = self._find(peer, message.room, message.nonce)
        if room is not None and leg is not None:
            self._fail(room, _failure_of(message))

    def on_room_abort(self, peer: Peer, message: msg.RoomAbort) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is None or leg is None:
            # Unknown or gone: nothing of it is in flight, and the grave keeps a late RoomOpen from raising it.
            self._graves.bury(RoomKey(peer.name, message.room, message.nonce), False, self.now_ns)
            self.act(ev.Send(peer.name, msg.RoomDrained(message.room, message.nonce)))
            return
        leg.abort_asked = True
        leg.failed_acked = True
        self._fail(room, _failure_of(message))
        self._progress(room)
        if leg.drained and leg.drained_said:
            self.act(ev.Send(peer.name, msg.RoomDrained(message.room, message.nonce)))

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        room, leg = self._find(peer, message.room, message.nonce)
        if room is not None and leg is not None and message.of == "room-failed":
            leg.failed_acked = True
            self._progress(room)

    # ---- time and peers ---------------------------------------------------------------------------------------

    def on_time(self) -> None:
        now = self.now_ns
        self._graves.expire(now)
        for number, (at, _, _) in list(self._ended.items()):
            if now - at > self.timing.bootstrap_ns:
                del self._ended[number]
        for room in list(self.rooms.values()):
            if room.failure is None:
                self._check_deadline(room)
            for leg in list(room.legs.values()):
                if now >= leg.resend_ns > 0:
                    self._resend(room, leg)
        for peer in self.peers.values():
            if peer.usable and self._parked.get(peer.name):
                self._retry_parked(peer)

    def _check_deadline(self, room: SendRoom) -> None:
        waited = self.now_ns - room.state_ns
        if room.state is RoomState.BOOTSTRAPPING and waited > self.timing.bootstrap_ns:
            opened = f"{len(room.legs)} of {room.expected or '?'} decode ranks opened it"
            text = f"room {room.room} stayed in Bootstrapping for {waited / 1e9:.1f} s: {opened}"
            self._fail(room, self.failure("KV_ROOM_STUCK_BOOTSTRAP", text))
        elif room.state is not RoomState.BOOTSTRAPPING and waited > self.timing.waiting_ns:
            text = f"room {room.room} stayed in {room.state.label} for {waited / 1e9:.1f} s: {self._missing(room)}"
            self._fail(room, self.failure("KV_ROOM_STUCK_TRANSFER", text))

    def _missing(self, room: SendRoom) -> str:
        if not room.last:
            return f"the engine gave {room.fed} pages and no last one"
        for leg in room.legs.values():
            for part in leg.parts.values():
                if part.state is not PartState.SENT:
                    waits = "a grant" if part.path == STAGED and part.grant is None else "the watermark or a worker"
                    return f"{part.key} to {leg.peer} waits for {waits}"
            if not leg.done:
                return f"no RoomDone from {leg.peer}"
        return "the engine did not finish it"

    def _resend(self, room: SendRoom, leg: Leg) -> None:
        """Say again what was not answered: requests without grants, tags without RoomDone, failures without Ack."""
        leg.resend_ns = self.now_ns + self.timing.resend_ns
        if not self.peers[leg.peer].usable:
            return
        if room.failure is not None:
            if not leg.failed_acked:
                self._say_failed(room, leg)
            return
        unanswered = [part for part in leg.parts.values() if part.requested and part.grant is None]
        if unanswered:
            self.telemetry.metrics.add("kvctl_control_resends_total", 1, "staging-request")
            self._send_request(leg, unanswered)
        elif leg.sent and not leg.done:
            self.telemetry.metrics.add("kvctl_control_resends_total", 1, "part-ready")
            self.act(ev.Send(leg.peer, msg.PartReady([self._tag(leg, part) for part in leg.parts.values()])))
            if leg.aux_mine:
                self.act(ev.Send(leg.peer, msg.PartReady([self._aux_tag(leg)])))

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        for room in list(self.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None:
                continue
            leg.failed_acked = True
            self._fail(room, self.failure("KV_PEER_LOST", text))
            self._progress(room)


def _failure_of(message: msg.RoomFailed | msg.RoomAbort) -> Failure:
    return {"rank": message.rank, "code": message.code, "at_ns": message.at_ns, "text": message.text}
