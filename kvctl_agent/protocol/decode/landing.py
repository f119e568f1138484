"""Parts on a decode rank: grants their ring regions, accepts their arrival, and orders their scatter into the pages.

- A staging request is answered at once, unless the part can never fit. A repeated request gets the same grant; a part
  whose grant is being revoked gets none.
- An arrival is accepted only if it matches the plan, the nonce and, for a staged part, the serial of its grant.
- A ring region is freed when its scatter is done, or at once if its tag arrives after the room has failed.
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
from kvctl_agent.protocol.ring import Allocation, RegionState
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag


@dataclass(eq=False)
class Grants:
    """Grants and revokes ring regions, and sends the watermark to the writers that wait for it."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms

    def watermark(self) -> list[int]:
        """Returns the watermark in wire form: [round, tail, sequence]."""
        position = self.state.grant_table.ring.watermark
        return [position.round, position.tail, self.state.grant_table.ring.sequence]

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_staging_request(self, peer: Peer, message: msg.StagingRequest) -> None:
        context = self.context
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            self.rooms.answer_unknown(peer, message.room, message.nonce)
            return
        room, _ = found
        if room.failure is not None or peer.state is not PeerState.READY:
            return  # RoomAbort was sent, or the peer gets no grants while it is suspect
        assert peer.info is not None
        owner = room.key_of(peer.name)
        grants: list[msg.Grant] = []
        for spec in message.parts:
            key = PartKey(peer.info.unique_rank, spec.chunk, spec.lo, spec.hi)
            part = room.planned_part(key)
            # The plan, not the writer, decides how large a part is.
            if part is None or spec.nbytes != part.share.part_bytes(len(part.pages), spec.hi - spec.lo):
                context.drop("unknown-part")
                continue
            allocation = self.state.grant_table.of_part(owner, key)
            if allocation is None:
                if not room.grantable(key):
                    context.drop("late")
                    continue
                if not self.state.grant_table.ring.fits(spec.nbytes):
                    self._refuse(peer, message, spec)
                    continue
                allocation = self.state.grant_table.grant(owner, key, spec.nbytes, context.now_ns)
                room.grant(key)
                context.telemetry.metrics.add("kvctl_ring_grants_total", 1)
            if allocation.state is RegionState.GRANTED:
                grants.append(allocation.grant())
            elif allocation.state is RegionState.REVOKING:
                self.revoke(allocation, 0)  # the answer was lost: resend, even if no other writer is gated now
        if grants:
            mark = self.watermark()
            peer.watermark_sent = (mark[0], mark[1], mark[2])
            room.record.event("grant", context.now_ns, writer=peer.info.unique_rank, peer=peer.name)
            context.send(peer.name, msg.StagingGrants(room.room, room.nonce, grants, mark))

    def on_staging_revoked(self, peer: Peer, message: msg.StagingRevoked) -> None:
        """Frees a region that its writer will never write: it was revoked, or the pages of its part were recalled."""
        allocation = self._unwritten(peer, message.serial, RegionState.REVOKING, RegionState.GRANTED)
        if allocation is not None:
            if allocation.state is RegionState.REVOKING:
                self.context.telemetry.metrics.add("kvctl_ring_revokes_total", 1)
            self.free([allocation])
            self.unblock()  # the freed one may have been the last allocation that overlaps a region to be retired

    def on_too_late(self, peer: Peer, message: msg.TooLate) -> None:
        allocation = self._unwritten(peer, message.serial, RegionState.REVOKING)
        if allocation is not None:
            allocation.state = RegionState.GRANTED
            allocation.at_ns = self.context.now_ns
            allocation.posted = True

    def _unwritten(self, peer: Peer, serial: int, *states: RegionState) -> Allocation | None:
        """Returns the allocation with this serial, if it is this peer's and in one of these states.

        Returns None, and counts the message as dropped, if there is no such allocation.
        """
        allocation = self.state.grant_table.find(serial)
        if allocation is None or allocation.state not in states or allocation.room.peer != peer.name:
            self.context.drop("late")
            return None
        return allocation

    def _refuse(self, peer: Peer, message: msg.StagingRequest, spec: msg.PartSpec) -> None:
        self.context.telemetry.metrics.add("kvctl_ring_refusals_total", 1)
        self.state.grant_table.refused_largest_bytes = max(self.state.grant_table.refused_largest_bytes, spec.nbytes)
        ring, size = self.state.grant_table.ring.largest_bytes, self.state.grant_table.ring.size_bytes
        why = "can never fit" if ring == size else "fits between no two of the quarantined bytes of"
        text = f"a part of {spec.nbytes} bytes {why} the ring of {size} bytes: raise staging_ring_mb"
        self.context.note("staging-refused", text, "warning", room=message.room, peer=peer.name)
        refused = msg.StagingRefused(message.room, message.nonce, spec.chunk, spec.lo, spec.hi, spec.nbytes, ring)
        self.context.send(peer.name, refused)

    # ---- for the other parts ----------------------------------------------------------------------------------

    def free(self, allocations: Iterable[Allocation]) -> None:
        """Frees allocations, then sends the watermark to the writers whose grants it has passed."""
        moved = False
        for allocation in allocations:
            room = self.state.rooms.get(allocation.room.room)
            if room is not None and room.nonce == allocation.room.nonce:
                room.ungrant(allocation.key)
            moved |= self.state.grant_table.free(allocation.region.serial)
        if moved:
            self._send_watermarks()

    def unblock(self) -> None:
        """Keeps the oldest allocation from blocking all others for ever.

        An allocation that its writer has not written for `revoke_ns` is revoked. An allocation is retired (the
        watermark passes it, and its bytes stay excluded) if its write has been in flight for that long, if an operator
        has requested it, or if its writer is not ready and may be writing.
        """
        table, revoke_ns = self.state.grant_table, self.context.timing.revoke_ns
        moved = False
        while table.gates_any_peer and (oldest := table.oldest()) is not None:
            if oldest.state is RegionState.LANDED:
                break
            stuck = oldest.retire_requested or (oldest.posted and self.context.now_ns - oldest.at_ns >= revoke_ns)
            if not stuck and oldest.state is not RegionState.QUARANTINED and self.is_heard(oldest.room.peer):
                if not oldest.posted:
                    self.revoke(oldest, revoke_ns)
                break
            # The watermark must not admit a writer that was granted these bytes in a later round. (Two regions of lost
            # writers may overlap: neither is read.)
            overlapping = [
                other
                for other in table.overlapping(oldest)
                if not oldest.state is other.state is RegionState.QUARANTINED
            ]
            table.ring.exclude(oldest.region.serial)
            if overlapping:
                for other in overlapping:
                    self.revoke(other, 0)
                break
            moved |= table.ring.retire(oldest.region.serial)
        if moved:
            self._send_watermarks()

    def is_heard(self, name: str) -> bool:
        """Returns whether a peer is ready, that is, neither suspect nor lost."""
        peer = self.context.peers.get(name)
        return peer is not None and peer.state is PeerState.READY

    def revoke(self, allocation: Allocation, patience_ns: int) -> None:
        """Revokes an unwritten grant that is at least `patience_ns` old; resends a revoke that was not answered."""
        now_ns = self.context.now_ns
        if allocation.state is RegionState.REVOKING:
            patience_ns = self.context.timing.resend_ns  # the revoke or its answer was lost
        elif allocation.state is not RegionState.GRANTED:
            return
        if now_ns - allocation.at_ns < patience_ns or not self.context.is_ready(allocation.room.peer):
            return
        allocation.state = RegionState.REVOKING
        allocation.at_ns = now_ns
        key, room = allocation.key, allocation.room
        revoke = msg.StagingRevoke(room.room, room.nonce, key.chunk, key.lo, key.hi, allocation.region.serial)
        self.context.send(room.peer, revoke)

    def _send_watermarks(self) -> None:
        opened = self.state.grant_table.take_opened()
        if not opened:
            return
        round_, tail, sequence = self.watermark()
        for name in opened:
            if self.context.is_ready(name):  # a lost watermark is repaired by the next heartbeat
                self.context.peers[name].watermark_sent = (round_, tail, sequence)
                self.context.send(name, msg.Watermark(round_, tail, sequence))


