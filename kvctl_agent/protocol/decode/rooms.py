"""Rooms of a decode rank: which one a message is about, and their states from the opening to the tombstone.

Rules it keeps (design: one room, end to end):

- Success when every rank has accepted, all planned cells are in their pages and all final parts are there; never
  by counting.
- A failed room is released and forgotten when all ranks have drained; one that succeeded, when all know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.events import Pages
from kvctl_agent.protocol.machine import MachineContext, Tombstones, failure_of
from kvctl_agent.protocol.messages import RoomOpen
from kvctl_agent.protocol.peer import FormerIncarnation, LocalInfo, Peer, PeerState, Timing
from kvctl_agent.protocol.ring import GrantTable
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey
from kvctl_agent.telemetry.room_records import RoomRecord

Cell = tuple[int, int]  # (writer, chunk)
Final = tuple[PartKind, PartKey]


class PartChecksum(NamedTuple):
    """What a part's writer says of its bytes, and what is to be said of the part once it is found to be true."""

    checksum: int
    moments: dict[str, int]  # stage → when it ended, monotonic ns
    path: str


@dataclass(slots=True, eq=False)
class WriterTransfer:
    """What passes between this room and one prefill rank, whether it owes anything or not.

    It is between the room and one incarnation of that rank: what a later one says is no answer.
    """

    peer: str
    incarnation: int
    accepted: bool = False
    acked: bool = False  # RoomDone has reached it, or it is gone; what a room that succeeded waits for
    drained: bool = False  # nothing of it is in flight, nor will be; what a room that failed waits for


def mask(lo: int, hi: int) -> int:
    """Bits of the layers [lo, hi)."""
    return (1 << hi) - (1 << lo)


