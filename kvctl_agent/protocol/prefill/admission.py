"""A prefill rank's answer to an opening: what it owes for the room, or why it cannot take it.

The plan is made here, once per room and decode rank, from the inputs both sides agreed on at Hello; nothing that a
peer sends is believed before it was checked against them and against the pool it told of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.parallel import local_shards
from kvctl_agent.layout.plan import aux_writer, slices_of_writer, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs, differences
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import MachineContext, PeerSessions
from kvctl_agent.protocol.peer import CancelToken, Peer, PeerState, plan_with_peer
from kvctl_agent.protocol.prefill.dispatch import Dispatch
from kvctl_agent.protocol.prefill.rooms import MAX_LEGS, PrefillState, SendRooms, StagingRequests
from kvctl_agent.protocol.prefill.send_room import Final, PeerTransfer, SendRoom, StagingCredits, writer_quota
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey

MAX_CHUNKS = 1 << 16  # of one room
DRAINING = "KV_DRAINING"


@dataclass(eq=False)
class SendAdmission:
    """Takes rooms in, or refuses them."""

    context: MachineContext
    state: PrefillState
    rooms: SendRooms
    staging: StagingRequests
    dispatch: Dispatch

    def on_room_open(self, peer: Peer, message: msg.RoomOpen) -> None:
        if message.to != self.context.local.incarnation:
            self.context.drop("incarnation")
            return
        key = RoomKey(peer.name, message.room, message.nonce)
        room = self.state.rooms.get(message.room)
        if known := self.state.legs.get(key):
            active = self.state.rooms[message.room]
            if active.failure is None:
                self.context.send(peer.name, msg.RoomAccepted(message.room, message.nonce))
            else:
                self.rooms.say_failed(known, active.failure)
            return
        if room is not None and peer.name in room.legs and not self.state.tombstones.holds(key):
            self.context.drop(
                "early"
            )  # the number's last life is over there and about to be here: it will be asked again
            return
        assert peer.inputs is not None
        failure = self._obstacle(key, room, peer.inputs)
        if failure is not None:
            self._refuse(key, failure)
            return
        try:
            leg = self._leg_of(peer, peer.inputs, message)
        except LayoutError as error:
            failure = self.context.failure("KV_PLAN_MISMATCH", str(error))
            self._refuse(key, failure)
            self.rooms.never_opened(message.room, failure)
            return
        if room is None:
            room = self.rooms.begin(message.room)
        room.expected = peer.inputs.decode.tp * peer.inputs.decode.pp
        room.legs[peer.name] = leg
        self.state.legs[key] = leg
        record = room.record
        record.nonce = record.nonce or message.nonce  # of several decode ranks, the first one's stands for all
        record.nonces.append(message.nonce)
        record.pages = message.total_pages - message.prefix_pages
        record.planned += leg.planned
        record.peers.append(peer.name)
        record.event("accept", self.context.now_ns, peer=peer.name)
        self.context.send(peer.name, msg.RoomAccepted(message.room, message.nonce))
        if room.opened and room.state is RoomState.BOOTSTRAPPING:
            self.rooms.enter(room, RoomState.WAITING_FOR_INPUT)
        self.staging.request(room, leg)
        if room.ledger.given or room.ledger.total is not None:
            self.dispatch.advance(room, leg, room.ledger.steps(), self.context.now_ns)
            self.dispatch.queue_finals(room, leg)
            self.rooms.progress(room)

    def _leg_of(self, peer: Peer, inputs: PlanInputs, message: msg.RoomOpen) -> PeerTransfer:
        """What we owe for this opening; raises LayoutError where the two sides do not agree on it."""
        if message.inputs != peer.wire:
            raise LayoutError("; ".join(map(str, differences(peer.wire, message.inputs))))
        wanted = message.total_pages - message.prefix_pages
        if wanted > MAX_CHUNKS * inputs.chunk_pages:
            raise LayoutError(f"{wanted} pages are more than {MAX_CHUNKS} chunks of {inputs.chunk_pages} pages")
        if len(self.state.legs) >= MAX_LEGS:
            raise LayoutError(f"{self.context.local.name} has {len(self.state.legs)} open rooms and takes no more")
        pool = peer.who.pool if peer.who is not None else {}
        span = f"pages {message.prefix_pages}..{message.total_pages}"
        pages = _indices(message.pages, wanted, int(pool["num_pages"]), span, peer.name)  # type: ignore[arg-type]
        if message.aux_index >= int(pool["aux_slots"]):  # type: ignore[arg-type]
            raise LayoutError(f"aux row {message.aux_index} is outside {peer.name}'s pool")
        reader = peer.who.unique_rank if peer.who is not None else 0
        owed = [
            share
            for share in slices_of_writer(inputs, message.room, peer.at.dp, self.context.rank)
            if share.reader == reader and not message.prefill_only
        ]
        cells: Sequence[Chunk] = ()
        if owed:
            cells = writer_cells(inputs, message.room, self.context.rank, message.total_pages, message.prefix_pages)
        return PeerTransfer(
            message.room,
            peer.name,
            peer.at,
            message.nonce,
            owed,
            cells,
            pages,
            message.prefix_pages,
            message.total_pages,
            self._finals_of(peer.name, reader, inputs, message, pool["slots"]),  # type: ignore[arg-type]
            message.prefill_only,
            CancelToken(peer.lease),
        )

    def _finals_of(
        self, name: str, reader: int, inputs: PlanInputs, message: msg.RoomOpen, slots: list[int]
    ) -> dict[tuple[PartKind, PartKey], Final]:
        """The aux row and the state components that this rank was elected to write."""
        finals: list[Final] = []
        if message.aux_index >= 0 and aux_writer(inputs, message.room, reader) == self.context.rank:
            row = np.array([message.aux_index], np.int32)
            finals.append(Final(PartKind.AUX, PartKey(self.context.rank, 0, 0, 0), None, row))
        if not message.states:
            return {(final.kind, final.key): final for final in finals}
        components = [segment for segment in inputs.segments if segment.state]
        if len(message.states) > len(components):
            raise LayoutError(f"items of {len(message.states)} state components, the model has {len(components)}")
        for segment, data in zip(components, message.states, strict=False):
            items = _indices(data, len(data) // 4, slots[segment.index], f"items of state {segment.name}", name)
            for share in state_slices_to_reader(inputs, message.room, reader) if len(items) else ():
                if share.writer == self.context.rank and share.segment == segment.index:
                    key = PartKey(self.context.rank, segment.index, share.layer_lo, share.layer_hi)
                    finals.append(Final(PartKind.STATE, key, share, items))
        return {(final.kind, final.key): final for final in finals}

    def _obstacle(self, key: RoomKey, room: SendRoom | None, inputs: PlanInputs) -> Failure | None:
        """Why this opening cannot be taken, before looking at its pages."""
        if self.state.tombstones.holds(key):
            self.context.drop("tombstone")
            over = self.context.failure("KV_ROOM_UNKNOWN", f"room {key.room} is over at {self.context.local.name}")
            return self.state.tombstones.find(key) or over
        if room is None:
            ended = self.state.ended.get(key.room)
            if ended is not None and ended.failure is not None and ended.failure["code"] == DRAINING:
                ended = None  # what was refused then may be asked for again, under another nonce
            if ended is None or key.peer in ended.openers:  # with another nonce it is another life of the number
                return self._shut(key.room) if self.state.draining else None
            self.state.ended[key.room] = ended._replace(openers=ended.openers | {key.peer})
            return ended.failure
        if room.failure is not None:
            return room.failure
        at = self.context.peers[key.peer].at
        for leg in room.legs.values():
            theirs = self.context.peers[leg.peer].inputs
            if leg.reader == at or leg.reader.dp != at.dp or theirs != inputs:
                text = f"room {key.room} is active for {leg.peer} with nonce {leg.nonce:016x}"
                return self.context.failure("KV_ROOM_DUPLICATE", text)
        return None

    def _shut(self, number: int) -> Failure:
        """Nobody may wait for a room that our engine will not be given."""
        failure = self.context.failure(DRAINING, f"{self.context.local.name} is draining and takes no new rooms")
        self.rooms.never_opened(number, failure)
        return failure

    def _refuse(self, key: RoomKey, failure: Failure) -> None:
        """Answer with the first cause; the grave gives the same answer to the same opening if it is said again."""
        peer, number, nonce = key
        self.state.tombstones.bury(key, failure, self.context.now_ns)
        self.context.note("room-refused", failure["text"], "warning", room=number, peer=peer)
        self.context.send(peer, msg.RoomRefused(number, nonce, **failure))


def _indices(data: bytes, count: int, limit: int, what: str, peer: str) -> ev.Pages:
    """A peer's page or item numbers, as many as it must have sent and inside its pool."""
    if len(data) != 4 * count:
        raise LayoutError(f"{len(data)} bytes of numbers for {what}")
    numbers = np.frombuffer(data, dtype="<i4")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < limit:
        raise LayoutError(f"{what}: {numbers.min()}..{numbers.max()} is outside {peer}'s pool of {limit}")
    return numbers


