"""Handles the prefill engine's calls, and queues ready parts for transfer.

- A ready part is queued if its path needs no ring, or if it has a grant and the watermark has passed its region; in
  both cases the peer's lease must be valid. Otherwise the part is gated and holds no staging buffer.
- The final parts, aux row and state, are queued only after all KV parts of their transfer; the aux row with the last
  of these if the prompt is finished by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvctl_agent.contract.choices import BULK, STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout.page_indices import single
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import MachineContext
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.prefill.rooms import PrefillState, SendRooms, StagingRequests
from kvctl_agent.protocol.prefill.send_room import Final, Part, PartState, PeerTransfer, SendableChunk, SendRoom
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, aux_key


@dataclass(eq=False)
class Dispatch:
    """Queues ready parts for transfer, and handles grants, watermarks and the results of transfers."""

    context: MachineContext
    state: PrefillState
    rooms: SendRooms
    staging: StagingRequests

    # ---- results of transfers -------------------------------------------------------------------------------

    def on_part_sent(self, event: ev.PartSent) -> None:
        transfer = self.state.transfers.get(RoomKey(event.peer, event.room, event.nonce))
        if transfer is None:
            return
        room = self.state.rooms[event.room]
        transfer.in_flight -= 1
        room.since_ns = self.context.now_ns
        if not event.dropped or transfer.done:
            if event.kind is PartKind.KV:
                part = transfer.parts[event.key]
                part.checksum = event.checksum
                self._part_sent(room, transfer, part, event.moments)
                final = part.aux
            else:
                final = transfer.finals[event.kind, event.key]
            if final is not None:
                transfer.to_send -= 1
                final.checksum, final.row = event.checksum, event.row
                final.state = PartState.SENT
            if not transfer.resend_ns:
                transfer.resend_ns = self.context.now_ns + 2 * self.context.timing.resend_ns
        elif room.failure is None and transfer.recalled is None:
            self._part_dropped(transfer, event)
        self.rooms.progress(room)
        self.end_recall(room)

    def _part_dropped(self, transfer: PeerTransfer, event: ev.PartSent) -> None:
        """Plans a part again that was queued when the engine recalled its pages, and was dropped."""
        if event.kind is not PartKind.KV:
            transfer.finals[event.kind, event.key].state = PartState.PLANNED
            return
        part = transfer.parts[event.key]
        part.state = PartState.PLANNED
        if part.aux is not None:
            part.aux.state, part.aux = PartState.PLANNED, None
        transfer.to_queue += part.layers
        self.staging.give_back(transfer, part)
        self.staging.request_next(transfer.peer)

    def end_recall(self, room: SendRoom) -> None:
        """Reports a recall as done once no part that was queued before it is in transfer.

        Pages that the engine has passed since then may be sent from now on.
        """
        if not room.recalling or room.failure is not None or not room.drained:
            return
        self.context.actions.append(ev.Recalled(room.room, room.recalling))
        room.recalling = 0
        self.staging.request_all(room)
        if room.computed.given or room.computed.total is not None:
            for transfer in room.transfers.values():
                self.advance(room, transfer, room.computed.sendable(), self.context.now_ns)
                if room.failure is not None:
                    return
                self.queue_finals(room, transfer)
        self.rooms.progress(room)

    def _part_sent(self, room: SendRoom, transfer: PeerTransfer, part: Part, moments: dict[str, int]) -> None:
        transfer.to_send -= part.layers
        part.state = PartState.SENT
        if part.path == STAGED:
            self.staging.refund(transfer.peer, part)
        record = room.record
        record.sent = (record.sent or 0) + part.layers
        if room.groups and moments:
            room.spans.add(moments["queue"], moments["wire"])
        # A part sent while the forward still runs is hidden behind it, whenever the forward ends.
        done_ns = room.computed_ns or self.context.now_ns
        nbytes = part.share.payload_bytes(part.chunk.count, part.layers)  # without the region's alignment
        if moments:  # none if the decode rank has the part although its write was not seen to complete
            self.context.telemetry.part(record, part.key.place, transfer.peer, part.path, nbytes, moments, done_ns)

    def on_part_failed(self, event: ev.PartFailed) -> None:
        transfer = self.state.transfers.get(RoomKey(event.peer, event.room, event.nonce))
        if transfer is None:
            return
        if transfer.done:
            # The decode rank has the part. Only the end of the write was lost, for example because the rank has closed.
            if not event.in_flight:
                self.on_part_sent(ev.PartSent(event.peer, event.room, event.nonce, event.kind, event.key))
            return
        room = self.state.rooms[event.room]
        if not event.in_flight:
            transfer.in_flight -= 1  # otherwise PartSent(dropped) follows when the transport has finished the write
        if transfer.recalled is None:  # otherwise the decode rank may open the room again
            self.rooms.fail(room, self.context.failure(event.code, event.text))
        self.rooms.progress(room)

    # ---- the decode rank's ring -------------------------------------------------------------------------------

    def on_staging_grants(self, peer: Peer, message: msg.StagingGrants) -> None:
        self._take_watermark(peer, message.watermark)
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, transfer = found
        assert peer.info is not None
        for grant in message.grants:
            part = transfer.parts.get(PartKey(self.context.rank, grant.chunk, grant.lo, grant.hi))
            if part is None or grant.offset + part.nbytes > grant.end or grant.end > peer.info.ring_bytes:
                self.context.drop("unknown-part")
            elif part.path == STAGED and part.grant is None and (grant.serial <= part.revoked or not part.requested):
                self.staging.return_grant(transfer, part, grant.serial)  # revoked, or its pages were recalled
            elif part.path != STAGED or part.grant is not None:
                self.context.drop("late")
            else:
                part.grant = grant
                room.record.event("grant", self.context.now_ns, *part.key.place, peer=peer.name)
                if part.state is PartState.READY:
                    self.dispatch(room, transfer, part)
        self.rooms.progress(room)

    def on_staging_refused(self, peer: Peer, message: msg.StagingRefused) -> None:
        """Chooses a path that needs no ring for a part that can never fit the decode rank's ring.

        The part is dispatched at once if it is ready.
        """
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, transfer = found
        part = transfer.parts.get(PartKey(self.context.rank, message.chunk, message.lo, message.hi))
        if part is None or part.path != STAGED or part.grant is not None or room.failure is not None:
            self.context.drop("late")
            return
        assert peer.info is not None
        self.rooms.unpark(room, transfer, part)
        self.state.credits[peer.name].refund(part)
        part.path = self.staging.fallback(peer.info, part.share, part.layers, transfer.pages_at(part))
        self.context.telemetry.metrics.add("kvctl_fallbacks_total", 1, "ring-too-small")
        text = (
            f"{part.key} needs {message.needs} bytes, the ring of {peer.name} has {message.ring}: sent by {part.path}"
        )
        self.context.note("fallback", text, "warning", room=room.room, peer=peer.name)
        if part.state is PartState.READY:
            self.dispatch(room, transfer, part)
        self.staging.request_next(peer.name)
        self.rooms.progress(room)

    def on_staging_revoke(self, peer: Peer, message: msg.StagingRevoke) -> None:
        revoked = msg.StagingRevoked(message.room, message.nonce, message.serial)
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            self.context.send(peer.name, revoked)  # nothing of an ended room is in flight, nor will be
            return
        room, transfer = found
        part = transfer.parts.get(PartKey(self.context.rank, message.chunk, message.lo, message.hi))
        if part is None:
            self.context.drop("unknown-part")
            return
        serial = part.grant.serial if part.grant else 0
        if serial == message.serial and part.state >= PartState.QUEUED:
            self.context.send(peer.name, msg.TooLate(message.room, message.nonce, message.serial))
            if part.state is PartState.SENT:  # its tag was lost, or is about to arrive
                tags = [transfer.tag(part, peer.incarnation)]
                self.context.send(peer.name, msg.PartReady(transfer.room, transfer.nonce, tags))
            return
        part.revoked = max(part.revoked, message.serial)
        self.context.send(peer.name, revoked)
        if serial == message.serial:
            part.grant = None
            part.requested = False
            part.asks = part.asked_ns = 0
            self.state.credits[peer.name].refund(part)
            if room.failure is None:
                self.staging.request(room, transfer)
            self.staging.request_next(peer.name)

    def on_watermark(self, peer: Peer, message: msg.Watermark) -> None:
        self._take_watermark(peer, [message.round, message.tail, message.sequence])

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self.context.now_ns)
        if message.watermark:
            self._take_watermark(peer, message.watermark)

    def _take_watermark(self, peer: Peer, watermark: list[int]) -> None:
        if peer.gate.hear(watermark, self.context.now_ns):
            self.retry_parked(peer)

    # ---- parts ------------------------------------------------------------------------------------------------

    def advance(self, room: SendRoom, transfer: PeerTransfer, chunks: Sequence[SendableChunk], at_ns: int) -> None:
        """Marks the parts whose pages are computed now as ready, and dispatches them.

        Args:
            chunks: pages and layers that may be sent from now on.
            at_ns: monotonic time at which they were computed.
        """
        for number, computed in () if transfer.prefill_only else room.computed.by_table.items():
            wanted = transfer.tables[number].engine_pages
            if computed.given > wanted or computed.total not in (None, wanted):
                of = f" of group {number}" if number else ""
                text = f"this side computed {computed.given} pages{of}, {transfer.peer} expects {wanted}"
                if number == 0 and transfer.tables[0].dst_split > transfer.tables[0].split:
                    text += ", whose last page may be filled in part: pass tokens= to receive"
                self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {text}"))
                return
        if room.recalling or transfer.recalled is not None:
            return
        room.since_ns = self.context.now_ns
        if room.state is RoomState.WAITING_FOR_INPUT:
            self.rooms.enter(room, RoomState.TRANSFERRING)
        try:
            ready = room.mark_ready(transfer, chunks, at_ns)
        except LayoutError as error:
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        if room.computed.complete or any(not part.path for part in ready):  # the latter were cut just now
            self.staging.request(room, transfer)
        for part in ready:
            self.dispatch(room, transfer, part)

    def dispatch(self, room: SendRoom, transfer: PeerTransfer, part: Part) -> None:
        """Queues a ready part, or parks it until its region is open and the peer's lease is valid."""
        if room.failure is not None or transfer.recalled is not None:
            return
        peer = self.context.peers[transfer.peer]
        grant = part.grant if part.path == STAGED else None
        gated = part.path == STAGED and (grant is None or not peer.gate.open(grant.round, grant.end))
        if gated or not peer.may_post(self.context.now_ns):
            self.rooms.park(room, transfer, part)
            return
        self.rooms.unpark(room, transfer, part)
        assert part.src_pages is not None
        transfer.to_queue -= part.layers
        aux_row = -1
        if self.state.rows_in_tags and room.finished and not transfer.to_queue:
            final = transfer.finals.get((PartKind.AUX, aux_key(part.key.writer)))
            if final is not None and final.state is PartState.PLANNED and room.aux_src >= 0:
                part.aux, final.state, aux_row = final, PartState.QUEUED, room.aux_src
        dst_pages = transfer.pages_at(part)
        self._queue(transfer, part, part.path, part.src_pages, dst_pages, part.ready_ns, grant, aux_row)
        self.queue_finals(room, transfer)

    def queue_finals(self, room: SendRoom, transfer: PeerTransfer) -> None:
        """Queues the final parts of a transfer if all of its KV parts are queued and the peer's lease is valid."""
        if room.failure is not None or not room.finished or transfer.to_queue:
            return
        if room.recalling or transfer.recalled is not None:
            return
        if not self.context.peers[transfer.peer].may_post(self.context.now_ns):
            return  # called again when the lease is renewed
        for final in transfer.finals.values():
            if final.state is PartState.PLANNED and room.failure is None:  # the one before may have failed the room
                self._queue_final(room, transfer, final)

    def _queue_final(self, room: SendRoom, transfer: PeerTransfer, final: Final) -> None:
        aux = final.kind is PartKind.AUX
        source = single(room.aux_src) if aux else self._items(room, final)
        if len(source) != len(final.dst) or (aux and room.aux_src < 0):
            what = "an aux row" if aux else f"{len(final.dst)} items of state {self.rooms.component(final).name}"
            given = "none" if aux else str(len(source))
            text = f"room {room.room}: {transfer.peer} expects {what}, finish() gave {given}"
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", text))
            return
        path = BULK
        if final.share is not None:
            peer = self.context.peers[transfer.peer]
            assert peer.info is not None
            path = self.staging.fallback(peer.info, final.share, final.share.num_layers, final.dst)
        self._queue(transfer, final, path, source, final.dst, room.forward_done_ns)

    def _items(self, room: SendRoom, final: Final) -> ev.Pages:
        """Returns this rank's item indices of the state component that a final part belongs to."""
        place = self.rooms.components.index(self.rooms.component(final))
        return room.state_src[place] if place < len(room.state_src) else np.empty(0, np.int32)

    def _queue(
        self,
        transfer: PeerTransfer,
        part: Part | Final,
        path: str,
        src_pages: ev.Pages,
        dst_pages: ev.Pages,
        ready_ns: int,
        grant: msg.Grant | None = None,
        aux_row: int = -1,
    ) -> None:
        part.state = PartState.QUEUED
        transfer.in_flight += 1
        self.context.actions.append(
            ev.Transfer(
                peer=transfer.peer,
                room=transfer.room,
                nonce=transfer.nonce,
                kind=part.kind,
                key=part.key,
                path=path,
                share=part.share,
                src_pages=src_pages,
                dst_pages=dst_pages,
                grant=grant,
                tag=transfer.tag(part, self.context.peers[transfer.peer].incarnation),
                cancel=transfer.cancel,
                ready_ns=ready_ns,
                opened_ns=self.context.now_ns,
                aux_row=aux_row,
            )
        )

    def retry_parked(self, peer: Peer) -> None:
        """Dispatches the gated parts that may be sent now, after the watermark moved or the lease was renewed."""
        gate = peer.gate
        for transfer, part in list(self.state.parked[peer.name].values()):
            grant = part.grant
            if part.path != STAGED or (grant is not None and gate.open(grant.round, grant.end)):
                room = self.state.rooms.get(transfer.room)
                if room is not None:  # otherwise a part before this one has ended the room
                    self.dispatch(room, transfer, part)

    def on_lease_renewed(self, peer: Peer) -> None:
        self.retry_parked(peer)
        for transfer in list(self.state.transfers.values()):
            if transfer.peer == peer.name and (room := self.state.rooms.get(transfer.room)) is not None:
                self.queue_finals(room, transfer)