@dataclass(slots=True, eq=False)
class RecvRoom:
    """One room under one nonce."""

    opening: RoomOpen
    instance: str
    pages: Pages
    record: RoomRecord
    since_ns: int  # when the wait that a deadline ends began: the state's start, or the last progress
    room: int = field(init=False)
    nonce: int = field(init=False)
    prefix_pages: int = field(init=False)
    state: RoomState = RoomState.BOOTSTRAPPING
    resend_ns: int = 0
    failure: Failure | None = None
    released: bool = False
    overdue: bool = False  # it failed long ago, and what may still be written of it is quarantined
    legs: dict[str, WriterTransfer] = field(default_factory=dict)
    unaccepted: int = 0  # legs
    writers: tuple[str, ...] = ()  # names of the instance's ranks, as they were when it was opened
    shares: dict[int, list[TransferSlice]] = field(default_factory=dict)  # by writer, one for each of its segments
    cells: dict[Cell, Chunk] = field(default_factory=dict)  # narrowed to what the writer owes
    wanted: dict[Cell, int] = field(default_factory=dict)
    # Layers with a live grant, so that no two grants cover the same bytes.
    granted: dict[Cell, int] = field(default_factory=dict)
    landed: dict[Cell, int] = field(default_factory=dict)
    scattered: dict[Cell, int] = field(default_factory=dict)
    missing: int = 0  # cells whose layers are not all scattered
    finals: set[Final] = field(default_factory=set)  # that have not landed
    finals_landed: set[Final] = field(default_factory=set)
    final_parts: dict[Final, tuple[TransferSlice | None, Pages]] = field(
        default_factory=dict
    )  # ours of the final parts
    checks: dict[Final, PartChecksum] = field(
        default_factory=dict
    )  # parts in their pages whose checksum is being taken

    def __post_init__(self) -> None:
        self.room = self.opening.room
        self.nonce = self.opening.nonce
        self.prefix_pages = self.opening.prefix_pages

    def plan(
        self,
        shares: Sequence[TransferSlice],
        cells_of: Callable[[int], Sequence[Chunk]],
        finals: dict[Final, tuple[TransferSlice | None, Pages]],
        writers: dict[str, int],
    ) -> None:
        """Take the plan: from now on coverage is known.

        Args:
            shares: the KV that this rank is owed.
            cells_of: the cells that a writer owes of it.
            finals: the final parts that this rank is owed, and where they go: pages are items of state, or one row.
            writers: names of the instance's ranks, in their order, and the incarnation of each.
        """
        self.writers = tuple(writers)
        self.legs = {name: WriterTransfer(name, incarnation) for name, incarnation in writers.items()}
        self.unaccepted = len(self.legs)
        self.finals = set(finals)
        self.final_parts = finals
        for share in shares:
            known = self.shares.setdefault(share.writer, [])
            known.append(share)
            for cell in cells_of(share.writer):
                at = share.writer, cell.index
                self.cells[at] = cell
                self.wanted[at] = self.wanted.get(at, 0) | mask(share.layer_lo, share.layer_hi)
        self.missing = len(self.wanted)
        self.record.planned = sum(wanted.bit_count() for wanted in self.wanted.values())

    def share_of(self, key: PartKey) -> TransferSlice:
        """The share that a planned part belongs to."""
        return next(share for share in self.shares[key.writer] if share.layer_lo <= key.lo < share.layer_hi)

    def owed_bytes(self, peer: str) -> int:
        """KV bytes that one rank owes this room."""
        return sum(
            share.payload_bytes(cell.count)
            for (writer, _), cell in self.cells.items()
            if self.writers[writer] == peer
            for share in self.shares[writer]
        )

    def owes(self, key: PartKey) -> bool:
        """Whether the plan has such a part: a known cell and layers inside one share."""
        if (key.writer, key.chunk) not in self.cells:
            return False
        return any(share.layer_lo <= key.lo < key.hi <= share.layer_hi for share in self.shares[key.writer])

    def land(self, key: PartKey) -> None:
        """Mark a part as landed, none of which had landed before."""
        cell = (key.writer, key.chunk)
        self.landed[cell] = self.landed.get(cell, 0) | mask(key.lo, key.hi)
        self.record.landed = (self.record.landed or 0) + key.hi - key.lo

    def settle(self, key: PartKey) -> None:
        """Mark a landed part as being in its pages."""
        cell = (key.writer, key.chunk)
        covered = self.scattered.get(cell, 0) | mask(key.lo, key.hi)
        self.scattered[cell] = covered
        self.record.scattered = (self.record.scattered or 0) + key.hi - key.lo
        if covered == self.wanted[cell]:
            self.missing -= 1

    def grantable(self, key: PartKey) -> bool:
        """Whether none of its layers has landed or has a live grant."""
        cell = (key.writer, key.chunk)
        return not (self.landed.get(cell, 0) | self.granted.get(cell, 0)) & mask(key.lo, key.hi)

    def grant(self, key: PartKey) -> None:
        cell = (key.writer, key.chunk)
        self.granted[cell] = self.granted.get(cell, 0) | mask(key.lo, key.hi)

    def ungrant(self, key: PartKey) -> None:
        """Its region is free again: landed and scattered, or given back."""
        self.granted[key.writer, key.chunk] &= ~mask(key.lo, key.hi)

    def land_final(self, final: Final) -> bool:
        """Mark a final part as landed; False where it had landed before."""
        if final not in self.finals:
            return False
        self.finals.remove(final)
        self.finals_landed.add(final)
        return True

    def key_of(self, peer: str) -> RoomKey:
        """Under which one writer's regions are kept."""
        return RoomKey(peer, self.room, self.nonce)

    @property
    def all_landed(self) -> bool:
        """Whether every planned cell has landed."""
        return self.landed == self.wanted

    @property
    def begun(self) -> bool:
        """Whether anything has landed."""
        return bool(self.landed or self.finals_landed)

    @property
    def complete(self) -> bool:
        return self.missing == 0 and not self.finals and not self.checks

    def pages_at(self, key: PartKey) -> Pages:
        """This rank's pages of a planned part."""
        cell = self.cells[key.writer, key.chunk]
        first = cell.first - self.prefix_pages
        return self.pages[first : first + cell.count]

    def gaps(self) -> str:
        """What has not arrived, for the text of a deadline."""
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


class DecodeState:
    """Everything that a decode machine remembers between two events.

    Attributes:
        peers: by name; see `instances`.
        rosters: by instance, the names of its ranks; see `instances`.
        absent_ranks: by instance that is not complete, what its registry says; see `instances`.
        clashes: instances of which a rank has a name that another's has, in words; see `instances`.
        rooms: by number; `admission` adds, `RecvRooms` removes.
        tombstones: ended rooms, and whether each had succeeded; see `RecvRooms`.
        book: who holds which region of the ring; see `grants`.
    """

    def __init__(self, local: LocalInfo, timing: Timing) -> None:
        self.peers: dict[str, Peer] = {}
        self.rosters: dict[str, tuple[str, ...]] = {}
        self.absent_ranks: dict[str, str] = {}
        self.clashes: dict[str, str] = {}
        self.rooms: dict[int, RecvRoom] = {}
        self.tombstones: Tombstones[bool] = Tombstones(timing.bootstrap_ns)
        self.book = GrantTable(local.ring_bytes)


