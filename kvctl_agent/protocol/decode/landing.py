"""From the arrival of a part at a decode rank to its place in the pages.

- An arrival is believed only if it fits the plan, the nonce and, for a staged part, the very grant it names.
- A ring region is freed when its scatter is done, or when its tag comes too late to matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.decode.grants import Grants
from kvctl_agent.protocol.decode.rooms import DecodeState, RecvRooms
from kvctl_agent.protocol.grant_table import GrantedRegion, RegionState
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.recv_room import PartChecksum, RecvRoom
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag

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
