"""Rooms of a decode rank: the coverage of each room, and its states from the opening to the tombstone.

- A room succeeds when all prefill ranks that may write to it have accepted it, all planned chunks are in their pages
  and all final parts have landed. Coverage is a set, not a count: a bit per layer for each (writer, chunk), so that a
  duplicate arrival changes nothing and cannot hide a gap. Final parts, which are never divided, are a separate set.
- A failed room is released and forgotten once all prefill ranks that know of it have drained; a successful room is
  forgotten once they have acknowledged its success.
- A room that fails before it is opened is released at once. It is opened later, without pages, so that the prefill
  ranks learn of the failure; it is forgotten if its instance does not connect within the bootstrap deadline.
- The keeper of a room makes itself known to all prefill ranks, and tells them how it has ended on all decode ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import TransferSlice, prefill_ranks
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.events import Pages
from kvctl_agent.protocol.machine import RECALLED, MachineContext, Tombstones, failure_of
from kvctl_agent.protocol.messages import RoomOpen
from kvctl_agent.protocol.peer import FormerIncarnation, LocalInfo, Peer, PeerState, Timing
from kvctl_agent.protocol.ring import GrantTable
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey
from kvctl_agent.telemetry.room_records import RoomRecord

ChunkKey = tuple[int, int]  # (writer, chunk)
TableChunkKey = tuple[int, int, int]  # (writer, chunk, page table)
FinalKey = tuple[PartKind, PartKey]

MAX_UNOPENED = 4096  # failed rooms whose instances are not connected


class PlannedPart(NamedTuple):
    """Transfer slice that a planned part belongs to, and its destination pages."""

    share: TransferSlice
    pages: Pages


class TablePages(NamedTuple):
    """Pages of one page table into which a room is received.

    `pages` are this engine's after a cached prefix, each of which has `split` transfer pages. `prefix_pages` and
    `total_pages` count transfer pages.
    """

    pages: Pages
    split: int
    prefix_pages: int
    total_pages: int


class PartChecksum(NamedTuple):
    """Checksum sent by a part's writer, with the times and the path that telemetry gets after the verification."""

    checksum: int
    moments: dict[str, int]  # end time of each stage by name, monotonic ns
    path: str


@dataclass(slots=True, eq=False)
class WriterTransfer:
    """State of a room at one incarnation of a prefill rank at which it is open; not every such rank sends parts of it.

    Messages of a later incarnation do not count as answers.
    """

    peer: str
    incarnation: int
    kept: bool = False  # this rank only keeps the room there, and is not written to
    accepted: bool = False
    acked: bool = False  # RoomDone was acknowledged, or the rank is gone; a successful room waits for this
    drained: bool = False  # none of its writes is in flight or will be; a failed room waits for this


def mask(lo: int, hi: int) -> int:
    """Returns the bit mask of the layers [lo, hi)."""
    return (1 << hi) - (1 << lo)


