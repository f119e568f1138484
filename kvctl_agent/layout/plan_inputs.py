"""Everything the plan follows from: both sides build it, and compare it field by field before anything moves.

The inputs are compared, not the result, so that a mismatch names the factor ("page_size 64 ≠ 32").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.context_parallel import CP_MODES
from kvctl_agent.layout.heads import head_range
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.shape import ModelShape, Segment, segments
from kvctl_agent.layout.sizes import set_sizes

PLAN_VERSION = 2
"""Raised whenever the same inputs would give another plan. 1: attention TP and DP, replicated heads, one stage.
2: context and pipeline parallelism, latents, draft layers, state."""

Wire = dict[str, int | str]


class Factor(NamedTuple):
    """One plan input on which the two sides differ."""

    name: str
    mine: int | str
    theirs: int | str

    def __str__(self) -> str:
        return f"{self.name:.80} {self.mine} ≠ {self.theirs!s:.80}"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything the plan follows from, and nothing else.

    Raises:
        LayoutError: the two layouts cannot exchange KV; the text has the arithmetic.
    """

    shape: ModelShape
    page_size: int
    chunk_pages: int
    prefill: ParallelConfig
    decode: ParallelConfig
    cp_mode: str = "rank0"
    plan_version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        set_sizes(self, "page_size", "chunk_pages", "plan_version")
        if self.decode.cp != 1:
            raise LayoutError(
                f"decode cp={self.decode.cp}: decode has no context parallelism; start the decode instance with cp=1"
            )
        if self.cp_mode not in CP_MODES:
            raise LayoutError(f"cp_mode {self.cp_mode!r:.40} is unknown: it must be one of {', '.join(CP_MODES)}")
        for role, side in (("prefill", self.prefill), ("decode", self.decode)):
            try:
                side.stage_range(self.shape.num_layers, 0)
            except LayoutError as error:
                raise LayoutError(f"{role} pp={side.pp}: {error}") from None
            for segment in self.segments:
                try:
                    head_range(segment.heads, side.tp, 0)
                except LayoutError as error:
                    what = "" if segment.index == 0 else f" ({segment.name})"
                    raise LayoutError(f"{role} tp={side.tp}{what}: {error}") from None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What a room of this model consists of."""
        return segments(self.shape, self.page_size)

    def to_wire(self) -> Wire:
        """The inputs as flat named fields, for example "prefill.tp"."""
        return {
            "plan_version": self.plan_version,
            **shape_to_wire(self.shape),
            "page_size": self.page_size,
            "chunk_pages": self.chunk_pages,
            **_side_to_wire("prefill", self.prefill),
            **_side_to_wire("decode", self.decode),
            "cp_mode": self.cp_mode,
        }


def differences(mine: Mapping[str, int | str], theirs: Mapping[str, object]) -> tuple[Factor, ...]:
    """The fields on which a peer's inputs differ from ours; empty when the plans are the same.

    A field that only one side knows is "absent" on the other: a newer release compares more.
    """
    return tuple(
        Factor(name, mine.get(name, "absent"), str(theirs.get(name, "absent")))
        for name in {**mine, **theirs}
        if name not in mine or name not in theirs or mine[name] != theirs[name]
    )


def shape_to_wire(shape: ModelShape) -> Wire:
    """A model's shape as flat named fields; what it does not have is left out."""
    wire: Wire = _kv_to_wire("shape", shape)
    if shape.draft is not None:
        wire |= _kv_to_wire("draft", shape.draft)
    if len(shape.states) > 1:
        wire["states"] = ",".join(state.name for state in shape.states)  # lists of items go by their order
    for state in shape.states:
        beside = ",".join(map(str, state.layers))
        wire[f"state.{state.name}"] = f"{state.rows}x{state.heads}x{state.head_bytes} bytes beside layers {beside}"
    return wire


def _kv_to_wire(owner: str, shape: ModelShape) -> Wire:
    fields = ("num_layers", "num_kv_heads", "k_dim", "v_dim", "dtype_bytes", "kind", "k_scale_bytes", "v_scale_bytes")
    return {f"{owner}.{name}": getattr(shape, name) for name in fields}


def _side_to_wire(role: str, side: ParallelConfig) -> Wire:
    axes: Wire = {f"{role}.{axis}": getattr(side, axis) for axis in RankCoord._fields}
    return {**axes, f"{role}.stages": ",".join(map(str, side.stages)) or "even"}
