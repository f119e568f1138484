"""The prefill rank's machine: what its engine, workers, peers and the clock say. Events in, actions out, no I/O.

A room waits for input once every decode rank that expects it has opened it; staging is asked for in one message per
decode rank, so that grants are there when data is. What then may happen to a room is in `prefill_rooms`.
"""

from __future__ import annotations

import numpy as np

from kvctl_agent.contract.layer_range import layer_range
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import LayoutError, LocalProtocolError, RemoteProtocolError
from kvctl_agent.layout.local_shard import local_shards
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.local_info import plan_with_peer
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.prefill_openings import MAX_LEGS, PrefillOpenings
from kvctl_agent.protocol.prefill_rooms import STAGED, place
from kvctl_agent.protocol.send_room import Part, PartState, PeerTransfer, SendRoom
from kvctl_agent.protocol.staging_credits import StagingCredits, writer_quota
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.protocol.tombstones import RoomKey

MAX_PEERS = 4096
_DEADLINES_EVERY_NS = 1_000_000_000


class PrefillMachine(PrefillOpenings):
    """All rooms of one prefill rank."""

    # ---- the engine -------------------------------------------------------------------------------------------

    def on_send_room(self, event: ev.SendRoom) -> None:
        ev.check_room(event.room)
        ended = self._ended.get(event.room)
        if ended is not None and not ended.claimed:
            self._ended[event.room] = ended._replace(claimed=True)
            self.act(ev.StateChanged(event.room, ended.state, ended.failure))
            self.act(ev.Released(event.room))
            return
        room = self.rooms.get(event.room) or self._new_room(event.room)
        if room.claimed:
            raise LocalProtocolError(f"room {event.room} is being sent already; a room number is used once at a time")
        room.claimed = True
        self.act(ev.StateChanged(room.room, room.state, room.failure))
        if room.released:  # it failed before our engine came
            self.act(ev.Released(room.room))

    def on_prefetch(self, event: ev.Prefetch) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return
        layers = self._layers
        if event.groups and not _tiles(event.groups, layers.start, layers.stop):
            groups = ", ".join(layer_range(lo, hi) for lo, hi in event.groups)
            own = layer_range(layers.start, layers.stop)
            text = f"room {room.room}: layer groups {groups} do not tile layers {own}"
            self._fail(room, self.failure("KV_PLAN_MISMATCH", text))
            return
        room.groups = event.groups
        room.prefetched = True
        if not room.ledger.given and not room.launched:  # else it is the next chunk's forward that begins
            room.record.forward_begun_at = event.at_ns or self.now_ns
        self._request_all(room)

    def on_launched(self, event: ev.Launched) -> None:
        room = self._claimed(event.room)
        if room is not None and room.failure is None:
            room.launched += 1

    def on_forward_failed(self, event: ev.ForwardFailed) -> None:
        room = self._claimed(event.room)
        if room is not None and not room.state.finished:
            self._fail(room, self.failure("KV_DEVICE", f"room {room.room}: {event.text}"))

    def on_send_pages(self, event: ev.SendPages) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return  # failed meanwhile; the handle says why
        if event.launched:
            room.launched -= 1
        if self._holds_back and not room.finished:
            room.held.append(event)
            room.since_ns = self.now_ns
        else:
            self._take_pages(room, event)
            if room.failure is None:
                self._progress(room)

    def _take_pages(self, room: SendRoom, event: ev.SendPages) -> None:
        if room.failure is not None:
            return
        try:
            steps = room.ledger.take(event.layers, event.pages, event.last)
        except LayoutError as error:
            self._fail(room, self.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        if room.ledger.complete:
            room.forward_done_ns = room.record.forward_done_at = event.at_ns
        if event.layers is None and not room.prefetched:
            room.prefetched = True  # cells go whole from here on
            self._request_all(room)
        for leg in room.legs.values():
            self._advance(room, leg, steps, event.at_ns)
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
        room.record.event("finish", self.now_ns)
        for leg in room.legs.values():
            self._queue_finals(room, leg)
        self._progress(room)

    def on_abort_room(self, event: ev.AbortRoom) -> None:
        room = self.rooms.get(event.room)
        if room is not None and not room.state.finished:
            self._fail(room, self.failure("ABORTED", event.text))
            self.answer(event.ticket, "aborted", f"room {event.room} has failed here, and its other ranks are told")
        elif room is not None:
            self.answer(event.ticket, "unchanged", f"room {event.room} is {room.state.label} already")
        else:
            self.answer(event.ticket, "unknown", "")

    def _claimed(self, number: int) -> SendRoom | None:
        """The room that our engine computes; one that it has not come for is a later life of the number."""
        room = self.rooms.get(number)
        return room if room is not None and room.claimed else None

    # ---- the workers ------------------------------------------------------------------------------------------

    def on_part_sent(self, event: ev.PartSent) -> None:
        leg = self._legs.get(RoomKey(event.peer, event.room, event.nonce))
        if leg is None:
            return
        room = self.rooms[event.room]
        leg.in_flight -= 1
        room.since_ns = self.now_ns
        if not event.dropped:
            if event.kind is PartKind.KV:
                part = leg.parts[event.key]
                part.checksum = event.checksum
                self._part_sent(room, leg, part, event.moments)
            else:
                leg.to_send -= 1
                final = leg.finals[event.kind, event.key]
                final.checksum = event.checksum
                final.state = PartState.SENT
            if not leg.resend_ns:
                leg.resend_ns = self.now_ns + 2 * self.timing.resend_ns
        self._progress(room)

    def _part_sent(self, room: SendRoom, leg: PeerTransfer, part: Part, moments: dict[str, int]) -> None:
        leg.to_send -= part.layers
        part.state = PartState.SENT
        if part.path == STAGED:
            self._allowances[leg.peer].end(part)
            self._request_next(leg.peer)
        record = room.record
        record.sent = (record.sent or 0) + part.layers
        if room.groups and moments:
            room.spans.add(moments["queue"], moments["wire"])
        # What was sent while the forward still ran is hidden behind it, wherever it will end.
        done_ns = record.forward_done_at or self.now_ns
        nbytes = part.share.payload_bytes(part.chunk.count, part.layers)  # without the region's alignment
        self.telemetry.part(record, place(part.key), leg.peer, part.path, nbytes, moments, done_ns)

    def on_part_failed(self, event: ev.PartFailed) -> None:
        leg = self._legs.get(RoomKey(event.peer, event.room, event.nonce))
        if leg is None:
            return
        room = self.rooms[event.room]
        if not event.in_flight:
            leg.in_flight -= 1  # else the worker says PartSent(dropped) once the engine lets go
        self._fail(room, self.failure(event.code, event.text))
        self._progress(room)

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_hello(self, event: ev.Received, message: msg.Hello) -> None:
        peer_name, incarnation = event.peer, event.incarnation
        peer = self.peers.get(peer_name)
        if message.who.name != peer_name or (
            peer is not None and peer.incarnation == incarnation and peer.route != event.route
        ):
            self.drop("stranger")
            return
        peer = peer or self._new_peer(peer_name)
        if peer is None:
            self.drop("too-many-peers")
            return
        if peer.incarnation != incarnation and peer.state is PeerState.READY:
            self._refuse_name(peer, event)
            return
        if self._late(peer, incarnation):
            return
        if peer.incarnation == incarnation and peer.state is not PeerState.LOST:
            if peer.usable:
                lapsed = not peer.may_post(self.now_ns)
                self._hear(peer)
                if lapsed:
                    self.on_lease_renewed(peer)
            if peer.state is not PeerState.CONNECTING:  # else the answer follows when the transport has connected
                self._say_hello(peer)  # our answer was lost
            return
        self._replace(peer, incarnation)
        inputs, differences = plan_with_peer(self.local, message.who)
        if message.version != msg.PROTOCOL_VERSION:
            differences = (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",)
            inputs = None
        peer.meet(incarnation, message.who, inputs, differences, event.route)
        peer.former.clear()  # what an earlier one wrote is its own affair: here it can only have read
        peer.heard_ns = self.now_ns
        self._parked.setdefault(peer_name, {})
        if inputs is None:
            self.note("peer-refused", f"{peer_name} refused: {'; '.join(differences)}", "error", peer=peer_name)
            self._say_hello(peer)
        else:
            share = writer_quota(inputs, message.who.ring_bytes)
            self._allowances[peer_name] = StagingCredits(share)
            theirs = local_shards(inputs.shape, inputs.page_size, inputs.decode, peer.at)
            self.act(ev.ConnectPeer(peer_name, incarnation, message.who, theirs))

    def _refuse_name(self, peer: Peer, event: ev.Received) -> None:
        """Another process says Hello under the name of a peer that is well.

        Either two agents were given one name, and the first keeps it; or it is the next life of a process that ended
        just now, which is let in as soon as the end is proven or the silence has grown.
        """
        self.drop("name-taken")
        if event.incarnation in peer.past:
            return
        assert peer.who is not None
        heard_s = (self.now_ns - peer.heard_ns) / 1e9
        text = (
            f"the name {peer.name} is in use at {self.local.name} by {peer.who.process} (incarnation "
            f"{peer.incarnation:016x}, heard {heard_s:.1f} s ago): give every agent its own name"
        )
        if peer.name_asked_by != event.incarnation:
            peer.name_asked_by = event.incarnation
            self.note("name-taken", f"incarnation {event.incarnation:016x} is refused: {text}", "error", peer=peer.name)
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.local.introduction(), event.incarnation, taken=text)
        self.act(ev.Send(peer.name, ack, event.route))

    def on_peer_connected(self, event: ev.PeerConnected) -> None:
        peer = self.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.state = PeerState.READY
        self.note("peer-ready", f"{peer.name} is ready (incarnation {peer.incarnation:016x})", peer=peer.name)
        self._say_hello(peer)

    def on_peer_unusable(self, event: ev.PeerUnusable) -> None:
        peer = self.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.differences = (event.text,)
        peer.state = PeerState.REFUSED
        peer.fail(event.text)
        self.note("peer-refused", f"{peer.name} cannot be written to: {event.text}", "error", peer=peer.name)
        self._say_hello(peer)

    def _say_hello(self, peer: Peer) -> None:
        differences = [encodable(text)[: msg.MAX_TEXT] for text in peer.differences]
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.local.introduction(), peer.incarnation, differences)
        self.act(ev.Send(peer.name, ack))

    def _new_peer(self, name: str) -> Peer | None:
        """A peer we have not met; when there are very many, in the place of one that is gone and has nothing here."""
        if len(self.peers) >= MAX_PEERS:
            busy = {leg.peer for leg in self._legs.values()}
            gone = (peer for peer in self.peers.values() if not peer.usable and peer.name not in busy)
            oldest = min(gone, key=lambda peer: peer.heard_ns, default=None)
            if oldest is None:
                return None
            del self.peers[oldest.name]
            self._parked.pop(oldest.name, None)
            self._allowances.pop(oldest.name, None)
        peer = self.peers[name] = Peer(name, self.timing)
        return peer

    def on_staging_grants(self, peer: Peer, message: msg.StagingGrants) -> None:
        self._hear_watermark(peer, message.watermark)
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            return
        room, leg = found
        assert peer.who is not None
        for grant in message.grants:
            part = leg.parts.get(PartKey(self.rank, grant.chunk, grant.lo, grant.hi))
            if part is None or grant.offset + part.nbytes > grant.end or grant.end > peer.who.ring_bytes:
                self.drop("unknown-part")
            elif part.path != STAGED or part.grant is not None or grant.serial <= part.revoked:
                self.drop("late")
            else:
                part.grant = grant
                room.record.event("grant", self.now_ns, *place(part.key), peer=peer.name)
                if part.state is PartState.READY:
                    self._try(room, leg, part)
        self._progress(room)

    def on_staging_refused(self, peer: Peer, message: msg.StagingRefused) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            return
        room, leg = found
        part = leg.parts.get(PartKey(self.rank, message.chunk, message.lo, message.hi))
        if part is None or part.path != STAGED or part.grant is not None or room.failure is not None:
            self.drop("late")
            return
        text = f"{part.key} needs {message.needs} bytes, the ring of {peer.name} has {message.ring}"
        self._fall_back(room, leg, part, "ring-too-small", text)
        self._progress(room)

    def on_staging_revoke(self, peer: Peer, message: msg.StagingRevoke) -> None:
        revoked = msg.StagingRevoked(message.room, message.nonce, message.serial)
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            self.act(ev.Send(peer.name, revoked))  # of a room that is over nothing is in flight, nor will be
            return
        room, leg = found
        part = leg.parts.get(PartKey(self.rank, message.chunk, message.lo, message.hi))
        if part is None:
            self.drop("unknown-part")
            return
        held = part.grant.serial if part.grant else 0
        if held == message.serial and part.state >= PartState.QUEUED:
            self.act(ev.Send(peer.name, msg.TooLate(message.room, message.nonce, message.serial)))
            if part.state is PartState.SENT:  # its tag was lost, or is about to arrive
                self.act(ev.Send(peer.name, msg.PartReady(leg.room, leg.nonce, [self._tag(leg, part)])))
            return
        part.revoked = max(part.revoked, message.serial)
        self.act(ev.Send(peer.name, revoked))
        if held == message.serial:
            part.grant = None
            part.requested = False
            part.asks = part.asked_ns = 0
            self._allowances[leg.peer].end(part)
            if room.failure is None:
                self._request(room, leg)
            self._request_next(leg.peer)

    def on_watermark(self, peer: Peer, message: msg.Watermark) -> None:
        self._hear_watermark(peer, [message.round, message.tail, message.sequence])

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self.now_ns)
        if message.watermark:
            self._hear_watermark(peer, message.watermark)

    def _hear_watermark(self, peer: Peer, watermark: list[int]) -> None:
        if peer.gate.hear(watermark, self.now_ns):
            self._retry_parked(peer)

    def on_lease_renewed(self, peer: Peer) -> None:
        self._retry_parked(peer)
        for leg in list(self._legs.values()):
            if leg.peer == peer.name and (room := self.rooms.get(leg.room)) is not None:
                self._queue_finals(room, leg)

    def on_part_ack(self, peer: Peer, message: msg.PartAck) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            return
        _, leg = found
        for data in message.tags:
            try:
                tag = Tag.unpack(data)
            except RemoteProtocolError:
                self.drop("bad-tag")
                continue
            part = leg.parts.get(tag.key) if tag.kind is PartKind.KV else None
            if part is not None and part.state is PartState.SENT:
                part.confirmed = True

    def on_room_done(self, peer: Peer, message: msg.RoomDone) -> None:
        self.act(ev.Send(peer.name, msg.Ack(message.room, message.nonce, "room-done")))
        found = self._find(peer, message.room, message.nonce)
        if found is None or found[1].done:
            return
        room, leg = found
        leg.done = True
        room.record.event("done", self.now_ns, peer=peer.name)
        self._progress(room)

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.act(ev.Send(peer.name, msg.Ack(message.room, message.nonce, "room-failed")))
        if found := self._find(peer, message.room, message.nonce):
            room, leg = found
            leg.failed_acked = True  # it is he who says so
            self._fail(room, _failure_of(message))
            self._progress(room)

    def on_unusable_said(self, peer: Peer, message: msg.Message) -> None:
        if peer.state is PeerState.LOST and isinstance(message, msg.RoomAbort):
            # It has replaced us, say, and asks whether anything of ours is in flight: that can be said at once.
            self.on_room_abort(peer, message)
        else:
            super().on_unusable_said(peer, message)

    def on_room_abort(self, peer: Peer, message: msg.RoomAbort) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            # Unknown or gone: nothing of it is in flight, and the grave keeps a late RoomOpen from raising it.
            key = RoomKey(peer.name, message.room, message.nonce)
            if not self._graves.holds(key):
                self._graves.bury(key, _failure_of(message), self.now_ns)
                self._never_opened(message.room, _failure_of(message))
            self.act(ev.Send(peer.name, msg.RoomDrained(message.room, message.nonce)))
            return
        room, leg = found
        leg.abort_asked = leg.failed_acked = True
        leg.drained_said = False  # it asks again, so our answer was lost
        self._fail(room, _failure_of(message))
        self._progress(room)

    def _end_aborted(self) -> None:
        for number, (due_ns, failure) in list(self._aborted.items()):
            if self.now_ns < due_ns:
                return  # in the order of their coming
            del self._aborted[number]
            room = self.rooms.get(number)
            if room is None and number not in self._ended:
                room = self._new_room(number)
            if room is not None and not room.opened:
                self._fail(room, failure)

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is not None and message.of == "room-failed":
            found[1].failed_acked = True
            self._progress(found[0])

    # ---- time and peers ---------------------------------------------------------------------------------------

    def on_time(self) -> None:
        now = self.now_ns
        self._graves.expire(now)
        while self._ended:
            number, ended = next(iter(self._ended.items()))
            if now - ended.at_ns < self.timing.bootstrap_ns and len(self._ended) < MAX_LEGS:
                break
            del self._ended[number]
        self._end_aborted()
        for leg in list(self._legs.values()):
            if now >= leg.resend_ns > 0 and (room := self.rooms.get(leg.room)) is not None:
                self._resend(room, leg)
        if now >= self._deadlines_due_ns:
            # Engines may announce thousands of rooms long before they are opened: look at those seldom.
            shortest = min(self.timing.bootstrap_ns, self.timing.waiting_ns)
            self._deadlines_due_ns = now + min(_DEADLINES_EVERY_NS, shortest // 4)
            for room in list(self.rooms.values()):
                if room.failure is None:
                    self._check_deadline(room)
                elif not room.drained:
                    self._check_drained(room)

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


def _tiles(groups: tuple[tuple[int, int], ...], lo: int, hi: int) -> bool:
    """Whether the groups lie one after the other from `lo` to `hi`."""
    edges = [lo, *(edge for group in groups for edge in group), hi]
    return edges[::2] == edges[1::2] and all(first < end for first, end in groups)
