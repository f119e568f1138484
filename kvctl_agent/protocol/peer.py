"""Identity of this agent and its peers, the comparison of their layouts, and the liveness of each peer.

`connecting → ready ⇄ suspect → lost`, or `refused` when the layouts differ. Silence makes a peer suspect (it gets no
new grants) and later lost (its rooms fail); proof of death or a new incarnation makes it lost at once. A lost peer that
sends Hello again starts over.

A new incarnation does not prove that the process before it has ended: that process may be frozen and continue later.
The only proofs are the end of the process, observed on this host, and its own message that it has drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from kvctl_agent.contract.states import PeerState as PeerState
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import LocalShard, ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan_inputs import (
    PLAN_VERSION,
    Factor,
    PlanInputs,
    Wire,
    differences,
    shape_to_wire,
    shared,
    transfer_page,
)
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol.messages import Heartbeat, PeerInfo, SharedMemory, WireDict
from kvctl_agent.protocol.ring import RingGate


class LocalInfo(msgspec.Struct, frozen=True):
    """Identity and geometry of this agent, fixed for its lifetime.

    `shape` is that of the whole model. On a decode rank `cp_mode` has no meaning: each prefill instance has its own
    mode.
    """

    name: str
    role: str
    coord: RankCoord
    side: ParallelConfig
    shape: ModelShape
    page_size: int
    chunk_pages: int
    cp_mode: str
    incarnation: int
    transport: str
    metadata: bytes
    pool: WireDict
    host: str  # equal for processes that can see each other's pids
    pid: int
    ring_base: int = 0
    ring_bytes: int = 0
    scratch_base: int = 0
    scratch_bytes: int = 0
    shared: tuple[SharedMemory, ...] = ()
    unshared: str = ""
    hostname: str = ""
    address: str = ""
    cp_interleave: int = 1
    max_instances: int = 512  # prefill instances that a decode rank knows at once; requests may name any number
    engine: str = ""  # whose worker the agent is part of; "" if it is embedded otherwise
    dtypes: dict[str, str] = {}  # elements of each segment, as `KVPool.dtypes`

    @property
    def unique_rank(self) -> int:
        return self.side.unique_rank(self.coord)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per cell of the chunk grid, whole pages; on a decode rank without meaning."""
        return self.chunk_pages * self.page_size

    @property
    def aux_row_bytes(self) -> list[int]:
        """Row size of each aux buffer of this rank's pool, in bytes; empty without aux rows."""
        return _aux_row_bytes(self.pool)

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """The layers and heads of each segment that this rank's pool holds."""
        return local_shards(self.shape, self.page_size, self.side, self.coord)

    @property
    def layers(self) -> range:
        """Global ids of this rank's KV and draft layers; draft layers directly follow those of the last stage."""
        own = [shard for shard in self.shards if shard.segment.table == 0 and shard.num_layers]
        return range(own[0].layer_lo, own[-1].layer_hi)

    def peer_info(self) -> PeerInfo:
        return PeerInfo(
            name=self.name,
            role=self.role,
            coord=list(self.coord),
            sizes=[self.side.dp, self.side.pp, self.side.cp, self.side.tp],
            unique_rank=self.unique_rank,
            plan=self._plan(),
            pool=self.pool,
            transport=self.transport,
            metadata=self.metadata,
            host=self.host,
            pid=self.pid,
            ring_base=self.ring_base,
            ring_bytes=self.ring_bytes,
            scratch_base=self.scratch_base,
            scratch_bytes=self.scratch_bytes,
            stages=list(self.side.stages),
            cp_mode=self.cp_mode,
            shared=list(self.shared),
            unshared=self.unshared,
            hostname=self.hostname,
            address=self.address,
            cp_interleave=self.cp_interleave,
            dtypes=self.dtypes,
        )

    def _plan(self) -> Wire:
        """Returns the plan inputs of this side, in wire form.

        All but `page_size`, `chunk_tokens` and `engine` must be equal. The chunk grid is that of the prefill side.
        """
        return {
            "plan_version": PLAN_VERSION,
            **shape_to_wire(self.shape),
            "page_size": self.page_size,
            "chunk_tokens": self.chunk_tokens,
            **({"engine": self.engine} if self.engine else {}),
        }


