"""Parts of a prefill rank: granted regions, handed to the transfer workers, or parked until they may go.

- A ready part goes to a worker when its path needs no ring, or when it has a grant, the watermark has passed it and
  the peer was heard from lately. Otherwise it is parked and holds nothing.
- The final parts, aux row and state, are queued only after all KV parts of their leg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvctl_agent.contract.choices import BULK, STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import MachineContext
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.prefill.rooms import PrefillState, SendRooms, StagingRequests
from kvctl_agent.protocol.prefill.send_room import Final, Part, PartState, PeerTransfer, SendableChunk, SendRoom
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey


@dataclass(eq=False)
class Dispatch:
    """Takes grants and what the workers say, and orders transfers."""

    context: MachineContext
    state: PrefillState
    rooms: SendRooms
    staging: StagingRequests

    # ---- the workers ------------------------------------------------------------------------------------------

    def on_part_sent(self, event: ev.PartSent) -> None:
        leg = self.state.legs.get(RoomKey(event.peer, event.room, event.nonce))
        if leg is None:
            return
        room = self.state.rooms[event.room]
        leg.in_flight -= 1
        room.since_ns = self.context.now_ns
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
                leg.resend_ns = self.context.now_ns + 2 * self.context.timing.resend_ns
        self.rooms.progress(room)

    def _part_sent(self, room: SendRoom, leg: PeerTransfer, part: Part, moments: dict[str, int]) -> None:
        leg.to_send -= part.layers
        part.state = PartState.SENT
        if part.path == STAGED:
            self.staging.allowances[leg.peer].end(part)
            self.staging.request_next(leg.peer)
        record = room.record
        record.sent = (record.sent or 0) + part.layers
        if room.groups and moments:
            room.spans.add(moments["queue"], moments["wire"])
        # What was sent while the forward still ran is hidden behind it, wherever it will end.
        done_ns = room.computed_ns or self.context.now_ns
        nbytes = part.share.payload_bytes(part.chunk.count, part.layers)  # without the region's alignment
        self.context.telemetry.part(record, part.key.place, leg.peer, part.path, nbytes, moments, done_ns)

    def on_part_failed(self, event: ev.PartFailed) -> None:
        leg = self.state.legs.get(RoomKey(event.peer, event.room, event.nonce))
        if leg is None:
            return
        room = self.state.rooms[event.room]
        if not event.in_flight:
            leg.in_flight -= 1  # else the worker says PartSent(dropped) once the engine lets go
        self.rooms.fail(room, self.context.failure(event.code, event.text))
        self.rooms.progress(room)

    # ---- the reader's ring ------------------------------------------------------------------------------------

    def on_staging_grants(self, peer: Peer, message: msg.StagingGrants) -> None:
        self._hear_watermark(peer, message.watermark)
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, leg = found
        assert peer.who is not None
        for grant in message.grants:
            part = leg.parts.get(PartKey(self.context.rank, grant.chunk, grant.lo, grant.hi))
            if part is None or grant.offset + part.nbytes > grant.end or grant.end > peer.who.ring_bytes:
                self.context.drop("unknown-part")
            elif part.path != STAGED or part.grant is not None or grant.serial <= part.revoked:
                self.context.drop("late")
            else:
                part.grant = grant
                room.record.event("grant", self.context.now_ns, *part.key.place, peer=peer.name)
                if part.state is PartState.READY:
                    self.dispatch(room, leg, part)
        self.rooms.progress(room)

    def on_staging_refused(self, peer: Peer, message: msg.StagingRefused) -> None:
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, leg = found
        part = leg.parts.get(PartKey(self.context.rank, message.chunk, message.lo, message.hi))
        if part is None or part.path != STAGED or part.grant is not None or room.failure is not None:
            self.context.drop("late")
            return
        text = f"{part.key} needs {message.needs} bytes, the ring of {peer.name} has {message.ring}"
        self._fall_back(room, leg, part, "ring-too-small", text)
        self.rooms.progress(room)

    def on_staging_revoke(self, peer: Peer, message: msg.StagingRevoke) -> None:
        revoked = msg.StagingRevoked(message.room, message.nonce, message.serial)
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            self.context.send(peer.name, revoked)  # of a room that is over nothing is in flight, nor will be
            return
        room, leg = found
        part = leg.parts.get(PartKey(self.context.rank, message.chunk, message.lo, message.hi))
        if part is None:
            self.context.drop("unknown-part")
            return
        held = part.grant.serial if part.grant else 0
        if held == message.serial and part.state >= PartState.QUEUED:
            self.context.send(peer.name, msg.TooLate(message.room, message.nonce, message.serial))
            if part.state is PartState.SENT:  # its tag was lost, or is about to arrive
                self.context.send(peer.name, msg.PartReady(leg.room, leg.nonce, [self.rooms.tag(leg, part)]))
            return
        part.revoked = max(part.revoked, message.serial)
        self.context.send(peer.name, revoked)
        if held == message.serial:
            part.grant = None
            part.requested = False
            part.asks = part.asked_ns = 0
            self.staging.allowances[leg.peer].end(part)
            if room.failure is None:
                self.staging.request(room, leg)
            self.staging.request_next(leg.peer)

    def on_watermark(self, peer: Peer, message: msg.Watermark) -> None:
        self._hear_watermark(peer, [message.round, message.tail, message.sequence])

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self.context.now_ns)
        if message.watermark:
            self._hear_watermark(peer, message.watermark)

    def _hear_watermark(self, peer: Peer, watermark: list[int]) -> None:
        if peer.gate.hear(watermark, self.context.now_ns):
            self.retry_parked(peer)

    def _fall_back(self, room: SendRoom, leg: PeerTransfer, part: Part, reason: str, text: str) -> None:
        who = self.context.introduction(leg.peer)
        self.rooms.unpark(room, leg, part)
        self.staging.allowances[leg.peer].end(part)
        part.path = self.staging.fallback(who, part.share, part.layers, leg.pages_at(part.chunk))
        self.context.telemetry.metrics.add("kvctl_fallbacks_total", 1, reason)
        self.context.note("fallback", f"{text}: sent by {part.path}", "warning", room=room.room, peer=leg.peer)
        if part.state is PartState.READY:
            self.dispatch(room, leg, part)
        self.staging.request_next(leg.peer)

    # ---- parts ------------------------------------------------------------------------------------------------

    def advance(self, room: SendRoom, leg: PeerTransfer, steps: Sequence[SendableChunk], at_ns: int) -> None:
        """Some layers of some pages are computed: hand over the parts that this makes ready."""
        given, total = room.ledger.given, room.ledger.total
        if not leg.prefill_only and (given > leg.total_pages or total not in (None, leg.total_pages)):
            text = f"room {room.room}: this side computed {given} pages, {leg.peer} expects {leg.total_pages}"
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", text))
            return
        room.since_ns = self.context.now_ns
        if room.state is RoomState.WAITING_FOR_INPUT:
            self.rooms.enter(room, RoomState.TRANSFERRING)
        ready: list[Part] = []
        for lo, hi, old, new in steps:
            for part in leg.between(self.context.rank, lo, hi, old, new):
                cell = part.chunk
                if part.state is PartState.PLANNED and room.ledger.ready(
                    part.key.lo, part.key.hi, cell.first + cell.count
                ):
                    part.src_pages = room.ledger.source(cell)
                    part.ready_ns = at_ns
                    part.state = PartState.READY
                    ready.append(part)
        if room.ledger.complete or any(not part.path for part in ready):  # they were cut just now
            self.staging.request(room, leg)
        for part in ready:
            self.dispatch(room, leg, part)

    def dispatch(self, room: SendRoom, leg: PeerTransfer, part: Part) -> None:
        """Hand a ready part to a worker, or park it."""
        if room.failure is not None:
            return
        peer = self.context.peers[leg.peer]
        grant = part.grant
        gated = part.path == STAGED and (grant is None or not peer.gate.open(grant.round, grant.end))
        if gated or not peer.may_post(self.context.now_ns):
            self.rooms.park(room, leg, part)
            return
        self.rooms.unpark(room, leg, part)
        part.state = PartState.QUEUED
        leg.in_flight += 1
        leg.to_queue -= part.layers
        assert part.src_pages is not None
        granted = grant if part.path == STAGED else None
        self._order(leg, part, part.path, part.src_pages, leg.pages_at(part.chunk), part.ready_ns, granted)
        self.queue_finals(room, leg)

    def queue_finals(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Once all KV parts of the leg are with a worker: the aux row and the state, if the lease allows it."""
        if room.failure is not None or not room.finished or leg.to_queue:
            return
        if not self.context.peers[leg.peer].may_post(self.context.now_ns):
            return  # called again when it is renewed
        for final in leg.finals.values():
            if final.state is PartState.PLANNED and room.failure is None:  # one of them may fail it
                self._queue_final(room, leg, final)

    def _queue_final(self, room: SendRoom, leg: PeerTransfer, final: Final) -> None:
        aux = final.kind is PartKind.AUX
        source = np.array([room.aux_src], np.int32) if aux else self._items(room, final)
        if len(source) != len(final.dst) or (aux and room.aux_src < 0):
            what = "an aux row" if aux else f"{len(final.dst)} items of state {self.rooms.component(final).name}"
            given = "none" if aux else str(len(source))
            text = f"room {room.room}: {leg.peer} expects {what}, finish() gave {given}"
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", text))
            return
        final.state = PartState.QUEUED
        leg.in_flight += 1
        path = BULK
        if final.share is not None:
            who = self.context.introduction(leg.peer)
            path = self.staging.fallback(who, final.share, final.share.num_layers, final.dst)
        self._order(leg, final, path, source, final.dst, room.forward_done_ns)

    def _items(self, room: SendRoom, final: Final) -> ev.Pages:
        """Our items of a state component."""
        place = self.rooms.components.index(self.rooms.component(final))
        return room.state_src[place] if place < len(room.state_src) else np.empty(0, np.int32)

    def _order(
        self,
        leg: PeerTransfer,
        part: Part | Final,
        path: str,
        source: ev.Pages,
        target: ev.Pages,
        ready_ns: int,
        grant: msg.Grant | None = None,
    ) -> None:
        transfer = ev.Transfer(
            peer=leg.peer,
            room=leg.room,
            nonce=leg.nonce,
            kind=part.kind,
            key=part.key,
            path=path,
            share=part.share,
            src_pages=source,
            dst_pages=target,
            grant=grant,
            tag=self.rooms.tag(leg, part),
            cancel=leg.cancel,
            ready_ns=ready_ns,
            opened_ns=self.context.now_ns,
        )
        self.context.act(transfer)

    def retry_parked(self, peer: Peer) -> None:
        """See which of the parked parts may go now: called when the watermark moved or the lease was renewed."""
        gate = peer.gate
        for leg, part in list(self.state.parked[peer.name].values()):
            grant = part.grant
            if part.path != STAGED or (grant is not None and gate.open(grant.round, grant.end)):
                room = self.state.rooms.get(leg.room)
                if room is not None:  # else one of those before it has ended this room
                    self.dispatch(room, leg, part)

    def on_lease_renewed(self, peer: Peer) -> None:
        self.retry_parked(peer)
        for leg in list(self.state.legs.values()):
            if leg.peer == peer.name and (room := self.state.rooms.get(leg.room)) is not None:
                self.queue_finals(room, leg)


