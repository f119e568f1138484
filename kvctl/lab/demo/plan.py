"""What a fleet that lives on is made of: its ranks, the model's shape, its timings, and how much fits into it.

Layouts are the agent's side of the house, so the shape and the ranks come from the same planner that a bench asks; how
many rooms a rank can have at once is decided here, because it is the router that keeps to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from kvctl.lab.ranks.bench_messages import Load, Plan, PlannedRank, PlanRequest, Sizes, Start, Tokens
from kvctl.lab.ranks.planner import plan, rank_start

Setting = str | int | float | bool

SHORT_TIMINGS: Mapping[str, Setting] = {
    "heartbeat_s": 0.2,
    "suspect_s": 0.6,
    "lost_s": 3.0,
    "resend_s": 0.3,
    "bootstrap_timeout_s": 12.0,
    "waiting_timeout_s": 12.0,
}
"""So short that loss and quarantine happen often, and that nothing can hang for long without being noticed."""

CALM_TIMINGS: Mapping[str, Setting] = {
    "heartbeat_s": 1.0,
    "suspect_s": 3.0,
    "lost_s": 15.0,
    "resend_s": 1.0,
    "bootstrap_timeout_s": 60.0,
    "waiting_timeout_s": 60.0,
}
"""An agent's own, with deadlines that somebody who looks on lives to see."""

_TRANSFER_WORKERS = {"copy_threads": 1, "workers": 1, "staging_buffer_mb": 16}
# Rooms that wait for a dead or silent peer keep their pages, besides those in flight.
_SPARE = 3


@dataclass(frozen=True)
class SteadyPlan:
    """A fleet to start.

    Args:
        prefill: the prefill instances; all serve the one decode instance.
        tokens: shortest and longest prompt.
        concurrency: rooms in flight over the whole fleet that its pools are sized for.
        ring_mb: each decode rank's ring; 0: a little smaller than its share of the rooms in flight.
        config: of every agent, over `SHORT_TIMINGS`.
        layers, kv_heads, head_dim: a small model, so that rooms are many rather than large.
        verify: compare every byte and watch the free pages.
        odd_pages: page sizes of ranks that were set up wrongly, by name.
        odd_rings: MiB of rings that were set up wrongly, by name.
        absent: ranks that nobody starts.
    """

    prefill: tuple[Sizes, ...] = (Sizes(tp=2),)
    decode: Sizes = field(default_factory=lambda: Sizes(dp=2))
    transport: str = "nixl"
    seed: int = 0
    concurrency: int = 16
    tokens: tuple[int, int] = (16, 1024)
    ring_mb: int = 0
    page_size: int = 16
    chunk_tokens: int = 256
    layers: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    config: Mapping[str, Setting] = field(default_factory=dict)
    verify: bool = True
    odd_pages: Mapping[str, int] = field(default_factory=dict)
    odd_rings: Mapping[str, int] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()

    @property
    def bytes_of_token(self) -> int:
        """KV bytes of one token over the whole model: K and V, two bytes an element."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    @property
    def ring(self) -> int:
        """MiB of each decode rank's ring."""
        if self.ring_mb:
            return self.ring_mb
        share = self.concurrency / self.decode.dp * sum(self.tokens) / 2 * self.bytes_of_token / self.decode.tp
        part = min(self.tokens[1], self.chunk_tokens) * self.bytes_of_token / self.decode.tp
        return max(1, ceil(part / (1 << 20)), int(share * 0.8) >> 20)

    @property
    def slots(self) -> int:
        """Rooms that any one rank can have at once, those included whose pages are not free yet."""
        return self.concurrency * _SPARE

    @property
    def timings(self) -> dict[str, float]:
        """Every period and deadline that the agents are given, in seconds."""
        return {name: float(value) for name, value in {**SHORT_TIMINGS, **self.config}.items() if name.endswith("_s")}

    @property
    def patience_s(self) -> float:
        """Longest time that a room can take at a rank that lives: every state's deadline, silence, and some load."""
        times = self.timings
        return times["bootstrap_timeout_s"] + 2 * times["waiting_timeout_s"] + times["lost_s"] + 5

    @property
    def request(self) -> PlanRequest:
        """The request for shape and ranks; pools are sized by `start`."""
        return PlanRequest(
            prefill=self.prefill,
            decode=self.decode,
            loads=(Load(1, Tokens(values=(self.tokens[1],))),),
            memory_bytes=1 << 40,
            seed=self.seed,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bf16",
            kind="mha",
            page_size=self.page_size,
            rooms=1,
            transport=self.transport,
            ring_mb=self.ring,
            chunk_tokens=self.chunk_tokens,
        )

    def resolve(self) -> Plan:
        """Shape and ranks from the planner.

        Raises:
            CliError: it cannot be, with the arithmetic; or the agent's side is not installed.
        """
        return plan(self.request)

    def prefixed(self, prefix: str) -> SteadyPlan:
        """The same fleet whose ranks' names begin like this."""
        return replace(
            self,
            odd_pages={prefix + name: size for name, size in self.odd_pages.items()},
            odd_rings={prefix + name: mib for name, mib in self.odd_rings.items()},
            absent=frozenset(prefix + name for name in self.absent),
        )

    def start(
        self, name: str, rank: PlannedRank, planned: Plan, directory: Path, timeout_s: float, faults: str
    ) -> Start:
        """What one rank is told of itself; `faults` are in force there from the first moment."""
        pages = -(-self.tokens[1] // self.page_size)
        ring = self.odd_rings.get(name, self.ring)
        return replace(
            rank_start(planned, self.request, rank, name, directory, timeout_s),
            page_size=self.odd_pages.get(name, self.page_size),
            pool_pages=1 + self.slots * pages,
            aux_slots=self.slots,
            config={**planned["config"], **_TRANSFER_WORKERS, **SHORT_TIMINGS, **self.config, "staging_ring_mb": ring},
            steady=True,
            faults=faults,
            verify=self.verify,
        )
