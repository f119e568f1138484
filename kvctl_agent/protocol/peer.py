"""Who is alive: one machine per peer, fed by what is heard and by the clock.

`connecting → ready ⇄ suspect → lost`, or `refused` when the layouts differ. Silence makes a peer suspect (no new
grants) and later lost (its rooms fail); proof of death or a new incarnation makes it lost at once. A lost peer that
says Hello again starts over.

A new incarnation proves nothing about the one before: that may be a frozen process, which goes on one day. Only the end
of its process, seen on this host, and its own word that it has drained are proof.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import msgspec

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import LocalShard, ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan_inputs import PLAN_VERSION, PlanInputs, Wire, differences, shape_to_wire
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol.messages import Heartbeat, PeerInfo, SharedMemory, WireDict
from kvctl_agent.protocol.ring import RingGate


class LocalInfo(msgspec.Struct, frozen=True):
    """Identity and geometry of this agent, fixed for its life.

    `shape` is the whole model's. On a decode rank `cp_mode` means nothing: each prefill instance has its own.
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

    @property
    def unique_rank(self) -> int:
        return self.side.unique_rank(self.coord)

    @property
    def held(self) -> tuple[LocalShard, ...]:
        """What this rank's pool holds of each segment."""
        return local_shards(self.shape, self.page_size, self.side, self.coord)

    @property
    def layers(self) -> range:
        """The KV and draft layers of this rank; they are neighbours, since a draft follows the last stage's."""
        own = [part for part in self.held if not part.segment.state and part.num_layers]
        return range(own[0].layer_lo, own[-1].layer_hi)

    def introduction(self) -> PeerInfo:
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
        )

    def _plan(self) -> Wire:
        """What must be the same on both sides."""
        return {
            "plan_version": PLAN_VERSION,
            **shape_to_wire(self.shape),
            "page_size": self.page_size,
            "chunk_pages": self.chunk_pages,
        }


class Timing(msgspec.Struct, frozen=True):
    """Every period and deadline of the machines, in nanoseconds."""

    heartbeat_ns: int
    suspect_ns: int
    lost_ns: int
    resend_ns: int
    bootstrap_ns: int
    waiting_ns: int
    revoke_ns: int = 5_000_000_000  # an unwritten grant this old, with others waiting behind it, is taken back

    @property
    def lease_ns(self) -> int:
        """No post unless the peer was heard from within this time."""
        return self.suspect_ns // 2


class PeerPlan(NamedTuple):
    """How a peer fits us: the plan inputs of the pair, or the factors in which it differs."""

    inputs: PlanInputs | None
    differences: tuple[str, ...]


def plan_with_peer(local: LocalInfo, theirs: PeerInfo) -> PeerPlan:
    """Compare a peer's introduction with our own side.

    Factors read "page_size 64 ≠ 32": ours first, then theirs.
    """
    if theirs.role == local.role or theirs.role not in ("prefill", "decode"):
        return PeerPlan(None, (f"role {local.role} fits no {theirs.role}: a prefill and a decode agent are needed",))
    if len(theirs.sizes) != 4 or len(theirs.coord) != 4:
        return PeerPlan(None, ("sizes and coordinates need the four axes dp, pp, cp, tp",))
    if theirs.transport != local.transport:
        return PeerPlan(None, (f"transport {local.transport} ≠ {theirs.transport}",))
    mine = local.introduction()
    factors = differences(mine.plan, theirs.plan)
    if factors:
        return PeerPlan(None, tuple(map(str, factors)))
    try:
        dp, pp, cp, tp = theirs.sizes
        side = ParallelConfig(dp, pp, cp, tp, tuple(theirs.stages))
        if side.unique_rank(RankCoord(*theirs.coord)) != theirs.unique_rank:
            return PeerPlan(None, (f"unique rank {theirs.unique_rank} does not fit coordinates {theirs.coord}",))
        prefill, decode = (local.side, side) if local.role == "prefill" else (side, local.side)
        inputs = PlanInputs(
            shape=local.shape,
            page_size=local.page_size,
            chunk_pages=local.chunk_pages,
            prefill=prefill,
            decode=decode,
            cp_mode=local.cp_mode if local.role == "prefill" else theirs.cp_mode,
        )
    except LayoutError as error:
        return PeerPlan(None, (str(error),))
    if theirs.role == "decode" and (missing := _unsaid(theirs.pool, len(inputs.segments))):
        return PeerPlan(None, (f"its pool does not say {missing}",))
    return PeerPlan(inputs, ())


