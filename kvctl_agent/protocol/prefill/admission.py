"""Admission on a prefill rank: handles Hello of decode ranks, and accepts or refuses RoomOpen.

A room is planned here, once per decode rank, from the inputs that both sides agreed on at Hello. Values that a peer
sends are checked against these inputs and against the pool that the peer described, before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.page_indices import all_below, extent, single, unpacked
from kvctl_agent.layout.plan import (
    aux_writer,
    keeper,
    readers_of,
    slices_of_writer,
    state_slices_to_reader,
    stripe_of,
    writer_cells,
)
from kvctl_agent.layout.plan_inputs import PlanInputs, differences
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import MachineContext, PeerSessions
from kvctl_agent.protocol.peer import CancelToken, Peer, PeerState, plan_with_peer
from kvctl_agent.protocol.prefill.dispatch import Dispatch
from kvctl_agent.protocol.prefill.rooms import MAX_TRANSFERS, PrefillState, SendRooms, StagingRequests
from kvctl_agent.protocol.prefill.send_room import Final, PeerTransfer, SendRoom, TableTransfer
from kvctl_agent.protocol.prefill.staging_credits import StagingCredits, writer_quota
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, aux_key

MAX_CHUNKS = 1 << 16  # of one room
DRAINING = "KV_DRAINING"

_M = TypeVar("_M", msg.RoomOpen, msg.RoomKept)


@dataclass(eq=False)
class SendAdmission:
    """Accepts or refuses the rooms that decode ranks open."""

    context: MachineContext
    state: PrefillState
    rooms: SendRooms
    staging: StagingRequests
    dispatch: Dispatch

    def on_room_open(self, peer: Peer, message: msg.RoomOpen) -> None:
        opened = self._admit(peer, message, msg.RoomAccepted(message.room, message.nonce), self._transfer_of)
        if opened is None:
            return
        room, transfer = opened
        assert peer.inputs is not None
        room.record.pages = -(-(message.total_pages - message.prefix_pages) // peer.inputs.prefill_split)
        room.record.tokens = message.tokens_to_send(peer.inputs.page_size)
        if room.opened and room.state is RoomState.BOOTSTRAPPING:
            self.rooms.enter(room, RoomState.WAITING_FOR_INPUT)
        if transfer.reader_rank in room.readers:
            self.rooms.begin_transfer(room, self.context.now_ns)
        self.rooms.tell_keeper(room)
        self.staging.request(room, transfer)
        if room.computed.given or room.computed.total is not None:
            self.dispatch.advance(room, transfer, room.computed.sendable(), self.context.now_ns)
            self.dispatch.queue_finals(room, transfer)
            self.rooms.progress(room)

    def on_room_kept(self, peer: Peer, message: msg.RoomKept) -> None:
        answer = msg.Ack(message.room, message.nonce, "room-kept")
        opened = self._admit(peer, message, answer, self._transfer_to_keeper)
        if opened is not None:
            self.rooms.tell_keeper(opened[0])

    def _admit(
        self,
        peer: Peer,
        message: _M,
        answer: msg.Message,
        plan: Callable[[Peer, PlanInputs, _M, frozenset[int]], PeerTransfer],
    ) -> tuple[SendRoom, PeerTransfer] | None:
        """Opens a room to a decode rank, and answers; returns None if it is open there already, or is not opened.

        Args:
            plan: returns the transfer to the decode rank; the last argument is the set of the room's readers here.
        """
        if message.to != self.context.local.incarnation:
            self.context.drop("incarnation")
            return None
        key = RoomKey(peer.name, message.room, message.nonce)
        room = self.state.rooms.get(message.room)
        if known := self.state.transfers.get(key):
            active = self.state.rooms[message.room]
            if active.failure is None:
                self.context.send(peer.name, answer)
            else:
                self.rooms.send_failed(known, active.failure)
            return None
        if room is not None and peer.name in room.transfers and key not in self.state.tombstones:
            # The previous room of this number has ended there and is about to end here: the peer will resend.
            self.context.drop("early")
            return None
        assert peer.inputs is not None
        failure = self._reason_to_refuse(key, room, peer.inputs)
        if failure is not None:
            self._refuse(key, failure)
            return None
        place = peer.inputs, message.room, peer.coord.dp
        readers, kept_by = readers_of(*place, self.context.rank), keeper(*place)
        try:
            transfer = plan(peer, peer.inputs, message, readers)
        except LayoutError as error:
            failure = self.context.failure("KV_PLAN_MISMATCH", str(error))
            self._refuse(key, failure)
            self.rooms.abort_unopened(message.room, failure)
            return None
        room = room or self.rooms.begin(message.room)
        room.readers = readers
        if failure := self.rooms.recalled_late(room, transfer) or self.rooms.unlike_prompt(room, transfer):
            self.rooms.fail(room, failure)
            self._refuse(key, failure)
            return None
        transfer.keeper = transfer.reader_rank == kept_by
        room.openers |= readers | {kept_by, transfer.reader_rank}
        room.transfers[peer.name] = transfer
        room.opened_by.add(transfer.reader_rank)  # last, since any thread may ask whether the room is opened
        self.state.transfers[key] = transfer
        record = room.record
        record.planned += transfer.planned
        record.join(peer.name, message.nonce)
        record.event("accept", self.context.now_ns, peer=peer.name)
        self.context.send(peer.name, answer)
        return room, transfer

    def _transfer_to_keeper(
        self, peer: Peer, inputs: PlanInputs, message: msg.RoomKept, readers: frozenset[int]
    ) -> PeerTransfer:
        """Returns a transfer without parts.

        Raises:
            LayoutError: the decode rank does not keep the room, or this rank may write to it; or a limit is exceeded.
        """
        self._check_capacity()
        assert peer.info is not None
        rank = peer.info.unique_rank
        if rank in readers or rank != keeper(inputs, message.room, peer.coord.dp):
            raise LayoutError(f"{peer.name} cannot keep room {message.room} without opening it")
        return PeerTransfer(
            writer=self.context.rank,
            room=message.room,
            peer=peer.name,
            reader=peer.coord,
            reader_rank=rank,
            nonce=message.nonce,
            shares=(),
            tables=(),
            prefix_tokens=0,
            finals={},
            prefill_only=True,
            cancel=CancelToken(peer.lease),
        )

    def _check_capacity(self) -> None:
        if len(self.state.transfers) >= MAX_TRANSFERS:
            raise LayoutError(f"{self.context.local.name} has {len(self.state.transfers)} open rooms and takes no more")

    def _transfer_of(
        self, peer: Peer, inputs: PlanInputs, message: msg.RoomOpen, readers: frozenset[int]
    ) -> PeerTransfer:
        """Plans the parts to send for an opening; none to a rank that opens the room only to refuse it.

        Raises:
            LayoutError: the plan inputs differ, an index is outside the peer's pool, or a limit is exceeded.
        """
        if message.inputs != peer.wire:
            raise LayoutError("; ".join(map(str, differences(peer.wire, message.inputs))))
        wanted = message.total_pages - message.prefix_pages
        if wanted > MAX_CHUNKS * inputs.chunk_pages:
            raise LayoutError(f"{wanted} pages are more than {MAX_CHUNKS} chunks of {inputs.chunk_pages} pages")
        self._check_capacity()
        pool = peer.info.pool if peer.info is not None else {}
        span = f"pages {message.prefix_pages}..{message.total_pages}"
        reader = peer.info.unique_rank if peer.info is not None else 0
        stripe = stripe_of(inputs, reader)
        own = stripe.before(message.total_pages) - stripe.before(message.prefix_pages)
        engine_pages = -(-own // inputs.decode_split)
        num_pages = int(pool["num_pages"])  # type: ignore[arg-type]
        if inputs.decode_split > 1 and num_pages * inputs.decode_split >= 1 << 31:
            raise LayoutError(f"{num_pages} pages of {inputs.decode_split} transfer pages each exceed 32 bits")
        owes = reader in readers
        pages = _indices(message.pages, engine_pages, num_pages, span, peer.name) if owes else ev.NO_PAGES
        if message.aux_index >= int(pool["aux_slots"]):  # type: ignore[arg-type]
            raise LayoutError(f"aux row {message.aux_index} is outside {peer.name}'s pool")
        slices = slices_of_writer(inputs, message.room, peer.coord.dp, self.context.rank) if owes else ()
        owed = [share for share in slices if share.reader == reader and not message.prefill_only]
        spans = [(pages, message.prefix_pages, message.total_pages)]
        spans += self._group_pages(peer.name, inputs, message, pool["slots"])  # type: ignore[arg-type]
        tables = []
        for number, (dst_pages, prefix, total) in enumerate(spans):
            cells: Sequence[Chunk] = ()
            if any(share.table == number for share in owed):
                cells = writer_cells(inputs, message.room, self.context.rank, reader, total, prefix, number)
            splits = (1, 1) if number else (inputs.prefill_split, inputs.decode_split)
            tables.append(TableTransfer(cells, dst_pages, prefix, total, *splits))
        finals = self._finals_of(peer.name, reader, inputs, message, pool["slots"]) if owes else {}  # type: ignore[arg-type]
        return PeerTransfer(
            writer=self.context.rank,
            room=message.room,
            peer=peer.name,
            reader=peer.coord,
            reader_rank=reader,
            nonce=message.nonce,
            shares=owed,
            tables=tables,
            prefix_tokens=message.prefix_pages * inputs.page_size,
            finals=finals,
            prefill_only=message.prefill_only,
            cancel=CancelToken(peer.lease),
            tokens=message.tokens,
            digest=message.digest,
        )

    def _group_pages(
        self, name: str, inputs: PlanInputs, message: msg.RoomOpen, slots: list[int]
    ) -> Iterator[tuple[ev.Pages, int, int]]:
        """Yields for each KV group the decode rank's pages, how many pages of the prompt precede them, and the total.

        Raises:
            LayoutError: a page is outside the decode rank's pool, or there are more than the prompt has.
        """
        groups = [segment for segment in inputs.segments if segment.table]
        if len(message.groups) > len(groups):
            raise LayoutError(f"pages of {len(message.groups)} KV groups, the model has {len(groups)}")
        for place, segment in enumerate(groups):
            data = message.groups[place] if place < len(message.groups) else b""
            pages = _indices(data, len(data) // 4, slots[segment.index], f"pages of group {segment.name}", name)
            total = -(-message.tokens // inputs.shape.groups[place].page_size)
            most = min(total, MAX_CHUNKS * inputs.chunk_pages_of(place + 1))
            if len(pages) > most:
                raise LayoutError(f"{len(pages)} pages of group {segment.name} are more than {most}")
            yield pages, total - len(pages), total

    def _finals_of(
        self, name: str, reader: int, inputs: PlanInputs, message: msg.RoomOpen, slots: list[int]
    ) -> dict[tuple[PartKind, PartKey], Final]:
        """Returns the aux row and the state components that this rank is elected to write, by kind and key.

        Args:
            name: name of the decode rank.
            reader: unique rank of the decode rank.
            slots: number of items in the decode rank's pool, by segment.

        Raises:
            LayoutError: the opening has too many state components, or an item outside the decode rank's pool.
        """
        finals: list[Final] = []
        if message.aux_index >= 0 and aux_writer(inputs, message.room, reader) == self.context.rank:
            finals.append(Final(PartKind.AUX, aux_key(self.context.rank), None, single(message.aux_index)))
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

    def _reason_to_refuse(self, key: RoomKey, room: SendRoom | None, inputs: PlanInputs) -> Failure | None:
        """Returns the failure to refuse an opening with, regardless of its pages; None if it may be accepted."""
        if key in self.state.tombstones:
            self.context.drop("tombstone")
            over = self.context.failure("KV_ROOM_UNKNOWN", f"room {key.room} is over at {self.context.local.name}")
            return self.state.tombstones.find(key) or over
        if room is None:
            ended = self.state.ended.get(key.room)
            if ended is not None and ended.failure is not None and ended.failure["code"] == DRAINING:
                ended = None  # a room refused while draining may be opened again, under another nonce
            if ended is None or key.peer in ended.openers:  # with another nonce it is a new room of the same number
                return self._refuse_draining(key.room) if self.state.draining else None
            self.state.ended[key.room] = ended._replace(openers=ended.openers | {key.peer})
            return ended.failure
        if room.failure is not None:
            return room.failure
        coord = self.context.peers[key.peer].coord
        for transfer in room.transfers.values():
            known = self.context.peers[transfer.peer].inputs
            if known is not None and known != inputs:
                factors = differences(known.to_wire(), inputs.to_wire())
                text = f"room {key.room}: {transfer.peer} and {key.peer} differ: {'; '.join(map(str, factors))}"
                failure = self.context.failure("KV_PLAN_MISMATCH", text)
                self.rooms.fail(room, failure)
                return failure
            if transfer.reader == coord or transfer.reader.dp != coord.dp:
                text = f"room {key.room} is active for {transfer.peer} with nonce {transfer.nonce:016x}"
                return self.context.failure("KV_ROOM_DUPLICATE", text)
        return None

    def _refuse_draining(self, number: int) -> Failure:
        """Returns the failure of a room opened while this agent drains, and schedules the room's failure here, too.

        The engine of a draining agent begins no new rooms, so no decode rank may wait for one.
        """
        failure = self.context.failure(DRAINING, f"{self.context.local.name} is draining and takes no new rooms")
        self.rooms.abort_unopened(number, failure)
        return failure

    def _refuse(self, key: RoomKey, failure: Failure) -> None:
        """Refuses an opening and sends the first cause; a tombstone keeps the cause for resent openings."""
        peer, number, nonce = key
        self.state.tombstones.add(key, failure, self.context.now_ns)
        self.context.note("room-refused", failure["text"], "warning", room=number, peer=peer)
        self.context.send(peer, msg.RoomRefused(number, nonce, **failure))


def _indices(data: bytes, count: int, limit: int, what: str, peer: str) -> ev.Pages:
    """Decodes a peer's page or item indices from little-endian int32.

    Args:
        count: number of indices expected.
        limit: number of pages or items in the peer's pool.
        what: name of the indices, for errors.

    Raises:
        LayoutError: their number is wrong, or an index is outside the pool.
    """
    if len(data) != 4 * count:
        raise LayoutError(f"{len(data)} bytes of numbers for {what}")
    numbers = unpacked(data)
    if not all_below(numbers, limit):
        least, most = extent(numbers)
        raise LayoutError(f"{what}: {least}..{most} is outside {peer}'s pool of {limit}")
    return numbers


MAX_PEERS = 4096


@dataclass(eq=False)
class Readers:
    """Performs the handshake with the decode ranks that this prefill rank writes to."""

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
        if self.sessions.is_stale(peer, incarnation, message.who):
            return
        if peer.incarnation == incarnation and peer.state is not PeerState.LOST:
            if peer.usable and self.sessions.hear(peer):
                self.dispatch.on_lease_renewed(peer)
            peer.heard_ns = self.context.now_ns  # also of a refused one, which is forgotten when it is silent
            if peer.state is not PeerState.CONNECTING:  # otherwise the answer follows once the transport has connected
                self._send_hello_ack(peer)  # the answer was lost
            return
        self.sessions.replace(peer, incarnation)
        inputs, differences = plan_with_peer(self.context.local, message.who)
        if message.version != msg.PROTOCOL_VERSION:
            differences = (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",)
            inputs = None
        peer.begin_incarnation(incarnation, message.who, inputs, differences, event.route)
        peer.former.clear()  # an earlier incarnation of a decode rank writes nothing here
        peer.heard_ns = self.context.now_ns
        self.state.parked.setdefault(peer_name, {})
        if inputs is None:
            self.context.note("peer-refused", peer.refusal, "error", peer=peer_name)
            self._send_hello_ack(peer)
        else:
            self.state.credits[peer_name] = StagingCredits(writer_quota(inputs, message.who.ring_bytes))
            self.context.actions.append(ev.ConnectPeer(peer_name, incarnation, message.who, inputs))

    def _refuse_name(self, peer: Peer, event: ev.Received) -> None:
        """Refuses a Hello that another process sends under the name of a peer that is ready.

        Either two agents were given the same name, and the first keeps it; or the sender is the successor of a process
        that has just ended, and is accepted once that end is proven or the old process has been silent for long enough.
        """
        self.context.drop("name-taken")
        if event.incarnation in peer.ended_incarnations:
            return
        assert peer.info is not None
        heard_s = (self.context.now_ns - peer.heard_ns) / 1e9
        text = (
            f"the name {peer.name} is in use at {self.context.local.name} by {peer.info.process} (incarnation "
            f"{peer.incarnation:016x}, heard {heard_s:.1f} s ago): give every agent its own name, or set "
            "name_suffix"
        )
        if peer.name_refused_to != event.incarnation:
            peer.name_refused_to = event.incarnation
            self.context.note(
                "name-taken", f"incarnation {event.incarnation:016x} is refused: {text}", "error", peer=peer.name
            )
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.context.local.peer_info(), event.incarnation, taken=text)
        self.context.send(peer.name, ack, event.route)

    def on_peer_connected(self, event: ev.PeerConnected) -> None:
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        self.sessions.ready(peer)
        self._send_hello_ack(peer)

    def on_peer_unusable(self, event: ev.PeerUnusable) -> None:
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.differences = (event.text,)
        peer.state = PeerState.REFUSED
        peer.fail(event.text)
        self.context.note("peer-refused", f"{peer.name} cannot be written to: {event.text}", "error", peer=peer.name)
        self._send_hello_ack(peer)

    def on_unknown_heartbeat(self, event: ev.Received, message: msg.Heartbeat) -> None:
        self.context.send(event.peer, msg.HelloWanted(), event.route)

    def forget_over(self) -> None:
        """Forgets the decode ranks that are over, and of which nothing is in flight."""
        peers = self.context.peers
        keep_ns = self.context.timing.bootstrap_ns
        if over := [(peer, why) for peer in peers.values() if (why := self.sessions.over(peer, keep_ns))]:
            busy = {transfer.peer for transfer in self.state.transfers.values()}
            for peer, why in over:
                if peer.name not in busy:
                    self._forget(peer, why)

    def _forget(self, peer: Peer, why: str) -> None:
        self.state.parked.pop(peer.name, None)
        self.state.credits.pop(peer.name, None)
        self.sessions.forget(peer, why)

    def on_forget(self, event: ev.Forget) -> None:
        if (peer := self.sessions.gone(event)) is None:
            return
        if busy := sum(transfer.peer == peer.name for transfer in self.state.transfers.values()):
            rooms = f"{busy} room{'s' * (busy != 1)}"
            text = f"writes of {rooms} to {peer.name} have not ended, and read this rank's pages: wait for their end"
            self.context.answer(event.ticket, "refused", text)
            return
        self._forget(peer, "an operator asked for it")
        self.context.answer(event.ticket, "forgotten", f"{peer.name} is forgotten; if it still runs, it connects anew")

    def _send_hello_ack(self, peer: Peer) -> None:
        differences = [encodable(text)[: msg.MAX_TEXT] for text in peer.differences]
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.context.local.peer_info(), peer.incarnation, differences)
        self.context.send(peer.name, ack)

    def _new_peer(self, name: str) -> Peer | None:
        """Adds a peer; returns None if that is impossible.

        At the limit of `MAX_PEERS` the new peer replaces the unusable one without open transfers that has been silent
        for longest.
        """
        if len(self.context.peers) >= MAX_PEERS:
            busy = {transfer.peer for transfer in self.state.transfers.values()}
            gone = (peer for peer in self.context.peers.values() if not peer.usable and peer.name not in busy)
            oldest = min(gone, key=lambda peer: peer.heard_ns, default=None)
            if oldest is None:
                return None
            self._forget(oldest, f"there are {MAX_PEERS} peers")
        peer = self.context.peers[name] = Peer(name, self.context.timing)
        return peer