class Timing(msgspec.Struct, frozen=True):
    """Periods and deadlines of the machines, in nanoseconds."""

    heartbeat_ns: int
    suspect_ns: int
    lost_ns: int
    resend_ns: int
    bootstrap_ns: int
    waiting_ns: int
    revoke_ns: int = 5_000_000_000  # age at which an unwritten grant that blocks others is revoked
    unclaimed_ns: int = 1 << 62  # for the prefill engine to call send() for a room that a decode rank has opened
    hold_ns: int = 0  # for which a computed room waits to be opened; 0: as other rooms, for `bootstrap_ns`

    @property
    def lease_ns(self) -> int:
        """Time after a peer's last message during which a writer may post to the peer."""
        return self.suspect_ns // 2


class PeerPlan(NamedTuple):
    """Result of `plan_with_peer`: the plan inputs of both sides, or None and the factors that differ."""

    inputs: PlanInputs | None
    differences: tuple[str, ...]


def plan_with_peer(local: LocalInfo, info: PeerInfo) -> PeerPlan:
    """Compares a peer's layout with that of this agent, field by field, so that a mismatch names the factor.

    A factor is a text such as "page_size 64 ≠ 48", with the value of this agent first.
    """
    if info.role == local.role or info.role not in ("prefill", "decode"):
        return PeerPlan(None, (f"role {local.role} fits no {info.role}: a prefill and a decode agent are needed",))
    if len(info.sizes) != 4 or len(info.coord) != 4:
        return PeerPlan(None, ("sizes and coordinates need the four axes dp, pp, cp, tp",))
    if info.transport != local.transport:
        return PeerPlan(None, (f"transport {local.transport} ≠ {info.transport}",))
    own, theirs = dict(local.peer_info().plan), dict(info.plan)
    del own["page_size"], own["chunk_tokens"]
    other_size, other_chunk = theirs.pop("page_size", 0), theirs.pop("chunk_tokens", 0)
    if not isinstance(other_size, int) or other_size < 1:
        return PeerPlan(None, (f"its page_size is {other_size!r:.40}",))
    if not isinstance(other_chunk, int) or other_chunk < 1 or other_chunk % other_size:
        return PeerPlan(None, (f"its chunk_tokens is {other_chunk!r:.40}, with pages of {other_size} tokens",))
    if max(local.page_size, other_size) % min(local.page_size, other_size):
        return PeerPlan(None, (str(Factor("page_size", local.page_size, other_size)),))
    former = theirs.pop("kv_format", "")  # in place of `dtypes`, from engines' agents before there was that field
    if unlike := _unlike_dtypes(local, info.dtypes or ({"kv": str(former)} if former else {})):
        return PeerPlan(None, unlike)
    engine, other_engine = own.pop("engine", ""), theirs.pop("engine", "")
    if engine and other_engine and engine != other_engine and (excess := _beyond_plain_kv({**own, **theirs})):
        text = f"{Factor('engine', engine, other_engine)}, between which only plain KV can be transferred: {excess}"
        return PeerPlan(None, (text,))
    if factors := differences(own, theirs):
        return PeerPlan(None, tuple(map(str, factors)))
    try:
        dp, pp, cp, tp = info.sizes
        side = ParallelConfig(dp, pp, cp, tp, tuple(info.stages))
        if side.unique_rank(RankCoord(*info.coord)) != info.unique_rank:
            return PeerPlan(None, (f"unique rank {info.unique_rank} does not fit coordinates {info.coord}",))
        here, there = (local.side, local.page_size), (side, other_size)
        if local.role == "prefill":
            (prefill, prefill_page), (decode, decode_page) = here, there
            cp_mode, interleave, chunk_tokens = local.cp_mode, info.cp_interleave, local.chunk_tokens
        else:
            (prefill, prefill_page), (decode, decode_page) = there, here
            cp_mode, interleave, chunk_tokens = info.cp_mode, local.cp_interleave, other_chunk
        page_size = transfer_page(prefill_page, decode_page, interleave if decode.cp > 1 else 0)
        inputs = PlanInputs(
            shape=local.shape,
            page_size=page_size,
            chunk_pages=chunk_tokens // page_size,
            prefill=prefill,
            decode=decode,
            cp_mode=cp_mode,
            prefill_split=prefill_page // page_size,
            decode_split=decode_page // page_size,
            stripe_pages=interleave // page_size if decode.cp > 1 else 1,
        )
    except LayoutError as error:
        return PeerPlan(None, (str(error),))
    if info.role == "decode" and (missing := _missing_count(info.pool, len(inputs.segments))):
        return PeerPlan(None, (f"its pool does not say {missing}",))
    rows, others = local.aux_row_bytes, _aux_row_bytes(info.pool)
    if rows and others and rows != others:
        return PeerPlan(None, (f"aux_row_bytes {_plus(rows)} ≠ {_plus(others)}",))
    return PeerPlan(shared(inputs), ())


