"""What one agent knows of itself, and whether a peer's introduction fits it.

Both ends build the full `PlanInputs` from the two introductions and compare them field by field, so that a mismatch
names the factor instead of showing up as garbage.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.local_shard import LocalShard, local_shards
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.plan_inputs import PLAN_VERSION, PlanInputs, Wire, differences, shape_to_wire
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol.messages import PeerInfo, SharedMemory, WireDict


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