@dataclass(slots=True, eq=False)
class RecvRoom:
    """One room of a decode rank under one nonce: its plan, coverage and state."""

    opening: RoomOpen
    instance: str
    pages: Pages  # as the engine has passed them, of KV
    groups: tuple[Pages, ...]  # of each KV group
    tokens: int  # length of the prompt; 0 if its last page counts as full
    record: RoomRecord
    since_ns: int  # start of the current deadline: when the state was entered, or the last progress
    room: int = field(init=False)
    nonce: int = field(init=False)
    tables: Sequence[TablePages] = ()
    state: RoomState = RoomState.BOOTSTRAPPING
    resend_ns: int = 0
    failure: Failure | None = None
    recalled: bool = False  # the engine took its pages back, which is the failure; the prefill ranks keep the room
    released: bool = False
    unopened: bool = False  # the room failed before it was opened, and has no pages any more
    overdue: bool = False  # the room failed long ago; memory that may still be written is quarantined
    transfers: dict[str, WriterTransfer] = field(default_factory=dict)
    unaccepted: int = 0  # number of transfers without which the room cannot succeed
    awaited: set[str] = field(default_factory=set)  # on the keeper: ranks that have not said ReadersDone
    done_elsewhere_ns: int = 0  # on the keeper: when the last other decode rank so far had the room
    failed_elsewhere: Failure | None = None  # on the keeper, which has the room: why another decode rank has not
    writers: tuple[str, ...] = ()  # names of the instance's ranks when the room was opened
    shares: dict[int, list[TransferSlice]] = field(default_factory=dict)  # by writer, one per segment
    chunks: dict[TableChunkKey, Chunk] = field(default_factory=dict)  # narrowed to the pages that the writer sends
    wanted: dict[ChunkKey, int] = field(default_factory=dict)
    granted: dict[ChunkKey, int] = field(default_factory=dict)  # layers with a live grant: no two grants overlap
    landed: dict[ChunkKey, int] = field(default_factory=dict)
    scattered: dict[ChunkKey, int] = field(default_factory=dict)
    missing: int = 0  # chunks whose layers are not all scattered
    finals: set[FinalKey] = field(default_factory=set)  # not landed yet
    finals_landed: set[FinalKey] = field(default_factory=set)
    final_parts: dict[FinalKey, tuple[TransferSlice | None, Pages]] = field(default_factory=dict)
    checks: dict[FinalKey, PartChecksum] = field(default_factory=dict)  # parts in their pages, not verified yet

    def __post_init__(self) -> None:
        self.room = self.opening.room
        self.nonce = self.opening.nonce

    def plan(
        self,
        shares: Sequence[TransferSlice],
        chunks_of: Callable[[int, int], Sequence[Chunk]],
        finals: dict[FinalKey, tuple[TransferSlice | None, Pages]],
        writers: tuple[str, ...],
        incarnations: dict[str, int],
        awaited: Iterable[str],
        kept: Collection[str],
    ) -> None:
        """Sets the parts that the room has to receive.

        Args:
            shares: KV transfer slices that this rank receives.
            chunks_of: returns the chunks of a page table that a writer, named by its unique rank, has to send.
            finals: final parts to receive, each with its transfer slice (None for aux), and its items or its row of
                aux.
            writers: names of the instance's ranks, in the order of unique ranks.
            incarnations: of the ranks at which the room is to be opened, by name.
            awaited: those of them at which other decode ranks open it too, if this one is the room's keeper.
            kept: those of them that write only to other decode ranks.
        """
        self.writers = writers
        self.transfers = {
            name: WriterTransfer(name, incarnation, kept=name in kept) for name, incarnation in incarnations.items()
        }
        self.awaited = set(awaited)
        self.unaccepted = len(self.transfers) - len(kept)
        self.finals = set(finals)
        self.final_parts = finals
        for share in shares:
            known = self.shares.setdefault(share.writer, [])
            known.append(share)
            for chunk in chunks_of(share.writer, share.table):
                place = share.writer, chunk.index
                self.chunks[*place, share.table] = chunk
                self.wanted[place] = self.wanted.get(place, 0) | mask(share.layer_lo, share.layer_hi)
        self.missing = len(self.wanted)
        self.record.planned = sum(wanted.bit_count() for wanted in self.wanted.values())

    def planned_part(self, key: PartKey) -> PlannedPart | None:
        """Returns the planned part with this key.

        Returns None if the part's chunk is not planned, or if its layers do not lie in one transfer slice.
        """
        for share in self.shares.get(key.writer, ()):
            if share.layer_lo <= key.lo < key.hi <= share.layer_hi:
                chunk = self.chunks.get((key.writer, key.chunk, share.table))
                if chunk is not None:
                    table = self.tables[share.table]
                    return PlannedPart(share, chunk.target(table.pages, table.split, table.prefix_pages))
        return None

    def owed_bytes(self, peer: str) -> int:
        """Returns the KV bytes of the room that one prefill rank has to send, whether or not they have landed."""
        return sum(
            share.payload_bytes(chunk.count)
            for (writer, _, table), chunk in self.chunks.items()
            if self.writers[writer] == peer
            for share in self.shares[writer]
            if share.table == table
        )

    def land(self, key: PartKey) -> None:
        """Marks a part as landed; the caller has checked that none of its layers had landed before."""
        place = (key.writer, key.chunk)
        self.landed[place] = self.landed.get(place, 0) | mask(key.lo, key.hi)
        self.record.landed = (self.record.landed or 0) + key.hi - key.lo

    def cover(self, key: PartKey) -> None:
        """Adds a landed part whose bytes are in their pages to the coverage of the room."""
        place = (key.writer, key.chunk)
        covered = self.scattered.get(place, 0) | mask(key.lo, key.hi)
        self.scattered[place] = covered
        self.record.scattered = (self.record.scattered or 0) + key.hi - key.lo
        if covered == self.wanted[place]:
            self.missing -= 1

    def grantable(self, key: PartKey) -> bool:
        """Returns whether a ring region may be granted to a part: none of its layers has landed or has a live grant."""
        place = (key.writer, key.chunk)
        return not (self.landed.get(place, 0) | self.granted.get(place, 0)) & mask(key.lo, key.hi)

    def grant(self, key: PartKey) -> None:
        place = (key.writer, key.chunk)
        self.granted[place] = self.granted.get(place, 0) | mask(key.lo, key.hi)

    def ungrant(self, key: PartKey) -> None:
        """Clears the grant of a part whose ring region was freed."""
        self.granted[key.writer, key.chunk] &= ~mask(key.lo, key.hi)

    def land_final(self, final: FinalKey) -> bool:
        """Marks a final part as landed; returns False if it is not planned or had landed before."""
        if final not in self.finals:
            return False
        self.finals.remove(final)
        self.finals_landed.add(final)
        return True

    def key_of(self, peer: str) -> RoomKey:
        """Returns the key under which the grant table keeps the regions of one writer of this room."""
        return RoomKey(peer, self.room, self.nonce)

    @property
    def all_landed(self) -> bool:
        """Whether every planned (writer, chunk, layer) cell has landed."""
        return self.landed == self.wanted

    @property
    def begun(self) -> bool:
        """Whether any part of the room has landed."""
        return bool(self.landed or self.finals_landed)

    @property
    def complete(self) -> bool:
        return self.missing == 0 and not self.finals and not self.checks

    def describe_missing(self) -> str:
        """Describes the first part that has not arrived or is not in its pages, for the text of a missed deadline."""
        for (writer, chunk), wanted in self.wanted.items():
            landed = self.landed.get((writer, chunk), 0)
            if landed != wanted:
                layers = wanted & ~landed
                first, last = (layers & -layers).bit_length() - 1, layers.bit_length()
                return f"chunk {chunk} layers {layer_range(first, last)} of {self.writers[writer]} did not arrive"
        for (writer, chunk), wanted in self.wanted.items():
            if self.scattered.get((writer, chunk), 0) != wanted:
                where = "its checksum was not taken" if self.checks else "is not in its pages"
                return f"writer {writer} chunk {chunk} landed but {where}"
        for kind, key in sorted(self.finals):
            state = f"state (segment {key.chunk}) layers {layer_range(key.lo, key.hi)}"
            what = "the aux row" if kind is PartKind.AUX else state
            return f"{what} of {self.writers[key.writer]} did not arrive"
        return "the checksums of final parts were not taken" if self.checks else "nothing is missing"