@dataclass(eq=False)
class Forwards:
    """Takes what the engine computes into the rooms' ledgers."""

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
            self.context.act(ev.StateChanged(event.room, ended.state, ended.failure))
            self.context.act(ev.Released(event.room))
            return
        room = self.state.rooms.get(event.room) or self.rooms.begin(event.room)
        if room.claimed:
            raise LocalProtocolError(f"room {event.room} is being sent already; a room number is used once at a time")
        room.claimed = True
        self.context.act(ev.StateChanged(room.room, room.state, room.failure))
        if room.released:  # it failed before our engine came
            self.context.act(ev.Released(room.room))

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
        room.groups = event.groups
        room.prefetched = True
        if not room.ledger.given and not room.launched:  # else it is the next chunk's forward that begins
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
            return  # failed meanwhile; the handle says why
        if event.launched:
            room.launched -= 1
        if self.state.holds_back and not room.finished:
            room.held.append(event)
            room.since_ns = self.context.now_ns
        else:
            self._take_pages(room, event)
            if room.failure is None:
                self.rooms.progress(room)

    def _take_pages(self, room: SendRoom, event: ev.SendPages) -> None:
        if room.failure is not None:
            return
        try:
            steps = room.ledger.take(event.layers, event.pages, event.last)
        except LayoutError as error:
            self.rooms.fail(room, self.context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        if room.ledger.complete:
            room.forward_done_ns = room.computed_ns = room.record.forward_done_at = event.at_ns
        if event.layers is None and not room.prefetched:
            room.prefetched = True  # cells go whole from here on
            self.staging.request_all(room)
        for leg in room.legs.values():
            self.dispatch.advance(room, leg, steps, event.at_ns)
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
        room.record.event("finish", self.context.now_ns)
        for leg in room.legs.values():
            self.dispatch.queue_finals(room, leg)
        self.rooms.progress(room)

    def _claimed(self, number: int) -> SendRoom | None:
        """The room that our engine computes; one that it has not come for is a later life of the number."""
        room = self.state.rooms.get(number)
        return room if room is not None and room.claimed else None


def _tiles(groups: tuple[tuple[int, int], ...], lo: int, hi: int) -> bool:
    """Whether the groups lie one after the other from `lo` to `hi`."""
    edges = [lo, *(edge for group in groups for edge in group), hi]
    return edges[::2] == edges[1::2] and all(first < end for first, end in groups)