def _unsaid(pool: WireDict, segments: int) -> str:
    """What a writer must know of a reader's pool to check openings against it, where that is missing."""
    for count in ("num_pages", "aux_slots"):
        value = pool.get(count)
        if not isinstance(value, int) or value < 0:
            return count
    slots = pool.get("slots")
    if not isinstance(slots, list) or len(slots) != segments or min(slots) < 0:
        return "slots"
    return ""


class Lease:
    """A writer's permission to post to one life of a peer; it ends when the peer has been silent for too long.

    The control loop renews it, workers ask it before each post. So a process that was frozen (stopped, or its machine
    paused) and whose peers have long replaced it does not post what it had queued. It is no proof for the other side: a
    process can be frozen between the question and the post.
    """

    __slots__ = ("length_ns", "renewed_ns")

    def __init__(self, length_ns: int) -> None:
        self.length_ns = length_ns
        self.renewed_ns = 0

    def valid(self, now_ns: int) -> bool:
        return now_ns - self.renewed_ns <= self.length_ns


class CancelToken:
    """Raised when a room fails: work that is queued but not begun is dropped, work that is in flight drains."""

    __slots__ = ("cancelled", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.cancelled = False

    def may_post(self, now_ns: int) -> bool:
        """Whether work behind this cancel may be posted now."""
        return not self.cancelled and self.lease.valid(now_ns)


class PeerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    REFUSED = "refused"


class FormerIncarnation(NamedTuple):
    """An earlier incarnation that may still be there: what it said of itself, and its return address."""

    who: PeerInfo
    route: bytes


@dataclass(slots=True, eq=False)
class Peer:
    """One peer in one incarnation at a time.

    Attributes:
        proven_dead: the process has ended, so nothing of it can be in flight.
        past: incarnations proven to have ended; what still comes from one is late, never a return.
        former: earlier incarnations that nothing has proven to have ended, and that may still write here.
        route: return address of this incarnation.
        registered: the incarnation that the registry names; 0 where none has.
        lease: the permission to post to this incarnation.
        name_asked_by: the incarnation that was last refused this name, which is noted once.
        hello_due_ns: when to say Hello again; 0 when none is unanswered.
        unlike_since_ns: since when it says that its layout is not that of its instance's other ranks; 0: it does not.
        at, wire: its place in its instance and the plan inputs as they travel, once it has been met.
        gate: on a writer, the view of this reader's ring.
    """

    name: str
    timing: Timing
    state: PeerState = PeerState.CONNECTING
    incarnation: int = 0
    who: PeerInfo | None = None
    inputs: PlanInputs | None = None
    wire: dict[str, int | str] = field(default_factory=dict)
    at: RankCoord = field(default=RankCoord(0, 0, 0, 0))
    gate: RingGate = field(default_factory=RingGate)
    lease: Lease = field(init=False)
    route: bytes = b""
    registered: int = 0
    hello_due_ns: int = 0
    unlike_since_ns: int = 0
    rtt_ns: int | None = None
    differences: tuple[str, ...] = ()
    proven_dead: bool = False
    past: deque[int] = field(default_factory=partial(deque, maxlen=64))
    former: dict[int, FormerIncarnation] = field(default_factory=dict)
    name_asked_by: int = 0
    errors_total: int = 0
    last_error: str | None = None
    watermark_sent: tuple[int, int, int] | None = None
    _heartbeat_due_ns: int = 0
    _echo_ns: int = 0
    _echo_since_ns: int = 0

    def __post_init__(self) -> None:
        self.lease = Lease(self.timing.lease_ns)

    @property
    def usable(self) -> bool:
        """Whether messages of rooms may be exchanged."""
        return self.state in (PeerState.READY, PeerState.SUSPECT)

    @property
    def heard_ns(self) -> int:
        """When this incarnation was last heard from, monotonic; 0: never."""
        return self.lease.renewed_ns

    @heard_ns.setter
    def heard_ns(self, now_ns: int) -> None:
        self.lease.renewed_ns = now_ns

    def may_post(self, now_ns: int) -> bool:
        """The writer's lease: a post needs a peer that was heard from lately."""
        return self.usable and self.lease.valid(now_ns)

    def meet(
        self,
        incarnation: int,
        who: PeerInfo,
        inputs: PlanInputs | None,
        differences: tuple[str, ...],
        route: bytes = b"",
    ) -> None:
        """Start over with this incarnation; ready follows when the transport has connected."""
        if incarnation != self.incarnation:
            if self.who is not None and not self.proven_dead:
                self.former[self.incarnation] = FormerIncarnation(self.who, self.route)
            self.former.pop(incarnation, None)
            self.lease = Lease(self.timing.lease_ns)
        self.incarnation = incarnation
        self.route = route
        self.who = who
        self.inputs = inputs
        if inputs is not None:
            self.wire = inputs.to_wire()
            self.at = RankCoord(*who.coord)
        self.differences = differences
        self.gate = RingGate()
        self.proven_dead = False
        self.watermark_sent = None
        self.state = PeerState.CONNECTING if inputs is not None else PeerState.REFUSED

    def end(self, incarnation: int) -> None:
        """This incarnation, the present one or a former, has ended for certain."""
        if incarnation == self.incarnation:
            self.proven_dead = True
        self.former.pop(incarnation, None)
        self.past.append(incarnation)

    def introduced(self, incarnation: int) -> PeerInfo | None:
        """What an incarnation that may still be there said of itself."""
        if incarnation == self.incarnation:
            return self.who
        former = self.former.get(incarnation)
        return former.who if former is not None else None

    @property
    def refusal(self) -> str:
        """Why it does not fit us, in words."""
        return f"{self.name} refused: {'; '.join(self.differences)}"

    def heard(self, now_ns: int) -> bool:
        """Anything came from this incarnation; True when that ended a suspicion."""
        self.heard_ns = now_ns
        if self.state is PeerState.SUSPECT:
            self.state = PeerState.READY
            return True
        return False

    def heartbeat(self, message: Heartbeat, now_ns: int) -> None:
        self._echo_ns, self._echo_since_ns = message.sent_ns, now_ns
        if message.echo_ns:
            rtt = now_ns - message.echo_ns - message.held_ns
            if rtt >= 0:
                self.rtt_ns = rtt

    def due_heartbeat(self, now_ns: int, watermark: list[int]) -> Heartbeat | None:
        """The next heartbeat to send, when it is time."""
        if not self.usable or now_ns < self._heartbeat_due_ns:
            return None
        self._heartbeat_due_ns = now_ns + self.timing.heartbeat_ns
        held = now_ns - self._echo_since_ns if self._echo_ns else 0
        return Heartbeat(sent_ns=now_ns, echo_ns=self._echo_ns, held_ns=held, watermark=watermark)

    def check(self, now_ns: int) -> PeerState | None:
        """Let time pass; the new state when silence changed it."""
        silence = now_ns - self.heard_ns
        if self.usable and silence >= self.timing.lost_ns:
            self.state = PeerState.LOST
            return self.state
        if self.state is PeerState.READY and silence >= self.timing.suspect_ns:
            self.state = PeerState.SUSPECT
            return self.state
        return None

    def fail(self, text: str) -> None:
        """Remember an error for the operator."""
        self.errors_total += 1
        self.last_error = text