@dataclass(slots=True, eq=False)
class PrefillInstance:
    """One prefill instance.

    Attributes:
        roster: names of its ranks in the order of unique ranks; empty until all are registered.
        absent: while it is incomplete, the missing ranks as its registry reports them; "" if it has not answered.
        retry: it could not be connected to for lack of file descriptors, and is looked up again.
        clash: message about a rank name that another instance uses; "" if there is none.
        keep: the agent was created with it, or its engine has connected to it, so it is not forgotten.
        named_ns: monotonic time at which the engine last named it.
        needed_ns: monotonic time at which a rank was last usable, or a room was open.
    """

    roster: tuple[str, ...] = ()
    absent: str = ""
    retry: bool = False
    clash: str = ""
    keep: bool = False
    named_ns: int = 0
    needed_ns: int = 0


class DecodeState:
    """All state that a decode machine keeps between two events.

    Attributes:
        peers: prefill ranks by name.
        instances: prefill instances by the address of their registry.
        rooms: rooms by number, until they have ended on all ranks.
        unopened: by number, rooms that failed before they could be opened; oldest first.
        tombstones: ended rooms, and whether each was successful.
        grant_table: owner and state of each region of the ring.
    """

    def __init__(self, local: LocalInfo, timing: Timing) -> None:
        self.peers: dict[str, Peer] = {}
        self.instances: dict[str, PrefillInstance] = {}
        self.rooms: dict[int, RecvRoom] = {}
        self.unopened: dict[int, RecvRoom] = {}
        self.tombstones: Tombstones[bool] = Tombstones(timing.bootstrap_ns)
        self.grant_table = GrantTable(local.ring_bytes)

    def roster(self, instance: str) -> tuple[str, ...]:
        """Returns the names of an instance's ranks; empty until it is complete. Any thread may call it."""
        known = self.instances.get(instance)
        return known.roster if known is not None else ()