@dataclass(eq=False)
class Forwards:
    """Handles the calls of the prefill engine: send, prefetch, pages and finish, and the end of its forwards."""

    context: MachineContext
    state: PrefillState
    rooms: SendRooms
    staging: StagingRequests
    dispatch: Dispatch

    def on_send_room(self, event: ev.SendRoom) -> None:
        ev.check_room(event.room)
        ended = self.state.ended.get(event.room)
        if ended is not None and not ended.claimed:
            self.state.ended[event.room] = ended._replace(claimed=True)
            self.context.actions.append(ev.StateChanged(event.room, ended.state, ended.failure, ended.prefix_tokens))
            self.context.actions.append(ev.Released(event.room))
            return
        room = self.state.rooms.get(event.room) or self.rooms.begin(event.room)
        if room.claimed:
            raise LocalProtocolError(f"room {event.room} is being sent already; a room number is used once at a time")
        room.claimed = True
        room.tokens, room.digest = event.tokens, event.digest
        room.record.request_id, room.record.traceparent = event.request_id, event.traceparent
        if event.prefix_tokens is not None:
            room.told_prefix_tokens = event.prefix_tokens
        if event.prefix_tokens is not None and room.state is RoomState.BOOTSTRAPPING:
            self.rooms.enter(room, RoomState.WAITING_FOR_INPUT)  # recalled since: it waits to be opened again
        else:
            self.rooms.report(room)
        if room.released:  # the room failed before the engine called send()
            self.context.actions.append(ev.Released(room.room))
        for transfer in list(room.transfers.values()):
            # It may have been recalled and opened again since the engine was told.
            if failure := self.rooms.recalled_late(room, transfer) or self.rooms.unlike_prompt(room, transfer):
                self.rooms.fail(room, failure)

    def on_prefetch(self, event: ev.Prefetch) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return
        layers = self.rooms.layers
        if event.groups and not _tiles(event.groups, layers.start, layers.stop):
            groups = ", ".join(layer_range(lo, hi) for lo, hi in event.groups)
            own = layer_range(layers.start, layers.stop)
            text = f"room {room.room}: layer groups {groups} do not tile layers {own}"
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", text))
            return
        room.groups = room.computed.layer_groups(event.groups)
        room.grouped_tokens = event.tokens
        room.prefetched = True
        room.recalled = False
        if not room.computed.given and not room.launched:  # otherwise the forward of a later chunk begins
            room.forward_begun_ns = room.record.forward_begun_at = event.at_ns or self.context.now_ns
        self.staging.request_all(room)

    def on_launched(self, event: ev.Launched) -> None:
        room = self._claimed(event.room)
        if room is not None and room.failure is None:
            room.launched += 1

    def on_forward_failed(self, event: ev.ForwardFailed) -> None:
        room = self._claimed(event.room)
        if room is not None and not room.state.finished:
            self.rooms.fail(room, self.context.failure("KV_DEVICE", f"room {room.room}: {event.text}"))

    def on_send_pages(self, event: ev.SendPages) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return  # the handle has the cause of the failure
        if event.launched:
            room.launched -= 1
        if self.state.sends_at_finish and not room.finished:
            room.deferred.append(event)
            room.since_ns = self.context.now_ns
        else:
            self._take_pages(room, event)
            if room.failure is None:
                self.rooms.progress(room)

    def _take_pages(self, room: SendRoom, event: ev.SendPages) -> None:
        if room.failure is not None:
            return
        try:
            chunks = room.computed.take(event.layers, event.pages, event.last, event.groups)
        except LayoutError as error:
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        if room.computed.complete:
            room.forward_done_ns = room.computed_ns = room.record.forward_done_at = event.at_ns
            if not room.transfers and self.context.timing.hold_ns:
                room.since_ns = self.context.now_ns  # from here on the room waits to be opened
        again, room.recalled = room.recalled, False
        if (event.layers is None and not room.prefetched) or again:
            room.prefetched = room.prefetched or event.layers is None  # from here on a chunk is one part per share
            self.staging.request_all(room)
        for transfer in room.transfers.values():
            self.dispatch.advance(room, transfer, chunks, event.at_ns)
            if room.failure is not None:
                return

    def on_finish(self, event: ev.Finish) -> None:
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return
        room.finished = True
        room.aux_src, room.state_src = event.aux_index, event.states
        deferred, room.deferred = room.deferred, []
        for pages in deferred:
            self._take_pages(room, pages)
        if event.pages is not None:
            self.on_send_pages(event.pages)
            if self.state.rooms.get(event.room) is not room:
                return  # this rank owes nothing, and the decode ranks had the room before
        if not room.computed.complete:
            self._take_pages(room, ev.SendPages(event.room, np.empty(0, np.int32), True, event.at_ns))
        if room.failure is not None:
            return
        room.forward_done_ns = event.at_ns  # of the final parts; `computed_ns` keeps the end of the forward
        room.record.event("finish", self.context.now_ns)
        self.rooms.begin_transfer(room, event.at_ns)
        for transfer in room.transfers.values():
            self.dispatch.queue_finals(room, transfer)
        self.rooms.progress(room)

    def on_recall(self, event: ev.Recall) -> None:
        """Takes the room's pages back: none is read once Recalled is reported.

        Parts that were sent stay sent. The others wait until the engine passes their pages again; grants and credits
        are given back meanwhile, since the engine may first serve other rooms, which need them.
        """
        room = self._claimed(event.room)
        if room is None or room.failure is not None:
            return  # its pages are released when nothing is in flight
        again, room.recalled, room.recalling = room.recalling > 0, True, event.serial
        room.computed = self.rooms.nothing_computed()
        room.prefetched = room.finished = False
        room.groups, room.deferred, room.launched = (), [], 0
        room.aux_src, room.state_src = -1, ()
        room.forward_begun_ns = room.computed_ns = room.record.forward_begun_at = room.record.forward_done_at = None
        room.since_ns = self.context.now_ns
        room.record.event("recall", self.context.now_ns)
        self.context.telemetry.transfers.cancel(room.room, self.context.now_ns)
        self.context.telemetry.metrics.add("kvctl_rooms_recalled_total", 1)
        for transfer in room.transfers.values():
            if transfer.recalled is not None:
                continue
            if not again:  # otherwise nothing was queued since the recall before
                transfer.drop_queued()
            for part in transfer.parts.values():
                if part.state < PartState.QUEUED:
                    self.rooms.unpark(room, transfer, part)
                    part.state, part.src_pages = PartState.PLANNED, None
                    self.staging.give_back(transfer, part)
            self.staging.request_next(transfer.peer)
        self.rooms.progress(room)  # if all parts are sent, the pages are not needed again
        self.dispatch.end_recall(room)

    def _claimed(self, number: int) -> SendRoom | None:
        """Returns the room for which the engine has called send(); None if there is none.

        A room that only decode ranks have opened is a later use of the same number.
        """
        room = self.state.rooms.get(number)
        return room if room is not None and room.claimed else None


def _tiles(groups: tuple[tuple[int, int], ...], lo: int, hi: int) -> bool:
    """Returns whether layer groups follow each other from `lo` to `hi` without gap or overlap."""
    edges = [lo, *(edge for group in groups for edge in group), hi]
    return edges[::2] == edges[1::2] and all(first < end for first, end in groups)
