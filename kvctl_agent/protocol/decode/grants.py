"""Regions of a decode rank's ring: granted when asked for, given back, asked back, set aside.

A staging request is answered at once, for as long as the part could ever fit; the same request gets the same grant; a
part whose revoke is open gets none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.decode.rooms import DecodeState, RecvRooms
from kvctl_agent.protocol.grant_table import GrantedRegion, RegionState
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.recv_room import RecvRoom
from kvctl_agent.protocol.tag import PartKey


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
