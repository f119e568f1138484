"""Records, counters and events of an observed rank, from the events of hooks in SGLang's threads.

The tracker follows SGLang's own rules of a room's state: the highest wins, Failed is final, and only an opening state
creates a room. The cause of a failure is the first reason that SGLang recorded, not the last. Times are monotonic ns; a
`room` is SGLang's bootstrap room; an `endpoint` is `address:port` of the control socket of the rank at the other end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvctl_agent.contract.states import RoomState
from kvctl_agent.integrations.observe.tracker import EventTracker, put_bounded
from kvctl_agent.integrations.sglang.observe.failure_codes import code_of
from kvctl_agent.integrations.sglang.observe.manager_state import RankShape
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord

_STATES = {int(state): state for state in RoomState}
_OPENING = (RoomState.BOOTSTRAPPING, RoomState.WAITING_FOR_INPUT)
_MOST_PEERS = 4096
IN_PLACE, STAGED = "in-place", "staged"


class Writer(NamedTuple):
    """A prefill rank of a room.

    Attributes:
        rank: its number over tp, pp and cp, which its messages have.
        sends: whether it sends pages, or only counts as an answer.
    """

    rank: int
    endpoint: str
    name: str
    server: str
    sends: bool


class SentPart(NamedTuple):
    """Prefill: a chunk that a worker has written to one decode rank.

    Attributes:
        gated: whether it had waited for the decode rank's ring.
        passed_ns: start of the call that sends it: what it waited for is there.
        posted_ns: None: the engine writes synchronously.
    """

    room: int
    first_page: int
    pages: int
    endpoint: str
    decode_tp_size: int
    path: str
    dequeued_ns: int
    gated: bool
    passed_ns: int
    posted_ns: int | None


class Wait(NamedTuple):
    """Prefill: what a chunk waits for; `round` and `end` as for `EventQueue.wait`."""

    since_ns: int
    pages: int
    round: int
    end: int


@dataclass(slots=True)
class Peer:
    """A prefill rank that a decode rank has looked up.

    Attributes:
        answered_ns: last answer of its server to a health request, or time of the look-up.
        lost_ns: time at which SGLang gave its server up; 0 if it has not.
    """

    name: str
    server: str
    answered_ns: int
    lost_ns: int = 0


class Region(NamedTuple):
    """A region of the ring and the chunk that it was granted to."""

    room: int
    chunk: int
    pages: int
    granted_ns: int


@dataclass(slots=True)
class Room:
    """A room that SGLang has not cleared."""

    record: RoomRecord
    writers: tuple[Writer, ...] = ()
    staged: bool = False
    done: set[int] = field(default_factory=set)  # ranks of the writers
    ready: dict[int, int] = field(default_factory=dict)  # prefill: time by first page of the chunk
    ended_ns: int = 0
    landed: dict[int, set[int]] = field(default_factory=dict)  # decode, staged: ranks of the writers, by chunk

    @property
    def senders(self) -> list[Writer]:
        return [writer for writer in self.writers if writer.sends]

    def owing(self, chunk: int) -> list[Writer]:
        """Decode, staged: returns the writers whose share of a chunk has not arrived."""
        landed = self.landed.get(chunk, ())
        return [writer for writer in self.senders if writer.rank not in landed]


class Tracker(EventTracker):
    """Tracker of one rank.

    Args:
        waits: prefill: chunks that wait for a ring, by room, chunk and endpoint.

    Attributes:
        rooms: rooms that SGLang has not cleared, by number.
        peers: decode: prefill ranks by endpoint.
        regions: decode: live regions of the ring by serial.
        refused_largest_bytes: size of the largest chunk that exceeded the ring; 0: none did.
        ring_high_water_bytes: largest number of bytes granted at once, also of regions granted ahead.
    """

    def __init__(
        self,
        name: str,
        shape: RankShape,
        telemetry: Telemetry,
        waits: dict[tuple[int, int, str], Wait],
        directory: Path,
    ) -> None:
        super().__init__(name, telemetry, directory)
        self.shape = shape
        self.waits = waits
        self.rooms: dict[int, Room] = {}
        self.peers: dict[str, Peer] = {}
        self.regions: dict[int, Region] = {}
        self.refused_largest_bytes = self.ring_high_water_bytes = 0

    # ---- states ------------------------------------------------------------------------------------------------

    def status_changed(self, at_ns: int, number: int, status: int) -> None:
        """SGLang sets the status of a room to this KVPoll; what it makes of it depends on the room's state."""
        state, room = _STATES[status], self._room(number)
        if room is None:
            if state in _OPENING:
                self._open(number, at_ns, state)
            return
        before = room.record.state_now
        if before is RoomState.FAILED or (state is not RoomState.FAILED and state <= before):
            return
        if state is RoomState.FAILED:
            self._fail(room, at_ns, "SGLang gave no reason", None)
        room.record.state(state, at_ns)
        if state is RoomState.SUCCESS:
            room.record.event("sent" if self.shape.role == "prefill" else "success", at_ns)
        if state.finished:
            room.ended_ns = at_ns

    def _room(self, number: int) -> Room | None:
        return self.rooms.get(operator.index(number))  # it may be a scalar of numpy or torch

    def _open(self, number: int, at_ns: int, state: RoomState) -> Room:
        number = operator.index(number)
        self.rooms[number] = room = Room(self.open_record(number, at_ns, state))
        return room

    def failed(self, at_ns: int, number: int, reason: Any, prefill_rank: int | None = None) -> None:
        """A reason was recorded; `prefill_rank` reported it, counted over tp, pp and cp, or None: this rank did."""
        room = self._room(number)
        if room is not None and room.record.state_now is not RoomState.SUCCESS:
            self._fail(room, at_ns, reason, prefill_rank)

    def _fail(self, room: Room, at_ns: int, reason: Any, prefill_rank: int | None) -> None:
        """Stores a cause of failure unless there is one."""
        if room.record.failure is None:
            rank = next((writer.name for writer in room.writers if writer.rank == prefill_rank), None)
            self.record_failure(room.record, at_ns, code_of(str(reason)), str(reason), rank)

    def cleared(self, at_ns: int, number: int) -> None:
        """The scheduler has given the room up, after its end."""
        room = self.rooms.pop(operator.index(number), None)
        if room is None:
            return
        record = room.record
        if not record.state_now.finished:
            self._fail(room, at_ns, f"Aborted by SGLang in {record.state_now.label}", None)
            record.state(RoomState.FAILED, at_ns)
        record.event("done", at_ns)
        self.telemetry.finish(record, room.ended_ns or at_ns)

    # ---- prefill -----------------------------------------------------------------------------------------------

    def begun(self, at_ns: int, number: int, pages: int) -> None:
        """The scheduler knows how many pages it will send."""
        if (room := self._room(number)) is not None:
            room.record.pages = pages
            room.record.event("begin", at_ns, detail=f"{pages} pages")

    def accepted(self, at_ns: int, number: int, endpoints: Sequence[str]) -> None:
        """Every decode rank of the room has announced its pages; `endpoints` are those that receive some."""
        # Decode ranks may open it before the engine of this rank begins it.
        room = self._room(number) or self._open(number, at_ns, RoomState.BOOTSTRAPPING)
        names = list(map(self.name_of, endpoints))
        room.record.expect(names)
        for name in names:
            room.record.event("accept", at_ns, peer=name)

    def chunk_ready(self, at_ns: int, number: int, first_page: int, last: bool) -> None:
        """The scheduler handed a chunk over to a transfer worker."""
        if (room := self._room(number)) is None:
            return
        if room.record.first_ready_at is None:
            room.record.first_ready_at = at_ns
        room.ready[first_page] = at_ns
        if last:
            room.record.forward_done_at = at_ns
            room.record.event("finish", at_ns)

    def parked(self, _: int, number: int) -> None:
        """A chunk of the room begins or ends to wait for a ring; one of a room that has ended waits no more."""
        waits = [key for key in tuple(self.waits) if key[0] == number]
        if (room := self._room(number)) is not None and not room.record.state_now.finished:
            room.record.parked = len(waits)
        else:  # a transfer worker was still at it
            for key in waits:
                self.waits.pop(key, None)

    def part_sent(self, at_ns: int, part: SentPart) -> None:
        """A worker has written a chunk to one decode rank."""
        if (room := self._room(part.room)) is None:
            return
        ready_ns, chunk, moments = room.ready.get(part.first_page), 0, {}
        if ready_ns is not None:
            moments["ready"] = ready_ns
            chunk = sum(first_page < part.first_page for first_page in room.ready) if len(room.ready) > 1 else 0
        moments["gate" if part.gated else "queue"] = part.passed_ns if part.gated else part.dequeued_ns
        if part.posted_ns is not None:
            moments["post"] = part.posted_ns
        moments["wire"] = at_ns
        nbytes = self.shape.bytes_to(part.pages, part.decode_tp_size)
        done_ns = room.record.forward_done_at or at_ns
        key = self.shape.rank, chunk, self.shape.layers
        self.telemetry.part(room.record, key, self.name_of(part.endpoint), part.path, nbytes, moments, done_ns)

    # ---- decode ------------------------------------------------------------------------------------------------

    def writers_known(self, at_ns: int, number: int, writers: tuple[Writer, ...], staged: bool) -> None:
        """The receiver has looked up the prefill ranks of its room."""
        for writer in writers:
            known = self.peers.get(writer.endpoint)
            if known is None:
                self.note("peer", f"prefill rank at {writer.endpoint}", peer=writer.name, at_ns=at_ns)
            elif known.lost_ns:
                self.note("peer", "found again", peer=writer.name, at_ns=at_ns)
            if known is None or known.lost_ns:
                put_bounded(self.peers, writer.endpoint, Peer(writer.name, writer.server, at_ns), _MOST_PEERS)
                self._replaced(writer)
        if (room := self._room(number)) is not None:
            room.writers, room.staged = writers, staged
            room.record.expect([writer.name for writer in writers])

    def _replaced(self, writer: Writer) -> None:
        """Forgets the earlier process of a rank that has started again, on another port."""
        for endpoint in [each for each, peer in self.peers.items() if peer.name == writer.name and peer.lost_ns]:
            if endpoint != writer.endpoint:
                del self.peers[endpoint]

    def pages_announced(self, at_ns: int, number: int, pages: int, prefix_tokens: int) -> None:
        """The receiver has sent its page indices to all prefill ranks of the room."""
        room = self._room(number)
        if room is not None:
            room.record.pages = pages
            prefix = f", after a prefix of {prefix_tokens} tokens" if prefix_tokens else ""
            room.record.event("open", at_ns, detail=f"{pages} pages to {len(room.writers)} prefill ranks{prefix}")

    def writer_done(self, at_ns: int, number: int, prefill_rank: int) -> None:
        """A prefill rank has reported that everything it owes is written."""
        room = self._room(number)
        if room is None or prefill_rank in room.done:
            return
        room.done.add(prefill_rank)
        writer = next((each for each in room.senders if each.rank == prefill_rank), None)
        if room.staged or writer is None or not room.record.pages:
            room.record.event("aux", at_ns, prefill_rank)
            return
        share = room.record.pages * self.shape.page_bytes // len(room.senders)
        key = prefill_rank, 0, self.shape.layers
        self.telemetry.part(room.record, key, writer.name, IN_PLACE, share, {"arrive": at_ns})

    def chunk_landed(self, at_ns: int, number: int, chunk: int, pages: int, prefill_rank: int | None) -> None:
        """Staged: a prefill rank has written its share of a chunk into the ring."""
        if (room := self._room(number)) is None:
            return
        rank = prefill_rank or 0
        peer = next((writer.name for writer in room.writers if writer.rank == rank), None)
        nbytes = pages * self.shape.page_bytes // max(1, len(room.senders))
        key = rank, chunk, self.shape.layers
        self.telemetry.part(room.record, key, peer, STAGED, nbytes, {"arrive": at_ns})
        room.landed.setdefault(chunk, set()).add(rank)

    def region_granted(self, at_ns: int, number: int, chunk: int, pages: int, serial: int) -> None:
        """Staged: a chunk has a region of the ring."""
        room = self._room(number)
        if room is None or serial in self.regions:
            return  # every prefill rank asks for the same region
        self.regions[serial] = Region(number, chunk, pages, at_ns)
        again = "again, though all of it had arrived" if not room.owing(chunk) else ""
        room.record.event("grant", at_ns, None, chunk, self.shape.layers, detail=again)
        if again:
            text = f"chunk {chunk} was granted a region {again}: a request of another rank came late"
            self.note("ring", text, "warning", number, at_ns=at_ns)
        granted = sum(region.pages for region in self.regions.values()) * self.shape.page_bytes
        self.ring_high_water_bytes = max(self.ring_high_water_bytes, granted)
        self.telemetry.metrics.add("kvctl_ring_grants_total", 1)

    def region_refused(self, at_ns: int, number: int, chunk: int, pages: int) -> None:
        """Staged: a chunk is larger than the whole ring."""
        nbytes = pages * self.shape.page_bytes
        self.refused_largest_bytes = max(self.refused_largest_bytes, nbytes)
        self.telemetry.metrics.add("kvctl_ring_refusals_total", 1)
        text = f"chunk {chunk} of {nbytes} bytes is larger than the ring"
        self.note("ring", text, "warning", number, at_ns=at_ns)

    def region_freed(self, at_ns: int, serial: int) -> None:
        region = self.regions.pop(serial, None)
        room = None if region is None else self._room(region.room)
        if region is None or room is None:
            return
        room.record.event("scatter", at_ns, None, region.chunk, self.shape.layers)
        if room.ended_ns:  # SGLang reports success before the last chunk is in its pages
            room.ended_ns = max(room.ended_ns, at_ns)

    def server_answered(self, at_ns: int, server: str) -> None:
        """The bootstrap server of a prefill instance answered a health request."""
        for peer in self.peers.values():
            if peer.server == server:
                peer.answered_ns = at_ns

    def server_lost(self, at_ns: int, server: str) -> None:
        """SGLang has given up a prefill instance whose bootstrap server does not answer."""
        for peer in self.peers.values():
            if peer.server == server and not peer.lost_ns:
                peer.lost_ns = at_ns
                self.telemetry.metrics.add("kvctl_peer_lost_total", 1)
                text = f"lost: the bootstrap server {server} does not answer"
                self.note("peer", text, "error", peer=peer.name, at_ns=at_ns)
