"""From the arrival of a part at a decode rank to its place in the pages.

- An arrival is believed only if it fits the plan, the nonce and, for a staged part, the very grant it names.
- A ring region is freed when its scatter is done, or when its tag comes too late to matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.rooms import DecodeState, PartChecksum, RecvRoom, RecvRooms
from kvctl_agent.protocol.machine import MachineContext
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.ring import GrantedRegion, RegionState
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag


@dataclass(eq=False)
class Grants:
    """Owns the book of regions and tells writers what may be written."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms

    def watermark(self) -> list[int]:
        """Round, tail and sequence, as they travel."""
        position = self.state.book.ring.watermark
        return [position.round, position.tail, self.state.book.ring.sequence]

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_staging_request(self, peer: Peer, message: msg.StagingRequest) -> None:
        context = self.context
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            self.rooms.answer_unknown(peer, message.room, message.nonce)
            return
        room, _ = found
        if room.failure is not None or peer.state is not PeerState.READY:
            return  # the abort is on its way
        assert peer.who is not None
        owner = room.key_of(peer.name)
        grants: list[msg.Grant] = []
        for spec in message.parts:
            key = PartKey(peer.who.unique_rank, spec.chunk, spec.lo, spec.hi)
            if spec.lo >= spec.hi or not room.owes(key) or not self._size_fits(room, key, spec.nbytes):
                context.drop("unknown-part")
                continue
            holding = self.state.book.of_part(owner, key)
            if holding is None:
                if not room.grantable(key):
                    context.drop("late")
                    continue
                if not self.state.book.ring.fits(spec.nbytes):
                    self._refuse(peer, message, spec)
                    continue
                holding = self.state.book.grant(owner, key, spec.nbytes, context.now_ns)
                room.grant(key)
                context.telemetry.metrics.add("kvctl_ring_grants_total", 1)
            if holding.state is RegionState.GRANTED:
                grants.append(holding.grant())
            elif holding.state is RegionState.REVOKING:
                self.revoke(holding, 0)  # the answer was lost, and whoever waited behind it may wait no more
        if grants:
            mark = self.watermark()
            peer.watermark_sent = (mark[0], mark[1], mark[2])
            room.record.event("grant", context.now_ns, writer=peer.who.unique_rank, peer=peer.name)
            context.send(peer.name, msg.StagingGrants(room.room, room.nonce, grants, mark))

    def on_staging_revoked(self, peer: Peer, message: msg.StagingRevoked) -> None:
        holding = self._revoking(peer, message.serial)
        if holding is not None:
            self.context.telemetry.metrics.add("kvctl_ring_revokes_total", 1)
            self.free([holding])
            self.unpin()  # it may have been the last heir of a region that is to be set aside

    def on_too_late(self, peer: Peer, message: msg.TooLate) -> None:
        holding = self._revoking(peer, message.serial)
        if holding is not None:
            holding.state = RegionState.GRANTED
            holding.at_ns = self.context.now_ns
            holding.posted = True

    def _revoking(self, peer: Peer, serial: int) -> GrantedRegion | None:
        """The allocation that this peer was asked to give back; where there is none, that is counted."""
        holding = self.state.book.find(serial)
        if holding is None or holding.state is not RegionState.REVOKING or holding.room.peer != peer.name:
            self.context.drop("late")
            return None
        return holding

    def _size_fits(self, room: RecvRoom, key: PartKey, nbytes: int) -> bool:
        """The plan, not the writer, says how large a part is."""
        return nbytes == room.share_of(key).part_bytes(len(room.pages_at(key)), key.hi - key.lo)

    def _refuse(self, peer: Peer, message: msg.StagingRequest, spec: msg.PartSpec) -> None:
        self.context.telemetry.metrics.add("kvctl_ring_refusals_total", 1)
        self.state.book.refused_largest_bytes = max(self.state.book.refused_largest_bytes, spec.nbytes)
        ring, size = self.state.book.ring.largest_bytes, self.state.book.ring.size_bytes
        why = "can never fit" if ring == size else "fits between no two of the quarantined bytes of"
        text = f"a part of {spec.nbytes} bytes {why} the ring of {size} bytes: raise staging_ring_mb"
        self.context.note("staging-refused", text, "warning", room=message.room, peer=peer.name)
        refused = msg.StagingRefused(message.room, message.nonce, spec.chunk, spec.lo, spec.hi, spec.nbytes, ring)
        self.context.send(peer.name, refused)

    # ---- for the other parts ----------------------------------------------------------------------------------

    def free(self, holdings: Iterable[GrantedRegion]) -> None:
        """Give regions back, then tell the writers whose grants that has opened."""
        moved = False
        for holding in holdings:
            room = self.state.rooms.get(holding.room.room)
            if room is not None and room.nonce == holding.room.nonce:
                room.ungrant(holding.key)
            moved |= self.state.book.free(holding.region.serial)
        if moved:
            self._tell_opened()

    def unpin(self) -> None:
        """No holding may pin the ring for ever while others wait behind it.

        One that its writer has not written for long is taken back; one that is being written for long, or whose writer
        is silent and may be writing, is set aside.
        """
        book, revoke_ns = self.state.book, self.context.timing.revoke_ns
        moved = False
        while book.gates_somebody and (oldest := book.oldest()) is not None:
            if oldest.state is RegionState.LANDED:
                break
            stuck = oldest.yields or (oldest.posted and self.context.now_ns - oldest.at_ns >= revoke_ns)
            if not stuck and oldest.state is not RegionState.QUARANTINED and self.is_fresh(oldest.room.peer):
                if not oldest.posted:
                    self.revoke(oldest, revoke_ns)
                break
            # The watermark must not let in who was given these bytes in a later round. (Two of lost writers may
            # overlap: neither is read.)
            heirs = [heir for heir in book.heirs(oldest) if not oldest.state is heir.state is RegionState.QUARANTINED]
            book.ring.avoid(oldest.region.serial)
            if heirs:
                for heir in heirs:
                    self.revoke(heir, 0)
                break
            moved |= book.ring.set_aside(oldest.region.serial)
        if moved:
            self._tell_opened()

    def is_fresh(self, name: str) -> bool:
        """Whether a peer was heard lately."""
        peer = self.context.peers.get(name)
        return peer is not None and peer.state is PeerState.READY

    def revoke(self, holding: GrantedRegion, patience_ns: int) -> None:
        """Ask for an unwritten grant back that is `patience_ns` old, or again where no answer came."""
        now_ns = self.context.now_ns
        if holding.state is RegionState.REVOKING:
            patience_ns = self.context.timing.resend_ns  # the revoke or its answer was lost
        elif holding.state is not RegionState.GRANTED:
            return
        if now_ns - holding.at_ns < patience_ns or not self.context.is_ready(holding.room.peer):
            return
        holding.state = RegionState.REVOKING
        holding.at_ns = now_ns
        key, room = holding.key, holding.room
        revoke = msg.StagingRevoke(room.room, room.nonce, key.chunk, key.lo, key.hi, holding.region.serial)
        self.context.send(room.peer, revoke)

    def _tell_opened(self) -> None:
        opened = self.state.book.opened()
        if not opened:
            return
        round_, tail, sequence = self.watermark()
        for name in opened:
            if self.context.is_ready(name):  # heartbeats repair what is lost
                self.context.peers[name].watermark_sent = (round_, tail, sequence)
                self.context.send(name, msg.Watermark(round_, tail, sequence))