def _unlike_dtypes(local: LocalInfo, remote: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the segments whose elements the decode side would take for others; what a side does not know is not one.

    Of several names that a side gives for a segment, the first is that of its pool; the decode side receives any.
    """
    found = []
    for name in local.dtypes.keys() & remote.keys():
        both = local.dtypes[name], remote[name]
        sent, taken = (each.split(", ") for each in (both if local.role == "prefill" else both[::-1]))
        if sent[0] not in taken:
            found.append(str(Factor(f"{name} dtype", *both)))
    return tuple(sorted(found))


def _beyond_plain_kv(wire: Wire) -> str:
    """Names what a model has beside KV in one page table, which each engine lays out in its own way; "" for nothing.

    Quantised KV belongs to it: engines keep its scales elsewhere.
    """
    found = {" ".join(name.split(".")[:2]) for name in wire if name.startswith(("group.", "state."))}
    if "draft.num_layers" in wire:
        found.add("a draft model")
    if wire["shape.dtype_bytes"] == 1:
        found.add("quantised KV")
    return ", ".join(sorted(found))


def _aux_row_bytes(pool: WireDict) -> list[int]:
    """Returns the row size of each aux buffer of a pool in wire form; empty without aux rows."""
    sizes = pool.get("aux_row_bytes")
    return sizes if isinstance(sizes, list) else []


def _plus(sizes: list[int]) -> str:
    return f"{'+'.join(map(str, sizes)):.80}"


def _missing_count(pool: WireDict, segments: int) -> str:
    """Returns the name of the first missing field that a writer needs to check openings; "" if none is missing.

    Args:
        pool: pool of a decode rank, as in its PeerInfo.
        segments: number of segments of the model.
    """
    for count in ("num_pages", "aux_slots"):
        value = pool.get(count)
        if not isinstance(value, int) or value < 0:
            return count
    slots = pool.get("slots")
    if not isinstance(slots, list) or len(slots) != segments or min(slots) < 0:
        return "slots"
    return ""


class Lease:
    """A writer's permission to post to one incarnation of a peer; it expires when the peer is silent for too long.

    The machine renews it, and transfers check it before each post. So a process that was frozen (stopped, or its
    machine paused) and then replaced does not post the writes it had queued. The lease does not prove to the peer that
    nothing will be written: a process can be frozen between the check and the post.
    """

    __slots__ = ("length_ns", "renewed_ns")

    def __init__(self, length_ns: int) -> None:
        self.length_ns = length_ns
        self.renewed_ns = 0

    @property
    def expires_ns(self) -> int:
        """Time on the monotonic clock after which the lease has expired, unless it is renewed."""
        return self.renewed_ns + self.length_ns

    def valid(self, now_ns: int) -> bool:
        return now_ns <= self.expires_ns


class CancelToken:
    """Token of the queued parts of a transfer.

    Attributes:
        cancelled: the room has failed or was recalled by the decode rank: queued parts are dropped, and parts in
            transfer are abandoned.
        recalled: the prefill engine takes its pages back: queued parts are dropped, and parts in transfer are finished,
            so that the writer knows of each part whether the decode rank has it.
    """

    __slots__ = ("cancelled", "lease", "recalled")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.cancelled = False
        self.recalled = False

    @property
    def dropped(self) -> bool:
        """Whether queued parts must not begin any more."""
        return self.cancelled or self.recalled

    def may_post(self, now_ns: int) -> bool:
        return not self.cancelled and self.lease.valid(now_ns)


class FormerIncarnation(NamedTuple):
    """An earlier incarnation of a peer whose process may still run: the info that it sent, and its return address."""

    info: PeerInfo
    route: bytes


@dataclass(slots=True, eq=False)
class Peer:
    """State of the connection to one peer, in one incarnation at a time.

    Attributes:
        coord, wire: the peer's coordinates in its instance, and the plan inputs in wire form; set by the handshake.
        gate: on a writer, the watermark of this decode rank's ring.
        lease: the permission to post to this incarnation.
        route: return address of this incarnation.
        registered: the incarnation that the registry names; 0 if it names none.
        hello_due_ns: when to send Hello again; 0 when no Hello is unanswered.
        greeted_ns: monotonic time of the first Hello.
        mismatch_since_ns: monotonic time since which the peer's layout differs from the other ranks of its instance; 0
            if it does not differ.
        since_ns: monotonic time at which the present incarnation was accepted.
        lost_ns: monotonic time at which it was lost; 0 if it is not lost.
        proven_dead: the process has ended, so none of its writes can be in flight.
        closed: it was lost because it announced that it closes.
        replaced_by: name of the peer that has taken its place, such as a restarted server under a new name; "" if none.
        replaces: name of the peer whose place it has taken; "" if none.
        ended_incarnations: incarnations that are proven to have ended; their messages are ignored.
        former: earlier incarnations that are not proven to have ended, and may still write here.
        echoed_ns: monotonic time at which the latest heartbeat that the peer has echoed was sent; 0 before the first.
        name_refused_to: the incarnation that was last refused this name, so that each refusal is recorded only once.
    """

    name: str
    timing: Timing
    state: PeerState = PeerState.CONNECTING
    incarnation: int = 0
    info: PeerInfo | None = None
    inputs: PlanInputs | None = None
    wire: dict[str, int | str] = field(default_factory=dict)
    coord: RankCoord = field(default=RankCoord(0, 0, 0, 0))
    gate: RingGate = field(default_factory=RingGate)
    lease: Lease = field(init=False)
    route: bytes = b""
    registered: int = 0
    hello_due_ns: int = 0
    greeted_ns: int = 0
    mismatch_since_ns: int = 0
    rtt_ns: int | None = None
    differences: tuple[str, ...] = ()
    since_ns: int = 0
    lost_ns: int = 0
    proven_dead: bool = False
    closed: bool = False
    replaced_by: str = ""
    replaces: str = ""
    ended_incarnations: deque[int] = field(default_factory=partial(deque, maxlen=64))
    former: dict[int, FormerIncarnation] = field(default_factory=dict)
    name_refused_to: int = 0
    errors_total: int = 0
    last_error: str | None = None
    watermark_sent: tuple[int, int, int] | None = None
    echoed_ns: int = 0
    _heartbeat_due_ns: int = 0
    _echo_ns: int = 0
    _echo_since_ns: int = 0
    _stalled_ns: int = 0  # part of its silence in which this rank could not hear it

    def __post_init__(self) -> None:
        self.lease = Lease(self.timing.lease_ns)

    @property
    def usable(self) -> bool:
        """Whether messages about rooms may be exchanged with the peer."""
        return self.state in (PeerState.READY, PeerState.SUSPECT)

    @property
    def heard_ns(self) -> int:
        """Monotonic time of the last message of the present incarnation; 0 before the first."""
        return self.lease.renewed_ns

    @heard_ns.setter
    def heard_ns(self, now_ns: int) -> None:
        self.lease.renewed_ns = now_ns
        self._stalled_ns = 0

    @property
    def departed(self) -> bool:
        """Whether the peer has closed, or another one has taken its place."""
        return self.state is PeerState.LOST and (self.closed or bool(self.replaced_by))

    def may_post(self, now_ns: int) -> bool:
        """Returns whether a writer may post to the peer: the peer is usable and its lease has not expired."""
        return self.usable and self.lease.valid(now_ns)

    def begin_incarnation(
        self,
        incarnation: int,
        info: PeerInfo,
        inputs: PlanInputs | None,
        differences: tuple[str, ...],
        route: bytes = b"",
    ) -> None:
        """Resets the state for an incarnation that has sent its info; it is ready once the transport has connected.

        Args:
            inputs: plan inputs of both sides; None to refuse the peer.
            differences: plan factors that differ.
            route: return address of the incarnation.
        """
        if incarnation != self.incarnation:
            if self.info is not None and not self.proven_dead:
                self.former[self.incarnation] = FormerIncarnation(self.info, self.route)
            self.former.pop(incarnation, None)
            self.lease = Lease(self.timing.lease_ns)
            self.replaces = ""
        self.incarnation = incarnation
        self.route = route
        self.info = info
        self.inputs = inputs
        if inputs is not None:
            self.wire = inputs.to_wire()
            self.coord = RankCoord(*info.coord)
        self.differences = differences
        self.gate = RingGate()
        self.proven_dead = self.closed = False
        self.lost_ns = 0
        self.replaced_by = ""
        self.watermark_sent = None
        self.echoed_ns = 0
        self.state = PeerState.CONNECTING if inputs is not None else PeerState.REFUSED

    def end(self, incarnation: int) -> None:
        """Records that an incarnation, the present or a former one, is proven to have ended."""
        if incarnation == self.incarnation:
            self.proven_dead = True
        self.former.pop(incarnation, None)
        self.ended_incarnations.append(incarnation)

    def info_of(self, incarnation: int) -> PeerInfo | None:
        """Returns the info sent by the present incarnation, or by a former one that may still run; else None."""
        if incarnation == self.incarnation:
            return self.info
        former = self.former.get(incarnation)
        return former.info if former is not None else None

    @property
    def refusal(self) -> str:
        """Text that names the peer and the reasons why it was refused."""
        return f"{self.name} refused: {'; '.join(self.differences)}"

    def hear(self, now_ns: int) -> tuple[bool, bool]:
        """Records a message of the present incarnation: renews the lease, and makes a suspect peer ready again.

        Returns:
            whether the lease had expired, and whether the peer was suspect.
        """
        lapsed = not self.lease.valid(now_ns)
        was_suspect = self.state is PeerState.SUSPECT
        self.heard_ns = now_ns
        if was_suspect:
            self.state = PeerState.READY
        return lapsed, was_suspect

    def heartbeat(self, message: Heartbeat, now_ns: int) -> None:
        self._echo_ns, self._echo_since_ns = message.sent_ns, now_ns
        if message.echo_ns:
            self.echoed_ns = message.echo_ns
            rtt = now_ns - message.echo_ns - message.held_ns
            if rtt >= 0:
                self.rtt_ns = rtt

    def takes_place_of(self, other: Peer) -> bool:
        """Returns whether the peer is of the same host and rank as a lost one, and came after that was last heard.

        A server that is started again under a new name is recognised by that. Two servers of one layout on one host
        cannot be told apart, so a peer takes the place of one other at most.
        """
        own, lost = self.info, other.info
        return (
            own is not None
            and lost is not None
            and self.state is PeerState.READY
            and not self.replaces
            and other.state is PeerState.LOST
            and not other.replaced_by
            and self.since_ns > other.heard_ns
            and bool(own.hostname)
            and (own.hostname, own.coord, own.sizes) == (lost.hostname, lost.coord, lost.sizes)
        )

    def due_heartbeat(self, now_ns: int, watermark: list[int]) -> Heartbeat | None:
        """Returns the heartbeat to send now, with this watermark; None if none is due."""
        if not self.usable or now_ns < self._heartbeat_due_ns:
            return None
        self._heartbeat_due_ns = now_ns + self.timing.heartbeat_ns
        held = now_ns - self._echo_since_ns if self._echo_ns else 0
        return Heartbeat(sent_ns=now_ns, echo_ns=self._echo_ns, held_ns=held, watermark=watermark)

    def discount(self, stalled_ns: int, now_ns: int) -> None:
        """Does not count `stalled_ns` of its silence, in which it could not be heard. Its lease is not prolonged.

        Once in a silence: a rank that is held up again and again would never notice that a peer is lost.
        """
        self._stalled_ns = self._stalled_ns or min(stalled_ns, now_ns - self.heard_ns)

    def check(self, now_ns: int) -> PeerState | None:
        """Marks the peer as suspect or lost if it has been silent for too long; returns the new state if it changed."""
        silence = now_ns - self.heard_ns - self._stalled_ns
        if self.usable and silence >= self.timing.lost_ns:
            self.state = PeerState.LOST
            return self.state
        if self.state is PeerState.READY and silence >= self.timing.suspect_ns:
            self.state = PeerState.SUSPECT
            return self.state
        return None

    def fail(self, text: str) -> None:
        """Counts an error of the peer and keeps its text, for display."""
        self.errors_total += 1
        self.last_error = text