MAX_PEERS = 4096


@dataclass(eq=False)
class Readers:
    """Meets every decode rank that says Hello."""

    context: MachineContext
    state: PrefillState
    dispatch: Dispatch
    sessions: PeerSessions

    def on_hello(self, event: ev.Received, message: msg.Hello) -> None:
        peer_name, incarnation = event.peer, event.incarnation
        peer = self.context.peers.get(peer_name)
        if message.who.name != peer_name or (
            peer is not None and peer.incarnation == incarnation and peer.route != event.route
        ):
            self.context.drop("stranger")
            return
        peer = peer or self._new_peer(peer_name)
        if peer is None:
            self.context.drop("too-many-peers")
            return
        if peer.incarnation != incarnation and peer.state is PeerState.READY:
            self._refuse_name(peer, event)
            return
        if self.sessions.late(peer, incarnation):
            return
        if peer.incarnation == incarnation and peer.state is not PeerState.LOST:
            if peer.usable:
                lapsed = not peer.may_post(self.context.now_ns)
                self.sessions.hear(peer)
                if lapsed:
                    self.dispatch.on_lease_renewed(peer)
            if peer.state is not PeerState.CONNECTING:  # else the answer follows when the transport has connected
                self._say_hello(peer)  # our answer was lost
            return
        self.sessions.replace(peer, incarnation)
        inputs, differences = plan_with_peer(self.context.local, message.who)
        if message.version != msg.PROTOCOL_VERSION:
            differences = (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",)
            inputs = None
        peer.meet(incarnation, message.who, inputs, differences, event.route)
        peer.former.clear()  # what an earlier one wrote is its own affair: here it can only have read
        peer.heard_ns = self.context.now_ns
        self.state.parked.setdefault(peer_name, {})
        if inputs is None:
            self.context.note("peer-refused", peer.refusal, "error", peer=peer_name)
            self._say_hello(peer)
        else:
            share = writer_quota(inputs, message.who.ring_bytes)
            self.state.allowances[peer_name] = StagingCredits(share)
            theirs = local_shards(inputs.shape, inputs.page_size, inputs.decode, peer.at)
            self.context.act(ev.ConnectPeer(peer_name, incarnation, message.who, theirs))

    def _refuse_name(self, peer: Peer, event: ev.Received) -> None:
        """Another process says Hello under the name of a peer that is well.

        Either two agents were given one name, and the first keeps it; or it is the next life of a process that ended
        just now, which is let in as soon as the end is proven or the silence has grown.
        """
        self.context.drop("name-taken")
        if event.incarnation in peer.past:
            return
        assert peer.who is not None
        heard_s = (self.context.now_ns - peer.heard_ns) / 1e9
        text = (
            f"the name {peer.name} is in use at {self.context.local.name} by {peer.who.process} (incarnation "
            f"{peer.incarnation:016x}, heard {heard_s:.1f} s ago): give every agent its own name"
        )
        if peer.name_asked_by != event.incarnation:
            peer.name_asked_by = event.incarnation
            self.context.note(
                "name-taken", f"incarnation {event.incarnation:016x} is refused: {text}", "error", peer=peer.name
            )
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.context.local.introduction(), event.incarnation, taken=text)
        self.context.send(peer.name, ack, event.route)

    def on_peer_connected(self, event: ev.PeerConnected) -> None:
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.state = PeerState.READY
        self.context.note("peer-ready", f"{peer.name} is ready (incarnation {peer.incarnation:016x})", peer=peer.name)
        self._say_hello(peer)

    def on_peer_unusable(self, event: ev.PeerUnusable) -> None:
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.differences = (event.text,)
        peer.state = PeerState.REFUSED
        peer.fail(event.text)
        self.context.note("peer-refused", f"{peer.name} cannot be written to: {event.text}", "error", peer=peer.name)
        self._say_hello(peer)

    def _say_hello(self, peer: Peer) -> None:
        differences = [encodable(text)[: msg.MAX_TEXT] for text in peer.differences]
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.context.local.introduction(), peer.incarnation, differences)
        self.context.send(peer.name, ack)

    def _new_peer(self, name: str) -> Peer | None:
        """A peer we have not met; when there are very many, in the place of one that is gone and has nothing here."""
        if len(self.context.peers) >= MAX_PEERS:
            busy = {leg.peer for leg in self.state.legs.values()}
            gone = (peer for peer in self.context.peers.values() if not peer.usable and peer.name not in busy)
            oldest = min(gone, key=lambda peer: peer.heard_ns, default=None)
            if oldest is None:
                return None
            del self.context.peers[oldest.name]
            self.state.parked.pop(oldest.name, None)
            self.state.allowances.pop(oldest.name, None)
        peer = self.context.peers[name] = Peer(name, self.context.timing)
        return peer
