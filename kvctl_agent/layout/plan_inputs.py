"""Inputs of the transfer plan, which the prefill and the decode side compare field by field before the first transfer.

The inputs are compared rather than the plans, so that a mismatch names the field ("page_size 64 ≠ 48").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.contract.choices import CP_MODES, RANK0
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, head_range
from kvctl_agent.layout.shape import ModelShape, Segment, segments
from kvctl_agent.layout.sizes import set_sizes

PLAN_VERSION = 5
"""Incremented whenever the same inputs result in another plan. 1: attention TP and DP, replicated heads, one stage.
2: context and pipeline parallelism, latents, draft layers, state. 3: unequal pages, context parallelism on decode."""

MAX_SPLIT = 4096
"""Largest number of transfer pages in a page; bounds the page lists that a peer's page size can cause."""

Wire = dict[str, int | str]


class Factor(NamedTuple):
    """A plan input whose values on the two sides differ; formatted as "page_size 64 ≠ 48"."""

    name: str
    local: int | str
    remote: int | str

    def __str__(self) -> str:
        return f"{self.name:.80} {self.local} ≠ {self.remote!s:.80}"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All inputs of the transfer plan.

    Attributes:
        shape: The model.
        page_size: Tokens per transfer page (see `layout.chunks`), the page of the plan and the protocol.
        chunk_pages: Transfer pages per cell of the chunk grid.
        prefill, decode: Parallel sizes of the two instances.
        cp_mode: One of `CP_MODES`.
        prefill_split, decode_split: Transfer pages in a page of the prefill and of the decode engine.
        stripe_pages: Consecutive transfer pages of a prompt on one decode cp rank.
        plan_version: `PLAN_VERSION` of the side that built the inputs.

    Raises:
        LayoutError: the two layouts cannot exchange KV; the text shows the arithmetic.
    """

    shape: ModelShape
    page_size: int
    chunk_pages: int
    prefill: ParallelConfig
    decode: ParallelConfig
    cp_mode: str = RANK0
    prefill_split: int = 1
    decode_split: int = 1
    stripe_pages: int = 1
    plan_version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        set_sizes(self, "page_size", "chunk_pages", "prefill_split", "decode_split", "stripe_pages", "plan_version")
        self._check_splits()
        for group in self.shape.groups:
            if self.chunk_pages * self.page_size % group.page_size:
                raise LayoutError(
                    f"chunk_tokens {self.chunk_pages * self.page_size}: it must be a multiple of the page of "
                    f"{group.page_size} tokens of group {group.name}"
                )
            if self.decode.cp > 1:
                raise LayoutError(
                    f"decode cp={self.decode.cp}: decode ranks cannot share the pages of group {group.name}; start the "
                    "decode instance with cp=1"
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
                    suffix = "" if segment.index == 0 else f" ({segment.name})"
                    raise LayoutError(f"{role} tp={side.tp}{suffix}: {error}") from None

    def _check_splits(self) -> None:
        """Raises LayoutError if the pages of a side cannot be divided into transfer pages."""
        for role, split in (("prefill", self.prefill_split), ("decode", self.decode_split)):
            if split > MAX_SPLIT:
                raise LayoutError(
                    f"{role} page_size {split * self.page_size}: it may be at most {MAX_SPLIT} times {self.page_size}, "
                    "the tokens of a transfer page"
                )
            for segment in self.segments:
                scales = [plane.name for plane in segment.planes if plane.name.endswith("scale")]
                if split > 1 and scales and segment.table == 0:
                    raise LayoutError(
                        f"{segment.name} has scales for each page ({', '.join(scales)}), so a {role} page of "
                        f"{split * self.page_size} tokens cannot be divided: use pages of equal size on both sides"
                    )

    def __hash__(self) -> int:
        # Plans are looked up by their inputs several times a room, and a hash of all fields of the model takes longer
        # than the rest of a look-up. A process meets few different inputs.
        return hash((self.page_size, self.prefill.tp, self.decode.tp))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the model: KV, draft and state components."""
        return segments(self.shape, self.page_size)

    def chunk_pages_of(self, table: int) -> int:
        """Returns the pages per cell of the chunk grid for the pages of a page table."""
        if table == 0:
            return self.chunk_pages
        return self.chunk_pages * self.page_size // self.shape.groups[table - 1].page_size

    def span(self, prefix_pages: int, total_pages: int, tokens: int = 0) -> tuple[int, int]:
        """Converts a room of the decode engine to transfer pages; returns those of the prefix and of the prompt.

        Args:
            prefix_pages, total_pages: Pages of the decode engine; a page of cp ranks that share a prompt counts once.
            tokens: Length of the prompt; 0 if its last page counts as full.

        Raises:
            LayoutError: the last page of the prompt is not the one that its length says.
        """
        split = self.decode_split * self.decode.cp
        total = -(-tokens // self.page_size) if tokens else total_pages * split
        if -(-total // split) != total_pages:
            raise LayoutError(
                f"{total_pages} pages of {split * self.page_size} tokens do not end where a prompt of {tokens} does"
            )
        return prefix_pages * split, total

    def to_wire(self) -> Wire:
        """Returns the inputs as a flat mapping from names such as "prefill.tp" to values, to compare with a peer's."""
        return {
            "plan_version": self.plan_version,
            **shape_to_wire(self.shape),
            "page_size": self.page_size,
            "chunk_pages": self.chunk_pages,
            **_side_to_wire("prefill", self.prefill),
            "prefill.split": self.prefill_split,
            **_side_to_wire("decode", self.decode),
            "decode.split": self.decode_split,
            "decode.stripe": self.stripe_pages,
            "cp_mode": self.cp_mode,
        }


@lru_cache(maxsize=64)
def shared(inputs: PlanInputs) -> PlanInputs:
    """Returns the same object for all equal inputs: a look-up by another one compares all fields of the model."""
    return inputs


def transfer_page(prefill: int, decode: int, interleave: int = 0) -> int:
    """Returns the tokens of a transfer page: the longest run that lies in one page of each side and on one decode rank.

    Args:
        prefill, decode: Tokens per page of the two sides.
        interleave: Consecutive tokens of a prompt on one of several decode cp ranks; 0 if decode has one cp rank.

    Raises:
        LayoutError: of two of the numbers, the smaller does not divide the larger, or a decode page has tokens that do
            not follow each other in whole runs.
    """
    if max(prefill, decode) % min(prefill, decode):
        raise LayoutError(f"{Factor('page_size', prefill, decode)}")
    if interleave and (decode % interleave or max(prefill, interleave) % min(prefill, interleave)):
        raise LayoutError(
            f"cp_interleave {interleave}: it must divide the decode page of {decode} tokens, and divide the prefill "
            f"page of {prefill} tokens or be a multiple of it"
        )
    return min(prefill, decode, interleave or decode)


def differences(local: Mapping[str, int | str], remote: Mapping[str, object]) -> tuple[Factor, ...]:
    """Returns the fields whose values differ between the local inputs and a peer's; empty if the plans are equal.

    A field that only one side has gets the value "absent" for the other side; a newer release may have more fields.
    """
    return tuple(
        Factor(name, local.get(name, "absent"), str(remote.get(name, "absent")))
        for name in {**local, **remote}
        if name not in local or name not in remote or local[name] != remote[name]
    )


def shape_to_wire(shape: ModelShape) -> Wire:
    """Returns a model's shape as a flat mapping; a draft model and state have fields only if the model has them."""
    wire: Wire = _kv_to_wire("shape", shape)
    if shape.draft is not None:
        wire |= _kv_to_wire("draft", shape.draft)
    for group in shape.groups:
        wire |= _kv_to_wire(f"group.{group.name}", group.kv)
        wire[f"group.{group.name}.page_size"] = group.page_size
        wire[f"group.{group.name}.layers"] = ",".join(map(str, group.layers))
    if len(shape.groups) > 1:
        wire["groups"] = ",".join(group.name for group in shape.groups)
    if len(shape.states) > 1:
        # A room's item lists are in this order, so both sides must have the same one.
        wire["states"] = ",".join(state.name for state in shape.states)
    for state in shape.states:
        layers = ",".join(map(str, state.layers))
        wire[f"state.{state.name}"] = f"{state.rows}x{state.heads}x{state.head_bytes} bytes beside layers {layers}"
    return wire


def _kv_to_wire(owner: str, shape: ModelShape) -> Wire:
    fields = ("num_layers", "num_kv_heads", "k_dim", "v_dim", "dtype_bytes", "kind", "k_scale_bytes", "v_scale_bytes")
    return {f"{owner}.{name}": getattr(shape, name) for name in fields}


def _side_to_wire(role: str, side: ParallelConfig) -> Wire:
    axes: Wire = {f"{role}.{axis}": getattr(side, axis) for axis in RankCoord._fields}
    return {**axes, f"{role}.stages": ",".join(map(str, side.stages)) or "even"}