CHECKSUM = "KV_CHECKSUM_MISMATCH"
IN_PLACE = "in-place"
"""Shown as the path of parts written straight to their pages: the decode rank does not know the writer's path."""


@dataclass(eq=False)
class Landing:
    """Adds arrived parts to the coverage of their rooms, orders scatters and compares checksums."""

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
        if tag.kind is PartKind.KV and tag.row is not None and reason in (None, "duplicate"):
            self._arrive(tag.aux, at_ns)

    def _take(self, tag: Tag, at_ns: int) -> str | None:
        """Accepts a tag and returns None, or returns the reason why the tag is dropped."""
        if tag.incarnation != self.context.local.incarnation:
            return "incarnation"
        room = self.state.rooms.get(tag.room)
        if room is None or room.nonce != tag.nonce:
            return "unknown-room"
        key = tag.key
        if tag.kind is not PartKind.KV:
            return self._take_final(room, tag, at_ns)
        part = room.planned_part(key)
        if part is None:
            return "unplanned"
        allocation = self.state.grant_table.of_part(RoomKey(room.writers[key.writer], tag.room, tag.nonce), key)
        if tag.serial:
            if allocation is None or allocation.region.serial != tag.serial:
                return "stale-grant"
            if allocation.state is RegionState.LANDED:
                return "duplicate"
            if room.failure is not None:
                self.grants.free([allocation])  # the write has ended and the room needs no data
                self.rooms.forget_when_drained(room)
                return "late"
        elif not room.grantable(key) if allocation is None else allocation.state is RegionState.LANDED:
            return "duplicate"
        room.land(key)
        if tag.checksum is not None:
            room.checks[tag.kind, key] = PartChecksum(tag.checksum, {}, IN_PLACE)
        self._begin(room)
        if allocation is not None and tag.serial:
            allocation.state = RegionState.LANDED
            allocation.at_ns = at_ns
            self.context.actions.append(
                ev.Scatter(
                    serial=tag.serial,
                    offset=allocation.region.offset,
                    key=key,
                    share=part.share,
                    pages=part.pages,
                    room=room.room,
                    nonce=room.nonce,
                    arrived_ns=at_ns,
                )
            )
            return None
        if allocation is not None:
            self.grants.free([allocation])  # the writer chose another path after the grant
        self._in_pages(room, key, {"arrive": at_ns}, IN_PLACE)
        return None

    def _take_final(self, room: RecvRoom, tag: Tag, at_ns: int) -> str | None:
        final = tag.kind, tag.key
        if tag.row is not None and len(tag.row) != sum(self.context.local.aux_row_bytes):
            return "malformed"
        if not room.land_final(final):
            return "duplicate" if final in room.finals_landed else "unplanned"
        room.record.event("aux" if tag.kind is PartKind.AUX else "state", at_ns, writer=tag.key.writer)
        self._begin(room)
        if tag.row is not None and room.failure is None:
            (slot,) = room.final_parts[final][1].tolist()
            self.context.actions.append(ev.StoreAux(slot, tag.row))
        if tag.checksum is not None and room.failure is None:
            room.checks[final] = PartChecksum(tag.checksum, {}, IN_PLACE)
            share, pages = room.final_parts[final]
            self.context.actions.append(ev.Check(room.room, room.nonce, *final, share, pages))
        self.rooms.complete(room)
        return None

    def _begin(self, room: RecvRoom) -> None:
        """Restarts the room's deadline because a part has arrived; the first arrival moves the room to Transferring."""
        room.since_ns = self.context.now_ns
        if room.state is RoomState.WAITING_FOR_INPUT:
            self.rooms.enter(room, RoomState.TRANSFERRING)

    # ---- scatter and checksum -----------------------------------------------------------------------------------

    def on_scattered(self, event: ev.Scattered) -> None:
        if (allocation := self._scattering(event.serial)) is None:
            return
        self.grants.free([allocation])
        room = self.state.rooms[allocation.room.room]  # a room outlives the regions it holds
        self._in_pages(room, allocation.key, {"arrive": allocation.at_ns, "scatter": event.at_ns}, STAGED)
        if room.failure is not None:
            self.rooms.forget_when_drained(room)

    def on_scatter_failed(self, event: ev.ScatterFailed) -> None:
        if (allocation := self._scattering(event.serial)) is None:
            return
        self.grants.free([allocation])
        room = self.state.rooms[allocation.room.room]
        if room.failure is not None:
            self.rooms.forget_when_drained(room)
            return
        text = (
            f"{allocation.key} from {allocation.room.peer} landed, but could not be copied to its pages: {event.text}"
        )
        self.rooms.fail(room, self.context.failure("KV_DEVICE", text))

    def _scattering(self, serial: int) -> Allocation | None:
        allocation = self.state.grant_table.find(serial)
        return allocation if allocation is not None and allocation.state is RegionState.LANDED else None

    def on_checked(self, event: ev.Checked) -> None:
        room = self.state.rooms.get(event.room)
        if room is None or room.nonce != event.nonce or room.failure is not None:
            return
        check = room.checks.pop((event.kind, event.key), None)
        if check is None:
            return
        part = "the aux row" if event.kind is PartKind.AUX else str(event.key)
        if event.found is None:
            text = f"the checksum of {part} from {room.writers[event.key.writer]} could not be computed: {event.text}"
            self.rooms.fail(room, self.context.failure("KV_DEVICE", text))
        elif event.found != check.checksum:
            text = f"{part} from {room.writers[event.key.writer]} ({check.path}) was sent with checksum "
            text += f"{check.checksum:08x}, in the pages it is {event.found:08x}"
            self.rooms.fail(room, self.context.failure(CHECKSUM, text))
        elif event.kind is PartKind.KV:
            self._cover_part(room, event.key, check.moments, check.path)
        else:
            room.since_ns = self.context.now_ns
            self.rooms.complete(room)

    def _in_pages(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        """Settles a part whose bytes are in their pages; orders its check first if the writer sent a checksum."""
        final = PartKind.KV, key
        check = room.checks.get(final)
        if check is None or room.failure is not None:
            room.checks.pop(final, None)
            self._cover_part(room, key, moments, path)
            return
        room.checks[final] = PartChecksum(check.checksum, moments, path)
        part = room.planned_part(key)
        assert part is not None
        self.context.actions.append(ev.Check(room.room, room.nonce, *final, part.share, part.pages))

    def _cover_part(self, room: RecvRoom, key: PartKey, moments: dict[str, int], path: str) -> None:
        """Adds a part that is in its pages, and verified if it has a checksum, to the room's coverage.

        Args:
            moments: monotonic end time in ns of each stage, by name.
            path: path to report to telemetry.
        """
        room.cover(key)
        room.since_ns = self.context.now_ns
        part = room.planned_part(key)
        assert part is not None
        nbytes = part.share.payload_bytes(len(part.pages), key.hi - key.lo)
        self.context.telemetry.part(room.record, key.place, room.writers[key.writer], path, nbytes, moments)
        self.rooms.complete(room)