@dataclass(eq=False)
class RecvRooms:
    """Changes the states of rooms, and resends messages until the prefill ranks have answered."""

    context: MachineContext
    state: DecodeState

    def find(self, peer: Peer, number: int, nonce: int) -> tuple[RecvRoom, WriterTransfer] | None:
        """Returns the room and transfer that a message is about.

        Returns None, and counts the message as dropped, if there is no such transfer.
        """
        room = self.state.rooms.get(number)
        if room is None or room.nonce != nonce:
            known = self.state.tombstones.find(RoomKey("", number, nonce)) is not None
            self.context.drop("tombstone" if known else "unknown-room")
            return None
        transfer = room.transfers.get(peer.name)
        if transfer is None or transfer.incarnation != peer.incarnation:
            self.context.drop("unexpected")
            return None
        return room, transfer

    def ranks_of(self, room: RecvRoom) -> Sequence[str]:
        """Returns the names of the prefill ranks that compute a room; of its whole instance while none of it is ready.

        None are known before the instance is complete.
        """
        roster = self.state.roster(room.instance)
        inputs = next((self.context.peers[name].inputs for name in roster if self.context.is_ready(name)), None)
        if inputs is None or inputs.prefill.dp == 1 or inputs.prefill.size != len(roster):
            return roster
        return [roster[rank] for rank in prefill_ranks(inputs, room.room)]

    def answers(self, transfer: WriterTransfer) -> bool:
        """Returns whether the incarnation at which the room was opened is the peer's present one and usable."""
        peer = self.context.peers.get(transfer.peer)
        return peer is not None and peer.usable and peer.incarnation == transfer.incarnation

    def unanswered(self, room: RecvRoom) -> list[str]:
        """Returns the ranks that have not drained, of a failed room, or have not acknowledged the end of another."""
        acknowledged = room.failure is None or room.unopened
        return [
            each.peer
            for each in room.transfers.values()
            if not ((room.failure is not None and each.drained) or (acknowledged and each.acked))
        ]

    def answer_unknown(self, peer: Peer, number: int, nonce: int) -> None:
        """Sends a writer the outcome of an ended or unknown room, so that the writer does not wait for it for ever."""
        if self.state.tombstones.find(RoomKey("", number, nonce)):
            self.context.send(peer.name, msg.RoomDone(number, nonce))
            return
        text = f"{self.context.local.name} has no room {number} with this nonce"
        failure = self.context.failure("KV_ROOM_UNKNOWN", text)
        self.context.send(peer.name, msg.RoomFailed(number, nonce, **failure))

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_room_accepted(self, peer: Peer, message: msg.RoomAccepted) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is None or found[1].accepted or found[1].kept:
            return
        room, transfer = found
        transfer.accepted = True
        room.unaccepted -= 1
        if room.unaccepted == 0 and room.state is RoomState.BOOTSTRAPPING:
            self.enter(room, RoomState.TRANSFERRING if room.begun else RoomState.WAITING_FOR_INPUT)
            self.complete(room)

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-failed"))
        if found := self.find(peer, message.room, message.nonce):
            self.fail(found[0], failure_of(message))

    def on_readers_done(self, peer: Peer, message: msg.ReadersDone) -> None:
        """Ends a room that this rank keeps on the prefill ranks, once all decode ranks have it."""
        found = self.find(peer, message.room, message.nonce)
        if found is None:
            self.answer_unknown(peer, message.room, message.nonce)
            return
        room, _ = found
        if peer.name in room.awaited:
            room.awaited.remove(peer.name)
            room.done_elsewhere_ns = max(room.done_elsewhere_ns, self.context.now_ns - message.age_ns)
            if room.state is RoomState.SUCCESS:
                self._send_outcome(room)  # which is kept back while others are awaited

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, transfer = found
        if message.of == "room-kept":
            transfer.accepted |= transfer.kept
        elif room.state is RoomState.SUCCESS and message.of in ("room-done", "room-failed"):
            transfer.acked = True
            self.forget_when_drained(room)

    # ---- states -----------------------------------------------------------------------------------------------

    def enter(self, room: RecvRoom, state: RoomState) -> None:
        now_ns = self.context.now_ns
        room.state = state
        room.since_ns = now_ns
        room.record.state(state, now_ns)
        if state.finished:
            room.record.finish(now_ns)
        self.context.actions.append(ev.StateChanged(room.room, state, room.failure))

    def complete(self, room: RecvRoom) -> None:
        """Ends a room as successful if nothing is missing and all prefill ranks have accepted it."""
        if not room.complete or room.state.finished:
            return
        if room.state is RoomState.BOOTSTRAPPING:
            return  # a rank that has not accepted would never learn the outcome
        room.record.event("success", self.context.now_ns)
        self.enter(room, RoomState.SUCCESS)
        room.released = True
        self.context.actions.append(ev.Released(room.room))
        self._send_outcome(room)

    def fail(self, room: RecvRoom, failure: Failure) -> None:
        """Fails a room with this first cause, unless the room has ended.

        A keeper that has the room, while others may not have it, passes the failure on to the prefill ranks.
        """
        if room.state is RoomState.SUCCESS and room.awaited:
            room.awaited.clear()
            room.failed_elsewhere = failure
            self._send_outcome(room)
        if room.state.finished:
            return
        room.failure = failure
        room.record.fail(failure, self.context.now_ns)
        if room.recalled:
            self.context.telemetry.metrics.add("kvctl_rooms_recalled_total", 1)
            self.context.note("room-recalled", failure["text"], room=room.room)
        else:
            self.context.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
            self.context.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        self.enter(room, RoomState.FAILED)
        self._send_outcome(room)
        self.forget_when_drained(room)

    def on_recall(self, event: ev.Recall) -> None:
        """Ends a room whose pages the engine takes back; the prefill ranks keep it, and it may be opened again."""
        room = self.state.rooms.get(event.room)
        if room is not None and not room.state.finished:
            room.recalled = True
            text = f"room {room.room}: the engine of {self.context.local.name} recalled its pages"
            self.fail(room, self.context.failure(RECALLED, text))

    def forget_when_drained(self, room: RecvRoom) -> None:
        """Forgets an ended room once no prefill rank has to answer any more.

        A failed room waits until all prefill ranks have drained and no scatter is running; only then are its pages
        released. A successful room waits until all prefill ranks have acknowledged RoomDone.
        """
        if room.failure is not None:
            if not all(each.drained or (room.unopened and each.acked) for each in room.transfers.values()):
                return
            if any(self.state.grant_table.of_room(room.key_of(name)) for name in room.transfers):
                return  # a scatter still reads a region
            if not room.unopened:
                room.released = True
                self.context.actions.append(ev.Released(room.room))
                # A process that takes the place of a lost one does not have the room.
                if not room.transfers and room.failure["code"] not in (RECALLED, "KV_PEER_LOST"):
                    self._keep_unopened(room)
        elif room.state is not RoomState.SUCCESS or not all(transfer.acked for transfer in room.transfers.values()):
            return
        self.forget(room)

    def forget(self, room: RecvRoom) -> None:
        """Removes a room, and keeps its outcome as a tombstone for late messages."""
        del self.state.rooms[room.room]
        key = RoomKey("", room.room, room.nonce)
        succeeded = room.failure is None and room.failed_elsewhere is None
        self.state.tombstones.add(key, succeeded, self.context.now_ns)
        if not room.unopened or not room.transfers:
            self.context.telemetry.finish(room.record, self.context.now_ns)

    def _keep_unopened(self, room: RecvRoom) -> None:
        """Keeps what is needed to tell the prefill ranks later that a room has failed; its number may be used again."""
        room.unopened = True
        room.pages, room.groups, room.tokens = room.pages[:0], tuple(pages[:0] for pages in room.groups), 0
        room.opening = RoomOpen(room.room, room.nonce, b"", 0, 0, {}, -1, [], True)
        self.state.unopened.pop(room.room, None)
        self.state.unopened[room.room] = room
        if len(self.state.unopened) > MAX_UNOPENED:
            del self.state.unopened[next(iter(self.state.unopened))]

    # ---- messages to the prefill ranks -------------------------------------------------------------------------

    def _send_outcome(self, room: RecvRoom) -> None:
        """Sends the outcome to the prefill ranks; `check` resends it until each of them has answered."""
        room.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        for transfer in room.transfers.values():
            self.send_unanswered(room, transfer)

    def send_unanswered(self, room: RecvRoom, transfer: WriterTransfer) -> bool:
        """Sends a prefill rank what it has not answered: RoomOpen, RoomKept, RoomDone, RoomFailed or RoomAbort.

        Returns whether it was sent to the peer's present incarnation. RoomAbort may also go to a former incarnation.
        """
        if room.failure is not None:
            if transfer.drained:
                return False
            message: msg.Message = msg.RoomAbort(room.room, room.nonce, **room.failure, recall=room.recalled)
        elif room.state is RoomState.SUCCESS:
            if transfer.acked or room.awaited:
                return False
            done_ns = max(room.since_ns, room.done_elsewhere_ns)
            message = msg.RoomDone(room.room, room.nonce, self.context.now_ns - done_ns)
            if room.failed_elsewhere is not None:
                message = msg.RoomFailed(room.room, room.nonce, **room.failed_elsewhere)
        else:
            if transfer.accepted:
                return False
            message = opening_at(room, transfer)
        if self.answers(transfer):
            self.context.send(transfer.peer, message)
            return True
        if room.failure is not None and (former := self._former(transfer)) is not None:
            self.context.send(transfer.peer, message, former.route)
        return False

    def _former(self, transfer: WriterTransfer) -> FormerIncarnation | None:
        """Returns the incarnation at which the room was opened if it was replaced and may still run; None otherwise."""
        peer = self.context.peers.get(transfer.peer)
        return peer.former.get(transfer.incarnation) if peer is not None else None

    # ---- time -------------------------------------------------------------------------------------------------

    def check(self, stalled_ns: int = 0) -> None:
        """Fails rooms that are past their deadline, and resends the messages that are due.

        Args:
            stalled_ns: time before now in which this rank could not run, which counts for no deadline.
        """
        now_ns = self.context.now_ns
        for room in list(self.state.rooms.values()):
            if stalled_ns:
                room.since_ns = min(room.since_ns + stalled_ns, now_ns)
            if not room.state.finished:
                self._check_deadline(room)
            elif room.failure is not None and not room.unopened:
                self._check_drained(room)
            if now_ns >= room.resend_ns > 0:
                self._resend(room)

    def _resend(self, room: RecvRoom) -> None:
        if room.state is RoomState.SUCCESS and room.awaited:
            self._ask_awaited(room)
            return
        kind = "room-end" if room.state.finished else "room-open"
        resent = sum(self.send_unanswered(room, transfer) for transfer in room.transfers.values())
        if resent:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", resent, kind)
        # A process that was replaced, or is lost, may never answer: messages to it are resent seldom.
        timing = self.context.timing
        room.resend_ns = self.context.now_ns + (timing.resend_ns if resent else timing.lost_ns)

    def _ask_awaited(self, room: RecvRoom) -> None:
        """Opens a room again at the ranks for which it is kept: one that has ended it, in a silence, refuses it now."""
        for name in room.awaited:
            transfer = room.transfers[name]
            if self.answers(transfer):
                self.context.send(name, opening_at(room, transfer))
        room.resend_ns = self.context.now_ns + self.context.timing.resend_ns

    def _check_deadline(self, room: RecvRoom) -> None:
        timing, failure = self.context.timing, self.context.failure
        waited = self.context.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING:
            ranks = self.ranks_of(room)
            instance = self.state.instances.get(room.instance)
            absent = instance.absent if instance is not None else ""
            unanswered = not ranks and not absent
            unanswered = unanswered or any(map(self._never_answered, ranks))
            # A registry that is filled anew will name other ranks, or the same ranks' next incarnations.
            restarting = waited <= timing.lost_ns
            waits = bool(room.transfers or (absent and restarting))
            if not waits and waited > timing.suspect_ns and (gone := self._gone(ranks, restarting)):
                self.fail(room, failure("KV_PEER_LOST", "; ".join(filter(None, (f"{stuck}: {gone}", absent)))))
            elif waited > (min(timing.lost_ns, timing.bootstrap_ns) if unanswered else timing.bootstrap_ns):
                silent = [each.peer for each in room.transfers.values() if not (each.accepted or each.kept)]
                if not silent and not absent:
                    silent = [self._absent(name) for name in ranks if not self.context.is_ready(name)]
                why = f"not accepted by {', '.join(silent)}"
                if not silent:
                    why = f"the prefill instance at {room.instance}: {absent or 'no answer from its registry'}"
                self.fail(room, failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {why}"))
        elif waited > timing.waiting_ns:
            code = "KV_ROOM_STUCK_SCATTER" if room.missing and room.all_landed else "KV_ROOM_STUCK_TRANSFER"
            if room.state is RoomState.WAITING_FOR_INPUT:
                code = "KV_ROOM_STUCK_WAITING"
            self.fail(room, failure(code, f"{stuck}: {room.describe_missing()}"))

    def _check_drained(self, room: RecvRoom) -> None:
        """Quarantines the ring regions of a failed room whose writers have not drained in time; records it once."""
        waited = self.context.now_ns - room.since_ns
        if room.overdue or waited <= self.context.timing.waiting_ns:
            return
        room.overdue = True
        undrained = [name for name, transfer in room.transfers.items() if not transfer.drained]
        for name in undrained:
            self.state.grant_table.quarantine_room(room.key_of(name))
        waits_for = ", ".join(undrained) or f"a scatter here ({room.describe_missing()})"
        text = (
            f"room {room.room} failed {waited / 1e9:.1f} s ago and its memory is still held: not drained by {waits_for}"
        )
        self.context.note("room-undrained", text, "warning", room=room.room)

    def _gone(self, ranks: Sequence[str], restarting: bool) -> str:
        """Returns the last error of one of these ranks that was lost and has not come back soon; "" if there is none.

        The room does not wait for the rank's next incarnation: the router sent the request to the lost process, so the
        next process will not have it. `restarting`: one that the registry names already may be only slow to answer.
        """
        for name in ranks:
            peer = self.context.peers.get(name)
            if peer is None or peer.state is not PeerState.LOST:
                continue
            if restarting and peer.registered not in (0, peer.incarnation):
                continue
            if self.context.now_ns - peer.heard_ns > self.context.timing.suspect_ns:
                return peer.last_error or f"{name} is lost"
        return ""

    def _never_answered(self, name: str) -> bool:
        """Whether a rank on the roster has not answered the first Hello in the time after which a peer is lost."""
        peer = self.context.peers.get(name)
        greeted_ns = peer.greeted_ns if peer is not None and not peer.heard_ns else 0
        return greeted_ns > 0 and self.context.now_ns - greeted_ns > self.context.timing.lost_ns

    def _absent(self, name: str) -> str:
        """Returns the name of a rank that is not ready, followed by the reason in parentheses if it is known."""
        peer = self.context.peers.get(name)
        return f"{name} ({'; '.join(peer.differences)})" if peer is not None and peer.differences else name


def opening_at(room: RecvRoom, transfer: WriterTransfer) -> msg.RoomOpen | msg.RoomKept:
    """Returns the message that opens a room at a prefill rank."""
    if transfer.kept:
        return msg.RoomKept(room.room, room.nonce, transfer.incarnation)
    return msgspec.structs.replace(room.opening, to=transfer.incarnation)
