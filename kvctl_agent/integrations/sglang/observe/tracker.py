"""Room records, metrics and events of an observed rank, from the events that the hooks recorded.

The tracker follows SGLang's own rules of a room's state: the highest wins, Failed is final, and only an opening state
creates a room. The cause of a failure is the first reason that SGLang recorded, not the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import encodable
from kvctl_agent.integrations.sglang.observe import events as ev
from kvctl_agent.integrations.sglang.observe.failure_codes import code_of
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord

_STATES = {int(state): state for state in RoomState}
_OPENING = (RoomState.BOOTSTRAPPING, RoomState.WAITING_FOR_INPUT)
_LONGEST_TEXT = 2000
_MOST_PEERS = 4096
IN_PLACE, STAGED = "in-place", "staged"


@dataclass(frozen=True, slots=True)
class RankShape:
    """Sizes of an observed rank.

    Attributes:
        page_bytes: KV bytes of one page, all layers and heads of this rank.
        layers: layers [lo, hi) of this rank.
        rank: number of a prefill rank over tp, pp and cp, which its messages have.
        heads: KV heads of this rank; total_heads: of the model. 0: unknown, or one latent per token (MLA).
    """

    role: Role
    page_bytes: int
    layers: tuple[int, int]
    tp_size: int
    rank: int = 0
    heads: int = 0
    total_heads: int = 0

    def bytes_to(self, pages: int, decode_tp_size: int) -> int:
        """Returns the KV bytes of `pages` that a prefill rank sends to a decode rank of this TP size."""
        nbytes = pages * self.page_bytes
        if self.heads and decode_tp_size > self.tp_size:
            nbytes = nbytes * max(1, self.total_heads // decode_tp_size) // self.heads
        return nbytes


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
    writers: tuple[ev.Writer, ...] = ()
    staged: bool = False
    done: set[int] = field(default_factory=set)  # ranks of the writers
    ready: dict[int, int] = field(default_factory=dict)  # prefill: time by first page of the chunk
    ended_ns: int = 0
    landed: dict[int, set[int]] = field(default_factory=dict)  # decode, staged: ranks of the writers, by chunk

    @property
    def senders(self) -> list[ev.Writer]:
        return [writer for writer in self.writers if writer.sends]

    def owing(self, chunk: int) -> list[ev.Writer]:
        """Decode, staged: returns the writers whose share of a chunk has not arrived."""
        landed = self.landed.get(chunk, ())
        return [writer for writer in self.senders if writer.rank not in landed]


class Tracker:
    """Applies events to the telemetry of one observed rank; called by one thread at a time, read by the admin thread.

    Attributes:
        rooms: rooms that SGLang has not cleared, by number.
        peers: decode: prefill ranks by endpoint.
        regions: decode: live regions of the ring by serial.
        refused_largest_bytes: size of the largest chunk that exceeded the ring; 0: none did.
        ring_high_water_bytes: largest number of bytes granted at once, also of regions granted ahead.
    """

    def __init__(self, name: str, shape: RankShape, telemetry: Telemetry) -> None:
        self.name = name
        self.shape = shape
        self.telemetry = telemetry
        self.rooms: dict[int, Room] = {}
        self.peers: dict[str, Peer] = {}
        self.regions: dict[int, Region] = {}
        self.refused_largest_bytes = self.ring_high_water_bytes = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.StatusChanged: self._status,
            ev.Failed: self._failed,
            ev.Cleared: self._cleared,
            ev.Begun: self._begun,
            ev.Accepted: self._accepted,
            ev.ChunkReady: self._chunk_ready,
            ev.PartSent: self._part_sent,
            ev.WritersKnown: self._writers_known,
            ev.PagesAnnounced: self._pages_announced,
            ev.WriterDone: self._writer_done,
            ev.ChunkLanded: self._chunk_landed,
            ev.RegionGranted: self._region_granted,
            ev.RegionRefused: self._region_refused,
            ev.RegionFreed: self._region_freed,
            ev.ServerAnswered: self._server_answered,
            ev.ServerLost: self._server_lost,
        }

    def apply(self, event: ev.Event) -> None:
        self._handlers[type(event)](event)

    def forget_except(self, live: set[int], at_ns: int) -> None:
        """Ends the rooms that SGLang no longer has: events were dropped that would have said so."""
        for room in self.rooms.keys() - live:
            self._cleared(ev.Cleared(at_ns, room))

    # ---- states ------------------------------------------------------------------------------------------------

    def _status(self, event: ev.StatusChanged) -> None:
        state, room = _STATES[event.status], self.rooms.get(event.room)
        if room is None:
            if state in _OPENING:
                self._open(event.room, event.at_ns, state)
            return
        before = room.record.state_now
        if before is RoomState.FAILED or (state is not RoomState.FAILED and state <= before):
            return
        if state is RoomState.FAILED:
            self._fail(room, event.at_ns, "SGLang gave no reason", None)
        room.record.state(state, event.at_ns)
        if state is RoomState.SUCCESS:
            room.record.event("sent" if self.shape.role == "prefill" else "success", event.at_ns)
        if state.finished:
            room.ended_ns = event.at_ns

    def _open(self, number: int, at_ns: int, state: RoomState) -> None:
        record = self.telemetry.open(number, 0)
        record.opened_at = at_ns
        record.state(state, at_ns)
        self.rooms[number] = Room(record)

    def _failed(self, event: ev.Failed) -> None:
        room = self.rooms.get(event.room)
        if room is not None and room.record.state_now is not RoomState.SUCCESS:
            self._fail(room, event.at_ns, event.reason, event.prefill_rank)

    def _fail(self, room: Room, at_ns: int, reason: str, prefill_rank: int | None) -> None:
        """Stores a cause of failure unless there is one; `prefill_rank` reported it, or None: this rank found it."""
        if room.record.failure is not None:
            return
        text = encodable(reason)[:_LONGEST_TEXT]
        code = code_of(text)
        rank = next((writer.name for writer in room.writers if writer.rank == prefill_rank), self.name)
        room.record.fail(
            {"rank": rank, "code": code, "at_ns": self.telemetry.clock.wall_ns(at_ns), "text": text}, at_ns
        )
        self.telemetry.metrics.add("kvctl_room_failures_total", 1, code)
        severity = "info" if code == "ABORTED" else "warning"
        self.telemetry.recorder.record("room", f"failed: {code}: {text}", severity, room.record.room, at_ns=at_ns)  # type: ignore[arg-type]

    def _cleared(self, event: ev.Cleared) -> None:
        room = self.rooms.pop(event.room, None)
        if room is None:
            return
        record = room.record
        if not record.state_now.finished:
            self._fail(room, event.at_ns, f"Aborted by SGLang in {record.state_now.label}", None)
            record.state(RoomState.FAILED, event.at_ns)
        record.event("done", event.at_ns)
        self.telemetry.finish(record, room.ended_ns or event.at_ns)

    # ---- prefill -----------------------------------------------------------------------------------------------

    def _begun(self, event: ev.Begun) -> None:
        if (room := self.rooms.get(event.room)) is not None:
            room.record.pages = event.pages
            room.record.event("begin", event.at_ns, detail=f"{event.pages} pages")

    def _accepted(self, event: ev.Accepted) -> None:
        if event.room not in self.rooms:  # decode ranks opened it before the engine of this rank began it
            self._open(event.room, event.at_ns, RoomState.BOOTSTRAPPING)
        record = self.rooms[event.room].record
        record.peers = list(dict.fromkeys(event.endpoints))
        for endpoint in record.peers:
            record.event("accept", event.at_ns, peer=endpoint)

    def _chunk_ready(self, event: ev.ChunkReady) -> None:
        room = self.rooms.get(event.room)
        if room is None:
            return
        if room.record.first_ready_at is None:
            room.record.first_ready_at = event.at_ns
        room.ready[event.first_page] = event.at_ns
        if event.last:
            room.record.forward_done_at = event.at_ns
            room.record.event("finish", event.at_ns)

    def _part_sent(self, event: ev.PartSent) -> None:
        room = self.rooms.get(event.room)
        if room is None:
            return
        stages = {
            "ready": room.ready.get(event.first_page),
            "gate": event.passed_ns if event.gated else None,
            "queue": None if event.gated else event.dequeued_ns,
            "post": event.posted_ns,
            "wire": event.at_ns,
        }
        known = {stage: at_ns for stage, at_ns in stages.items() if at_ns is not None}
        chunk = sorted(room.ready).index(event.first_page) if event.first_page in room.ready else 0
        nbytes = self.shape.bytes_to(event.pages, event.decode_tp_size)
        done_ns = room.record.forward_done_at or event.at_ns
        key = self.shape.rank, chunk, self.shape.layers
        self.telemetry.part(room.record, key, event.endpoint, event.path, nbytes, known, done_ns)

    # ---- decode ------------------------------------------------------------------------------------------------

    def _writers_known(self, event: ev.WritersKnown) -> None:
        recorder = self.telemetry.recorder
        for writer in event.writers:
            known = self.peers.get(writer.endpoint)
            if known is None:
                recorder.record("peer", f"prefill rank at {writer.endpoint}", peer=writer.name, at_ns=event.at_ns)
                self._bound_peers()
            elif known.lost_ns:
                recorder.record("peer", "found again", peer=writer.name, at_ns=event.at_ns)
            if known is None or known.lost_ns:
                self.peers[writer.endpoint] = Peer(writer.name, writer.server, event.at_ns)
                self._replaced(writer)
        if (room := self.rooms.get(event.room)) is not None:
            room.writers, room.staged = event.writers, event.staged
            room.record.peers = [writer.name for writer in event.writers]

    def _replaced(self, writer: ev.Writer) -> None:
        """Forgets the earlier process of a rank that has started again, on another port."""
        for endpoint in [each for each, peer in self.peers.items() if peer.name == writer.name and peer.lost_ns]:
            if endpoint != writer.endpoint:
                del self.peers[endpoint]

    def _bound_peers(self) -> None:
        while len(self.peers) >= _MOST_PEERS:
            del self.peers[next(iter(self.peers))]

    def _pages_announced(self, event: ev.PagesAnnounced) -> None:
        room = self.rooms.get(event.room)
        if room is not None:
            room.record.pages = event.pages
            prefix = f", after a prefix of {event.prefix_tokens} tokens" if event.prefix_tokens else ""
            detail = f"{event.pages} pages to {len(room.writers)} prefill ranks{prefix}"
            room.record.event("open", event.at_ns, detail=detail)

    def _writer_done(self, event: ev.WriterDone) -> None:
        room = self.rooms.get(event.room)
        if room is None or event.prefill_rank in room.done:
            return
        room.done.add(event.prefill_rank)
        writer = next((each for each in room.senders if each.rank == event.prefill_rank), None)
        if room.staged or writer is None or not room.record.pages:
            room.record.event("aux", event.at_ns, event.prefill_rank)
            return
        share = room.record.pages * self.shape.page_bytes // len(room.senders)
        key = event.prefill_rank, 0, self.shape.layers
        self.telemetry.part(room.record, key, writer.name, IN_PLACE, share, {"arrive": event.at_ns})

    def _chunk_landed(self, event: ev.ChunkLanded) -> None:
        room = self.rooms.get(event.room)
        if room is None:
            return
        rank = event.prefill_rank or 0
        peer = next((writer.name for writer in room.writers if writer.rank == rank), None)
        nbytes = event.pages * self.shape.page_bytes // max(1, len(room.senders))
        key = rank, event.chunk, self.shape.layers
        self.telemetry.part(room.record, key, peer, STAGED, nbytes, {"arrive": event.at_ns})  # type: ignore[arg-type]
        room.landed.setdefault(event.chunk, set()).add(rank)

    def _region_granted(self, event: ev.RegionGranted) -> None:
        room = self.rooms.get(event.room)
        if room is None or event.serial in self.regions:
            return  # every prefill rank asks for the same region
        self.regions[event.serial] = Region(event.room, event.chunk, event.pages, event.at_ns)
        again = "again, though all of it had arrived" if not room.owing(event.chunk) else ""
        room.record.event("grant", event.at_ns, None, event.chunk, self.shape.layers, detail=again)
        if again:
            text = f"chunk {event.chunk} was granted a region {again}: a request of another rank came late"
            self.telemetry.recorder.record("ring", text, "warning", event.room, at_ns=event.at_ns)
        granted = sum(region.pages for region in self.regions.values()) * self.shape.page_bytes
        self.ring_high_water_bytes = max(self.ring_high_water_bytes, granted)
        self.telemetry.metrics.add("kvctl_ring_grants_total", 1)

    def _region_refused(self, event: ev.RegionRefused) -> None:
        nbytes = event.pages * self.shape.page_bytes
        self.refused_largest_bytes = max(self.refused_largest_bytes, nbytes)
        self.telemetry.metrics.add("kvctl_ring_refusals_total", 1)
        text = f"chunk {event.chunk} of {nbytes} bytes is larger than the ring"
        self.telemetry.recorder.record("ring", text, "warning", event.room, at_ns=event.at_ns)

    def _region_freed(self, event: ev.RegionFreed) -> None:
        region = self.regions.pop(event.serial, None)
        room = None if region is None else self.rooms.get(region.room)
        if region is None or room is None:
            return
        room.record.event("scatter", event.at_ns, None, region.chunk, self.shape.layers)
        if room.ended_ns:  # SGLang reports success before the last chunk is in its pages
            room.ended_ns = max(room.ended_ns, event.at_ns)

    def _server_answered(self, event: ev.ServerAnswered) -> None:
        for peer in self.peers.values():
            if peer.server == event.server:
                peer.answered_ns = event.at_ns

    def _server_lost(self, event: ev.ServerLost) -> None:
        for peer in self.peers.values():
            if peer.server == event.server and not peer.lost_ns:
                peer.lost_ns = event.at_ns
                self.telemetry.metrics.add("kvctl_peer_lost_total", 1)
                text = f"lost: the bootstrap server {event.server} does not answer"
                self.telemetry.recorder.record("peer", text, "error", peer=peer.name, at_ns=event.at_ns)