@dataclass(eq=False)
class RecvRooms:
    """Moves rooms from state to state, and tells the prefill ranks until each has answered."""

    context: MachineContext
    state: DecodeState

    def find(self, peer: Peer, number: int, nonce: int) -> tuple[RecvRoom, WriterTransfer] | None:
        """The room that a message is about; where there is none, that is counted."""
        room = self.state.rooms.get(number)
        if room is None or room.nonce != nonce:
            known = self.state.tombstones.find(RoomKey("", number, nonce)) is not None
            self.context.drop("tombstone" if known else "unknown-room")
            return None
        leg = room.legs.get(peer.name)
        if leg is None or leg.incarnation != peer.incarnation:
            self.context.drop("unexpected")
            return None
        return room, leg

    def answers(self, leg: WriterTransfer) -> bool:
        """Whether the very process that a room was opened at may be spoken to."""
        peer = self.context.peers.get(leg.peer)
        return peer is not None and peer.usable and peer.incarnation == leg.incarnation

    def answer_unknown(self, peer: Peer, number: int, nonce: int) -> None:
        """A writer speaks of a room that is over or was never here: it must not wait for ever."""
        if self.state.tombstones.find(RoomKey("", number, nonce)):
            self.context.send(peer.name, msg.RoomDone(number, nonce))
            return
        text = f"{self.context.local.name} has no room {number} with this nonce"
        failure = self.context.failure("KV_ROOM_UNKNOWN", text)
        self.context.send(peer.name, msg.RoomFailed(number, nonce, **failure))

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_room_accepted(self, peer: Peer, message: msg.RoomAccepted) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is None or found[1].accepted:
            return
        room, leg = found
        leg.accepted = True
        room.unaccepted -= 1
        if room.unaccepted == 0 and room.state is RoomState.BOOTSTRAPPING:
            self.enter(room, RoomState.TRANSFERRING if room.begun else RoomState.WAITING_FOR_INPUT)
            self.complete(room)

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-failed"))
        if found := self.find(peer, message.room, message.nonce):
            self.fail(found[0], failure_of(message))

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is not None and found[0].state is RoomState.SUCCESS and message.of == "room-done":
            found[1].acked = True
            self.settle(found[0])

    # ---- states -----------------------------------------------------------------------------------------------

    def enter(self, room: RecvRoom, state: RoomState) -> None:
        now_ns = self.context.now_ns
        room.state = state
        room.since_ns = now_ns
        room.record.state(state, now_ns)
        if state.finished:
            room.record.finish(now_ns)
        self.context.act(ev.StateChanged(room.room, state, room.failure))

    def complete(self, room: RecvRoom) -> None:
        """Let a room succeed to which nothing is missing any more."""
        if not room.complete or room.state.finished:
            return
        if room.state is RoomState.BOOTSTRAPPING:
            return  # a rank that has not accepted would never learn how the room ended
        room.record.event("success", self.context.now_ns)
        self.enter(room, RoomState.SUCCESS)
        room.released = True
        self.context.act(ev.Released(room.room))
        self._say_end(room)

    def fail(self, room: RecvRoom, failure: Failure) -> None:
        """End a room for this cause, unless it has ended."""
        if room.state.finished:
            return
        room.failure = failure
        room.record.fail(failure, self.context.now_ns)
        self.context.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        self.context.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        self.enter(room, RoomState.FAILED)
        self._say_end(room)
        self.settle(room)

    def settle(self, room: RecvRoom) -> None:
        """Forget a room that has ended everywhere; the pages of a failed one are released only then."""
        if room.failure is not None:
            if not all(leg.drained for leg in room.legs.values()):
                return
            if any(self.state.book.of_room(room.key_of(name)) for name in room.legs):
                return  # a scatter is still out
            room.released = True
            self.context.act(ev.Released(room.room))
        elif room.state is not RoomState.SUCCESS or not all(leg.acked for leg in room.legs.values()):
            return
        self.forget(room)

    def forget(self, room: RecvRoom) -> None:
        """Leave a tombstone in the place of a room."""
        del self.state.rooms[room.room]
        key = RoomKey("", room.room, room.nonce)
        self.state.tombstones.bury(key, room.failure is None, self.context.now_ns)
        self.context.telemetry.finish(room.record, self.context.now_ns)

    # ---- what the prefill ranks are told ----------------------------------------------------------------------

    def _say_end(self, room: RecvRoom) -> None:
        """Tell every prefill rank how the room ended; said again until each has answered."""
        room.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        for leg in room.legs.values():
            self.remind(room, leg)

    def remind(self, room: RecvRoom, leg: WriterTransfer) -> bool:
        """Say what this rank has not answered yet; False when there is nothing."""
        if room.failure is not None:
            if leg.drained:
                return False
            message: msg.Message = msg.RoomAbort(room.room, room.nonce, **room.failure)
        elif room.state is RoomState.SUCCESS:
            if leg.acked:
                return False
            message = msg.RoomDone(room.room, room.nonce)
        else:
            if leg.accepted:
                return False
            message = msgspec.structs.replace(room.opening, to=leg.incarnation)
        if self.answers(leg):
            self.context.send(leg.peer, message)
            return True
        if room.failure is not None and (former := self._former(leg)) is not None:
            self.context.send(leg.peer, message, former.route)
        return False

    def _former(self, leg: WriterTransfer) -> FormerIncarnation | None:
        """The process that a room was opened at, where another one has taken its place since."""
        peer = self.context.peers.get(leg.peer)
        return peer.former.get(leg.incarnation) if peer is not None else None

    # ---- time -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Deadlines and resends."""
        now_ns = self.context.now_ns
        for room in list(self.state.rooms.values()):
            if not room.state.finished:
                self._check_deadline(room)
            elif room.failure is not None:
                self._check_drained(room)
            if now_ns >= room.resend_ns > 0:
                self._resend(room)

    def _resend(self, room: RecvRoom) -> None:
        kind = "room-end" if room.state.finished else "room-open"
        reminded = sum(self.remind(room, leg) for leg in room.legs.values())
        if reminded:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", reminded, kind)
        # A process that was replaced, or is lost, may never answer, and is asked seldom.
        timing = self.context.timing
        room.resend_ns = self.context.now_ns + (timing.resend_ns if reminded else timing.lost_ns)

    def _check_deadline(self, room: RecvRoom) -> None:
        timing, failure = self.context.timing, self.context.failure
        waited = self.context.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING:
            roster = self.state.rosters.get(room.instance, ())
            if not room.legs and waited > timing.suspect_ns and (gone := self._gone(roster)):
                self.fail(room, failure("KV_PEER_LOST", f"{stuck}: {gone}"))
            elif waited > timing.bootstrap_ns:
                silent = [leg.peer for leg in room.legs.values() if not leg.accepted]
                silent = silent or [self._absent(name) for name in roster if not self.context.is_ready(name)]
                why = f"not accepted by {', '.join(silent)}"
                if not silent:
                    missing = self.state.absent_ranks.get(room.instance, "no answer from its registry")
                    why = f"the prefill instance at {room.instance}: {missing}"
                self.fail(room, failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {why}"))
        elif waited > timing.waiting_ns:
            code = "KV_ROOM_STUCK_SCATTER" if room.missing and room.all_landed else "KV_ROOM_STUCK_TRANSFER"
            if room.state is RoomState.WAITING_FOR_INPUT:
                code = "KV_ROOM_STUCK_WAITING"
            self.fail(room, failure(code, f"{stuck}: {room.gaps()}"))

    def _check_drained(self, room: RecvRoom) -> None:
        """A rank that is heard well and yet never drains keeps pages and ring from us: said once, counted from then."""
        waited = self.context.now_ns - room.since_ns
        if room.overdue or waited <= self.context.timing.waiting_ns:
            return
        room.overdue = True
        undrained = [name for name, leg in room.legs.items() if not leg.drained]
        for name in undrained:
            self.state.book.quarantine_room(room.key_of(name))
        who = ", ".join(undrained) or f"a scatter here ({room.gaps()})"
        text = f"room {room.room} failed {waited / 1e9:.1f} s ago and its memory is still held: not drained by {who}"
        self.context.note("room-undrained", text, "warning", room=room.room)

    def _gone(self, roster: tuple[str, ...]) -> str:
        """A rank of a room's instance that was lost and has not come back soon; "" where there is none.

        Nobody waits for its next life: that will not have heard of the room, which its router sent to this one.
        """
        for name in roster:
            peer = self.context.peers.get(name)
            if peer is None or peer.state is not PeerState.LOST:
                continue
            if self.context.now_ns - peer.heard_ns > self.context.timing.suspect_ns:
                return peer.last_error or f"{name} is lost"
        return ""

    def _absent(self, name: str) -> str:
        """A rank that is not ready, and why where that is known."""
        peer = self.context.peers.get(name)
        return f"{name} ({'; '.join(peer.differences)})" if peer is not None and peer.differences else name
