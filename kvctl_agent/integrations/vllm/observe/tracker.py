"""Records, counters and events of an observed worker, from the events of hooks in vLLM's threads.

A request that is handed over is a room on both ends. vLLM's connectors know no states of it; the tracker's are:

| state | prefill | decode |
| --- | --- | --- |
| Bootstrapping | no decode worker has asked for it | it waits for blocks or the handshake |
| WaitingForInput | a decode worker has renewed its lease, or told where its blocks are | it waits for the transfer |
| Transferring | it writes (push, Mooncake) | it reads (pull) |

Times are monotonic ns; `request` is the id that this engine has for the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvctl_agent import rank_name, room_number
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import encodable
from kvctl_agent.integrations.observe.tracker import EventTracker, put_bounded
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord

_LONGEST_ID = 256
_MOST_PEERS = 4096
_MOST_REGISTERED = 1024
READ, WRITE = "read", "write"
RECOMPUTED, LATE_READS = "kvctl_recomputed_prompts_total", "kvctl_late_reads_total"


class Shape(NamedTuple):
    """Sizes of a worker.

    Attributes:
        recomputes: decode: vLLM computes a prompt itself if its KV cannot be loaded; otherwise the request fails.
    """

    role: Role
    block_bytes: int
    layers: int
    recomputes: bool = False


class Server(NamedTuple):
    """Address of the side channel of an engine, which names its workers, and its number of pipeline stages."""

    host: str
    port: int
    pp_size: int = 1

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Posted(NamedTuple):
    """A transfer that was handed to the transfer engine.

    Attributes:
        engine: vLLM's id of the engine at the other end; `rank` is the TP rank there.
    """

    request: str
    engine: str
    rank: int
    path: str
    descriptors: int
    begun_ns: int
    posted_ns: int


@dataclass(slots=True)
class Peer:
    """A worker of another engine; `state` as in `PeerRow`."""

    endpoint: str
    state: str
    heard_ns: int | None = None
    error: str | None = None


@dataclass(slots=True)
class Room:
    """A request that is being handed over.

    Attributes:
        reason: code and text of the first failure that vLLM logged.
        posted, moved: number of transfers that were posted, and that have ended.
        readers: prefill, pull: number of decode workers that have read it, and that will.
        server: decode: the prefill engine that it comes from.
    """

    record: RoomRecord
    reason: tuple[str, str] | None = None
    posted: int = 0
    moved: int = 0
    readers: tuple[int, int] = (0, 0)
    server: Server | None = None
    owing: list[str] = field(default_factory=list)


class Tracker(EventTracker):
    """Tracker of one worker.

    Attributes:
        rooms: requests that have not ended, by id.
        peers: workers of other engines, by name.
    """

    def __init__(self, name: str, shape: Shape, telemetry: Telemetry, directory: Path) -> None:
        super().__init__(name, telemetry, directory)
        self.shape = shape
        self.rooms: dict[str, Room] = {}
        self.peers: dict[str, Peer] = {}
        self._engines: dict[str, Server] = {}
        self._registered: dict[int, tuple[int, str]] = {}  # decode workers by room, before the request arrives

    # ---- both roles ------------------------------------------------------------------------------------------------

    def arrived(self, at_ns: int, role: Role, request: str, transfer: str, tokens: int | None = None) -> None:
        """A request that is handed over has arrived; a hash of `transfer` is the room.

        Of an engine with both roles, requests of one of them are shown.
        """
        if request in self.rooms or role != self.shape.role:
            return
        number = room_number(encodable(transfer)[:1024])
        if any(room.record.room == number for room in self.rooms.values()):
            self.note("room", f"another request with the id {transfer} is not shown: {request}", "warning", number)
            return
        record = self.open_record(number, at_ns, RoomState.BOOTSTRAPPING)
        record.request_id, record.tokens = encodable(request)[:_LONGEST_ID], tokens
        self.rooms[request] = Room(record)
        if (early := self._registered.pop(number, None)) is not None:
            self._claim(max(at_ns, early[0]), request, early[1])

    def reason(self, at_ns: int, request: str | None, code: str, text: str, engine: str | None = None) -> None:
        """vLLM has logged a failure of a request, or of all that wait for an engine."""
        server = self._engines.get(engine or "")
        if server is not None and code == "KV_HANDSHAKE_FAILED":
            for name in self._peers_at(server):
                if self.peers[name].state == "connecting":
                    self.peers[name].error = text
        room = self.rooms.get(request or "")
        if room is not None and room.reason is None:
            names = room.owing or room.record.peers
            room.reason = code, f"{text} ({', '.join(names)})" if names else text
        elif request is None:
            self.note("peer", text, "error", at_ns=at_ns)

    def unreadable(self, at_ns: int, agent: str) -> None:
        """A NIXL agent has sent a notification that has none of vLLM's forms."""
        self.note("peer", "sent a notification that cannot be read", "warning", peer=self.name_of(agent), at_ns=at_ns)

    def ended(self, at_ns: int, request: str, aborted: bool) -> None:
        """The scheduler has ended the request, and nothing of it is held or awaited."""
        if (room := self.rooms.get(request)) is None:
            return
        if not aborted:
            self._finish(request, at_ns, RoomState.SUCCESS, "success", "nothing had to be transferred")
            return
        flying = room.posted - room.moved
        text = f"aborted by vLLM in {room.record.state_now.label}"
        self._fail(request, at_ns, "ABORTED", f"{text}, while {flying} transfers were in flight" if flying else text)

    def posted(self, _: int, posted: Posted) -> None:
        """A transfer was handed to the transfer engine."""
        if (room := self.rooms.get(posted.request)) is None:
            return
        room.posted += 1
        if room.record.state_now < RoomState.TRANSFERRING:
            room.record.state(RoomState.TRANSFERRING, posted.posted_ns)
        detail = f"{posted.path} of {posted.descriptors} descriptors"
        room.record.event("begin", posted.begun_ns, posted.rank, peer=self._peer_of(posted), detail=detail)
        self.telemetry.metrics.add("kvctl_descriptors_total", posted.descriptors, posted.path)

    def moved(self, at_ns: int, posted: Posted, nbytes: int, took_ns: int) -> None:
        """A transfer has ended; the transfer engine took `took_ns` for it."""
        name, room = self._peer_of(posted), self.rooms.get(posted.request)
        self._heard(name, at_ns)
        if room is None:
            return
        moments = {"queue": posted.begun_ns, "post": posted.posted_ns}
        moments["wire"] = min(at_ns, max(posted.posted_ns, posted.begun_ns + took_ns))
        if self.shape.role == "decode":
            moments["arrive"] = at_ns
        self._part(room, posted.rank, name, posted.path, nbytes, moments, at_ns)

    def _part(
        self, room: Room, rank: int, name: str, path: str, nbytes: int, moments: dict[str, int], at_ns: int
    ) -> None:
        done_ns = (room.record.forward_done_at or at_ns) if self.shape.role == "prefill" else None
        key = rank, room.moved, (0, self.shape.layers)
        room.moved += 1
        if name in room.owing:
            room.owing.remove(name)
        self.telemetry.part(room.record, key, name, path, nbytes, moments, done_ns)

    # ---- prefill ---------------------------------------------------------------------------------------------------

    def held(self, at_ns: int, request: str, blocks: int, lease_s: float) -> None:
        """The prompt is computed; its blocks are held until a decode worker has them, or the lease ends."""
        if (room := self.rooms.get(request)) is None:
            return
        record = room.record
        record.pages, record.first_ready_at, record.forward_done_at = blocks, at_ns, at_ns
        if record.state_now is RoomState.BOOTSTRAPPING:
            record.state(RoomState.BOOTSTRAPPING, at_ns)
        record.event("finish", at_ns, detail=f"holds {blocks} blocks, with a lease of {lease_s:g} s")

    def registered(self, at_ns: int, transfer: str, agent: str, server: Server, rank: int = 0) -> None:
        """Push, Mooncake: a decode worker, TP rank `rank` of `server`, has told where its blocks are."""
        number = room_number(encodable(transfer)[:1024])
        known = self.name_of(agent)
        name = self._name(server, rank) if known == agent else known
        request = next((each for each, room in self.rooms.items() if room.record.room == number), None)
        if request is not None:
            self._claim(at_ns, request, name)
            return
        put_bounded(self._registered, number, (at_ns, name), _MOST_REGISTERED)

    def claimed(self, at_ns: int, request: str, agent: str) -> None:
        """Pull: a decode worker, of which the name of its NIXL agent is known, keeps the request's lease alive."""
        self._claim(at_ns, request, self.name_of(agent))

    def _claim(self, at_ns: int, request: str, name: str) -> None:
        self._heard(name, at_ns)
        if (room := self.rooms.get(request)) is None:
            return
        if name in room.record.peers:
            room.record.event("renew", at_ns, peer=name)
            return
        room.record.join(name, 0)
        room.record.event("accept", at_ns, peer=name)
        if room.record.state_now is RoomState.BOOTSTRAPPING:
            room.record.state(RoomState.WAITING_FOR_INPUT, at_ns)

    def read(self, at_ns: int, request: str, agent: str, readers: int) -> None:
        """A decode worker, one of `readers`, has read the request's blocks (pull), or needs none (Mooncake)."""
        name = self.name_of(agent)
        self._heard(name, at_ns)
        if (room := self.rooms.get(request)) is None:
            return
        room.readers = room.readers[0] + 1, readers
        if name not in room.record.peers:
            room.record.join(name, 0)
        room.record.event("read", at_ns, peer=name)

    def late(self, at_ns: int, request: str, agent: str) -> None:
        """A decode worker has read blocks, or was told of blocks, that this engine does not hold any more."""
        name = self.name_of(agent)
        self._heard(name, at_ns)
        self.telemetry.metrics.add(LATE_READS, 1)
        text = f"the blocks of request {request} were transferred after they had been freed"
        self.note("room", text, "error", peer=name, at_ns=at_ns)

    def released(self, at_ns: int, request: str) -> None:
        """vLLM has released the blocks of a request: decode has them, or the lease has ended."""
        if (room := self.rooms.get(request)) is None:
            return
        read, readers = room.readers
        if (readers and read >= readers) or (room.posted and room.moved >= room.posted):
            self._finish(request, at_ns, RoomState.SUCCESS, "sent")
            return
        if room.reason is not None:
            self._fail(request, at_ns, *room.reason)
            return
        blocks = f"its {room.record.pages} blocks" if room.record.pages else "its blocks"
        claimed = f" by {', '.join(room.record.peers)}" if room.record.peers else ""
        flying = f", while {room.posted - room.moved} writes were in flight" if room.posted > room.moved else ""
        text = f"the lease of {blocks} ended before they were transferred{claimed}{flying}"
        self._fail(request, at_ns, "KV_HOLD_EXPIRED", text)

    # ---- decode ----------------------------------------------------------------------------------------------------

    def allocated(self, at_ns: int, request: str, blocks: int, cached: int, engine: str, server: Server) -> None:
        """The request has blocks for what prefill computed; `cached` blocks of the prompt were here."""
        put_bounded(self._engines, engine, server, _MOST_PEERS)
        if (room := self.rooms.get(request)) is None:
            return
        room.server, room.record.pages = server, blocks
        names = self._peers_at(server)
        if names:
            room.owing = names
            room.record.expect(list(names))
        after = f", after {cached} that are cached" if cached else ""
        room.record.event("open", at_ns, detail=f"{blocks} blocks from {server.address}{after}")
        if names and all(self.peers[name].state == "ready" for name in names):
            room.record.state(RoomState.WAITING_FOR_INPUT, at_ns)

    def connecting(self, at_ns: int, engine: str, server: Server, ranks: Sequence[int]) -> None:
        """A handshake with an engine begins."""
        put_bounded(self._engines, engine, server, _MOST_PEERS)
        for rank in ranks:
            self._peer(self._name(server, rank), f"tcp://{server.address}").state = "connecting"
        self._expect(server)
        self.note("peer", f"handshake with {server.address} begins", at_ns=at_ns)

    def connected(self, at_ns: int, server: Server, ranks: Sequence[tuple[int, int]], took_ns: int) -> None:
        """A handshake has ended; `ranks` are the (pp, tp) ranks that answered."""
        for pp, tp in ranks:
            name = self._name(server, tp, pp)
            peer = self._peer(name, f"tcp://{server.address}")
            peer.state, peer.heard_ns, peer.error = "ready", at_ns, None
            self.note("peer", f"handshake took {took_ns / 1e6:.1f} ms", peer=name, at_ns=at_ns)
        self._expect(server)
        for room in self.rooms.values():
            if room.server == server and room.record.state_now is RoomState.BOOTSTRAPPING:
                room.record.state(RoomState.WAITING_FOR_INPUT, at_ns)

    def _expect(self, server: Server) -> None:
        """Sets the peers of the rooms that wait for an engine's workers."""
        names = self._peers_at(server)
        for room in self.rooms.values():
            if room.server == server and not room.moved and room.record.peers != names:
                room.owing = list(names)
                room.record.expect(list(names))

    def written(self, at_ns: int, request: str, agent: str, writers: int) -> None:
        """Push, Mooncake: a prefill worker, one of `writers`, has written its share of the request's blocks."""
        if (room := self.rooms.get(request)) is None:
            return
        name = next(iter(room.owing), None) or self.name_of(agent)
        self._heard(name, at_ns)
        room.record.state(RoomState.TRANSFERRING, at_ns)
        nbytes = (room.record.pages or 0) * self.shape.block_bytes // max(1, writers)
        room.posted += 1
        self._part(room, room.moved, name, WRITE, nbytes, {"arrive": at_ns}, at_ns)

    def received(self, at_ns: int, request: str, failed: bool) -> None:
        """vLLM has what it waited for, or has given it up."""
        if (room := self.rooms.get(request)) is None:
            return
        if not failed and room.reason is None:
            self._finish(request, at_ns, RoomState.SUCCESS, "success")
            return
        code, text = room.reason or ("KV_TRANSPORT", "vLLM gave no reason")
        if self.shape.recomputes:
            self.telemetry.metrics.add(RECOMPUTED, 1, "load-failed")
            text += "; the prompt is computed here again"
        self._fail(request, at_ns, code, text)

    def computed_here(self, _: int) -> None:
        """A prompt reached this decode engine without parameters of a prefill engine, so that it computes it."""
        self.telemetry.metrics.add(RECOMPUTED, 1, "no-parameters")

    def dropped(self, at_ns: int, events: int) -> None:
        """The scheduler half had no space for some events of one step."""
        self.lost(events, f"{events} events of one step of the scheduler were lost", at_ns)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _finish(self, request: str, at_ns: int, state: RoomState, stage: str, detail: str = "") -> None:
        record = self.rooms.pop(request).record
        record.state(state, at_ns)
        record.event(stage, at_ns, detail=detail)
        self.telemetry.finish(record, at_ns)

    def _fail(self, request: str, at_ns: int, code: str, text: str) -> None:
        self.record_failure(self.rooms[request].record, at_ns, code, text)
        self._finish(request, at_ns, RoomState.FAILED, "fail", text)

    def _name(self, server: Server, tp: int, pp: int = 0) -> str:
        role: Role = "decode" if self.shape.role == "prefill" else "prefill"
        return rank_name(role, {"pp": (pp, server.pp_size)}, tp, server.address)

    def _peer_of(self, posted: Posted) -> str:
        server = self._engines.get(posted.engine)
        return posted.engine if server is None else self._name(server, posted.rank)

    def _peers_at(self, server: Server) -> list[str]:
        return [name for name in self.peers if name.endswith(f"@{server.address}")]

    def _peer(self, name: str, endpoint: str) -> Peer:
        peer = self.peers.get(name)
        if peer is None:
            peer = Peer(endpoint, "")
            put_bounded(self.peers, name, peer, _MOST_PEERS)
        return peer

    def _heard(self, name: str, at_ns: int) -> None:
        peer = self._peer(name, "")
        peer.heard_ns, peer.state, peer.error = at_ns, "ready", None