CHECKSUM = "KV_CHECKSUM_MISMATCH"
IN_PLACE = "in-place"
"""What parts are shown by that went straight to their pages: by which path is their writer's affair alone."""


@dataclass(eq=False)
class Landing:
    """Marks coverage, orders scatters and compares checksums."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    grants: Grants

    def on_arrived(self, event: ev.Arrived) -> None:
        self._arrive(event.tag, event.at_ns)

    def on_part_ready(self, peer: Peer, message: msg.PartReady) -> None:
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            self.rooms.answer_unknown(peer, message.room, message.nonce)
            return
        room, _ = found
        known: list[bytes] = []
        for data in message.tags:
            try:
                tag = Tag.unpack(data)
            except RemoteProtocolError:
                self.context.drop("bad-tag")
                continue
            writer = room.writers[tag.key.writer] if tag.key.writer < len(room.writers) else ""
            if writer != peer.name or (tag.room, tag.nonce) != (room.room, room.nonce):
                self.context.drop("bad-tag")
                continue
            known.append(data)
            self._arrive(tag, self.context.now_ns)
        self.context.send(peer.name, msg.PartAck(message.room, message.nonce, known))

    def _arrive(self, tag: Tag, at_ns: int) -> None:
        reason = self._take(tag, at_ns)
        if reason:
            self.context.telemetry.metrics.add("kvctl_tags_dropped_total", 1, reason)

    def _take(self, tag: Tag, at_ns: int) -> str | None:
        """Believe a tag, or say why not."""
        if tag.incarnation != self.context.local.incarnation:
            return "incarnation"
        room = self.state.rooms.get(tag.room)
        if room is None or room.nonce != tag.nonce:
            return "unknown-room"
        key = tag.key
        if tag.kind is not PartKind.KV:
            return self._take_final(room, tag, at_ns)
        if not room.owes(key):
            return "unplanned"
        holding = self.state.book.of_part(room.key_of(room.writers[key.writer]), key)
        if tag.serial:
            if holding is None or holding.region.serial != tag.serial:
                return "stale-grant"
            if holding.state is RegionState.LANDED:
                return "duplicate"
            if room.failure is not None:
                self.grants.free([holding])  # the write is over and nobody wants it
                self.rooms.settle(room)
                return "late"
        elif not room.grantable(key) if holding is None else holding.state is RegionState.LANDED:
            return "duplicate"
        room.land(key)
        if tag.checksum is not None:
            room.checks[tag.kind, key] = PartChecksum(tag.checksum, {}, IN_PLACE)
        self._begin(room)
        if holding is not None and tag.serial:
            self.state.book.land(holding, at_ns)
            pages, share = room.pages_at(key), room.share_of(key)
            offset = holding.region.offset
            self.context.act(ev.Scatter(tag.serial, offset, key, share, pages, room.room, room.nonce, at_ns))
            return None
        if holding is not None:
            self.grants.free([holding])  # the writer took another path after it was granted, and says that it is done
        self._in_pages(room, key, {"arrive": at_ns}, IN_PLACE)
        return None

    def _take_final(self, room: RecvRoom, tag: Tag, at_ns: int) -> str | None:
        final = tag.kind, tag.key
        if not room.land_final(final):
            return "duplicate" if final in room.finals_landed else "unplanned"
        room.record.event("aux" if tag.kind is PartKind.AUX else "state", at_ns, writer=tag.key.writer)
        self._begin(room)
        if tag.checksum is not None and room.failure is None:
            room.checks[final] = PartChecksum(tag.checksum, {}, IN_PLACE)
            share, pages = room.final_parts[final]
            self.context.act(ev.Check(room.room, room.nonce, *final, share, pages))
        self.rooms.complete(room)
        return None

    def _begin(self, room: RecvRoom) -> None:
        """Something of the room has arrived."""
        room.since_ns = self.context.now_ns
        if room.state is RoomState.WAITING_FOR_INPUT:
            self.rooms.enter(room, RoomState.TRANSFERRING)

    # ---- scatter and checksum -----------------------------------------------------------------------------------

    def on_scattered(self, event: ev.Scattered) -> None:
        if (holding := self._scattering(event.serial)) is None:
            return
        self.grants.free([holding])
        room = self.state.rooms[holding.room.room]  # a room outlives the regions it holds
        self._in_pages(room, holding.key, {"arrive": holding.at_ns, "scatter": event.at_ns}, STAGED)
        if room.failure is not None:
            self.rooms.settle(room)

    def on_scatter_failed(self, event: ev.ScatterFailed) -> None:
        if (holding := self._scattering(event.serial)) is None:
            return
        self.grants.free([holding])
        room = self.state.rooms[holding.room.room]
        if room.failure is not None:
            self.rooms.settle(room)
            return
        text = f"{holding.key} from {holding.room.peer} landed, but could not be copied to its pages: {event.text}"
        self.rooms.fail(room, self.context.failure("KV_DEVICE", text))

    def _scattering(self, serial: int) -> GrantedRegion | None:
        holding = self.state.book.find(serial)
        return holding if holding is not None and holding.state is RegionState.LANDED else None

    def on_checked(self, event: ev.Checked) -> None:
        room = self.state.rooms.get(event.room)
        if room is None or room.nonce != event.nonce or room.failure is not None:
            return
        check = room.checks.pop((event.kind, event.key), None)
        if check is None:
            return
        if event.found is not None and event.found != check.checksum:
            part = "the aux row" if event.kind is PartKind.AUX else str(event.key)
            text = f"{part} from {room.writers[event.key.writer]} ({check.path}) was sent with checksum "
            text += f"{check.checksum:08x}, in the pages it is {event.found:08x}"
            self.rooms.fail(room, self.context.failure(CHECKSUM, text))
        elif event.kind is PartKind.KV:
            self._settle_part(room, event.key, check.moments, check.path)
        else:
            room.since_ns = self.context.now_ns
            self.rooms.complete(room)

    def _in_pages(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        """A part is in its pages; where its writer sent a checksum of it, that is compared first."""
        final = PartKind.KV, key
        check = room.checks.get(final)
        if check is None or room.failure is not None:
            room.checks.pop(final, None)
            self._settle_part(room, key, moments, path)
            return
        room.checks[final] = PartChecksum(check.checksum, moments, path)
        self.context.act(ev.Check(room.room, room.nonce, *final, room.share_of(key), room.pages_at(key)))

    def _settle_part(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        """A part is in its pages, as it was sent."""
        room.settle(key)
        room.since_ns = self.context.now_ns
        nbytes = room.share_of(key).payload_bytes(len(room.pages_at(key)), key.hi - key.lo)
        self.context.telemetry.part(room.record, key.place, room.writers[key.writer], path, nbytes, moments)
        self.rooms.complete(room)
