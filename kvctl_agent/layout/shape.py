"""Geometry of a model's KV cache and per-request state, on which both sides must agree.

The shape on each rank is derived from the shape of the model, never the reverse. All data of a room is in *segments*:
consecutive layers of one geometry. The target model's layers are one segment, a draft model's layers another, and each
component of per-request state one more. Layers whose pages the engine manages in tables of their own, such as those
with sliding-window attention, are a KV group, which is a segment as well. Every segment has the same structure: a layer
consists of planes, a plane of pages (for state: items), a page of rows, a row of heads. An MLA latent is one head that
every rank holds, and so is a replicated state component, so the same arithmetic serves all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from kvctl_agent.contract.values import shown
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_size, check_sizes, set_sizes

KINDS = ("mha", "mla")
MAX_STATES = 16
MAX_GROUPS = 16
_KV_NAMES = ("kv", "draft")


class Plane(NamedTuple):
    """One array of a layer, for example K. A page has `rows` rows; a row has `head_bytes` bytes for each head."""

    name: str
    rows: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """One component of per-request state, for example Mamba state, sliding-window pages or index pages.

    Attributes:
        name: An identifier, the same on both sides.
        layers: For each layer of the component the KV layer whose pipeline stage holds it, ascending. A KV layer may
            occur several times.
        rows: Number of rows of an item. In each layer an item is `[rows, heads, head_bytes]`.
        heads: Size of the axis that is divided over tensor-parallel ranks as KV heads are. 1 if every rank holds the
            whole component; then one elected rank writes it.
        head_bytes: Bytes of one head in one row.

    Raises:
        LayoutError: a size is not a positive whole number, or the layers are not ascending.
    """

    name: str
    layers: tuple[int, ...]
    rows: int
    heads: int
    head_bytes: int

    def __post_init__(self) -> None:
        _check_name("state", self.name)
        for size in ("rows", "heads", "head_bytes"):
            object.__setattr__(self, size, check_size(f"state {self.name} {size}", getattr(self, size)))
        object.__setattr__(self, "layers", _ascending(f"state {self.name}", self.layers))


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has page tables of its own, such as layers with sliding-window attention, or an indexer.

    A room may need only the last pages of a group, those in the window. Which of them are transferred is decided for
    each room by the pages that the decode engine passes.

    Attributes:
        name: An identifier, the same on both sides.
        kv: Shape of the group's layers.
        layers: For each of them the KV layer whose pipeline stage holds it and with which it is computed, ascending. A
            KV layer may occur several times.
        page_size: Tokens per page, the same on both sides.

    Raises:
        LayoutError: a field is not of this form.
    """

    name: str
    kv: ModelShape
    layers: tuple[int, ...]
    page_size: int

    def __post_init__(self) -> None:
        _check_name("group", self.name)
        if not isinstance(self.kv, ModelShape) or self.kv.draft or self.kv.states or self.kv.groups:
            raise LayoutError(f"group {self.name}: kv must be a ModelShape without draft, states and groups")
        set_sizes(self, "page_size")
        object.__setattr__(self, "layers", _ascending(f"group {self.name}", self.layers))
        if len(self.layers) != self.kv.num_layers:
            raise LayoutError(f"group {self.name}: {self.kv.num_layers} layers, but {len(self.layers)} KV layers")


def _check_name(kind: str, name: object) -> None:
    """Raises LayoutError unless the name of a state component or KV group is an identifier of its own."""
    if not isinstance(name, str) or not name.isidentifier() or name in _KV_NAMES or len(name) > 64:
        raise LayoutError(
            f"{kind} {shown(name)}: the name must be an identifier of at most 64 characters other than "
            f"{', '.join(_KV_NAMES)}"
        )


def _ascending(owner: str, values: object) -> tuple[int, ...]:
    """Returns layer numbers as ints; raises LayoutError unless they are ascending."""
    layers = check_sizes(f"{owner} layer", values, minimum=0)
    if not layers or list(layers) != sorted(layers):
        raise LayoutError(f"{owner}: layers {layers!s:.80} are not ascending layer numbers")
    return layers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model's KV cache and per-request state.

    Attributes:
        num_layers: Number of layers with a KV cache.
        num_kv_heads: Number of KV heads in the model's configuration. The heads on a rank times tp differ from it if
            heads are replicated.
        k_dim, v_dim: Elements of K and V per token and head.
        dtype_bytes: Bytes of an element.
        kind: "mha" (one row per token and head; includes MQA and GQA) or "mla" (one latent row of `k_dim` elements per
            token, no V, the same on every rank).
        k_scale_bytes, v_scale_bytes: Bytes of quantisation scales per page and head; 0 for none.
        draft: The draft model. Its layers are numbered after the target's and are on the last pipeline stage.
        states: Components of per-request state.
        groups: KV groups.

    Raises:
        LayoutError: a size is not a positive whole number, or the kind is unknown.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype_bytes: int
    kind: str = "mha"
    k_scale_bytes: int = 0
    v_scale_bytes: int = 0
    draft: ModelShape | None = None
    states: tuple[StateShape, ...] = ()
    groups: tuple[KVGroup, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise LayoutError(f"kind {shown(self.kind)} is unknown: it must be one of {', '.join(KINDS)}")
        is_latent = self.kind == "mla"
        set_sizes(self, "num_layers", "num_kv_heads", "k_dim", "dtype_bytes")
        set_sizes(self, "v_dim", minimum=0 if is_latent else 1)
        set_sizes(self, "k_scale_bytes", "v_scale_bytes", minimum=0)
        if is_latent and (self.num_kv_heads, self.v_dim, self.v_scale_bytes) != (1, 0, 0):
            raise LayoutError(
                f"kind 'mla' has one latent row per token: num_kv_heads must be 1, v_dim and v_scale_bytes 0, "
                f"not {self.num_kv_heads}, {self.v_dim} and {self.v_scale_bytes}"
            )
        if not isinstance(self.draft, ModelShape | None):
            raise LayoutError(f"draft is {shown(self.draft)}: it must be a ModelShape")
        if not isinstance(self.states, tuple | list) or not all(isinstance(each, StateShape) for each in self.states):
            raise LayoutError(f"states is {shown(self.states)}: it must be a list of StateShape")
        object.__setattr__(self, "states", tuple(self.states))
        if not isinstance(self.groups, tuple | list) or not all(isinstance(each, KVGroup) for each in self.groups):
            raise LayoutError(f"groups is {shown(self.groups)}: it must be a list of KVGroup")
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.draft is not None and (self.draft.draft is not None or self.draft.states or self.draft.groups):
            raise LayoutError("the draft model must not have a draft model, state components or groups of its own")
        parts: tuple[KVGroup | StateShape, ...] = (*self.groups, *self.states)
        names = [part.name for part in parts]
        if len(set(names)) != len(names) or len(self.states) > MAX_STATES or len(self.groups) > MAX_GROUPS:
            raise LayoutError(
                f"groups and state components {names}: names must be unique, and at most {MAX_GROUPS} groups and "
                f"{MAX_STATES} components are allowed"
            )
        for part in parts:
            if part.layers[-1] >= self.num_layers:
                raise LayoutError(f"{part.name}: layer {part.layers[-1]} is beyond the {self.num_layers} layers")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers and heads, without replicas, scales and the draft model."""
        return self.num_layers * self.num_kv_heads * (self.k_dim + self.v_dim) * self.dtype_bytes

    def planes(self, page_size: int) -> tuple[Plane, ...]:
        """Returns the planes of one layer with `page_size` tokens per page, in the order in which a part has them."""
        k_head_bytes, v_head_bytes = self.k_dim * self.dtype_bytes, self.v_dim * self.dtype_bytes
        if self.kind == "mla":
            planes = [Plane("latent", page_size, k_head_bytes), Plane("scale", 1, self.k_scale_bytes)]
        else:
            planes = [
                Plane("k", page_size, k_head_bytes),
                Plane("v", page_size, v_head_bytes),
                Plane("k_scale", 1, self.k_scale_bytes),
                Plane("v_scale", 1, self.v_scale_bytes),
            ]
        return tuple(plane for plane in planes if plane.head_bytes)


def whole_model(stages: Sequence[ModelShape]) -> ModelShape:
    """Returns the shape of a model from the shapes of its pipeline stages, whose layers are numbered from 0 in each.

    Raises:
        LayoutError: a stage other than the last has a draft model, the stages differ in their state components, or
            have KV groups in different orders.
    """
    if any(stage.draft for stage in stages[:-1]):
        raise LayoutError("the draft model must be on the last pipeline stage")
    firsts = list(accumulate((stage.num_layers for stage in stages), initial=0))
    names = dict.fromkeys(group.name for stage in stages for group in stage.groups)
    orders = [[name for name in names if name in {group.name for group in stage.groups}] for stage in stages]
    if orders != [[group.name for group in stage.groups] for stage in stages]:
        raise LayoutError("the pipeline stages have KV groups in different orders")
    if len({tuple(state.name for state in stage.states) for stage in stages}) > 1:
        raise LayoutError("each pipeline stage must have all state components")
    groups = []
    for name in names:
        held = [(first, group) for first, stage in zip(firsts, stages, strict=False) for group in stage.groups
                if group.name == name]  # fmt: skip
        layers = tuple(first + layer for first, group in held for layer in group.layers)
        groups.append(replace(held[0][1], kv=replace(held[0][1].kv, num_layers=len(layers)), layers=layers))
    states = []
    for same in zip(*(stage.states for stage in stages), strict=True):  # one component, on each stage
        layers = tuple(first + layer for first, state in zip(firsts, same, strict=False) for layer in state.layers)
        states.append(replace(same[0], layers=layers))
    return replace(stages[-1], num_layers=firsts[-1], groups=tuple(groups), states=tuple(states))


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of one geometry.

    Attributes:
        index: Position in the tuple that `segments` returns.
        name: "kv", "draft", or the name of a KV group or state component.
        layer_lo, layer_hi: Layers [layer_lo, layer_hi). KV, draft and group layers share one numbering, in this order;
            the layers of each state component are numbered from 0.
        heads: Number of heads in the whole model.
        planes: The arrays of each layer.
        kv_layers: For each layer of a group or state component, the KV layer whose pipeline stage holds it; empty for
            KV and draft.
        table: The page table that has the segment's pages: 0 for KV and draft, 1 for the first KV group, and so on.
            None for per-request state, whose items have index lists of their own.
    """

    index: int
    name: str
    layer_lo: int
    layer_hi: int
    heads: int
    planes: tuple[Plane, ...]
    kv_layers: tuple[int, ...] = ()
    table: int | None = 0

    @property
    def state(self) -> bool:
        """Whether the segment is per-request state rather than KV pages."""
        return self.table is None

    def beside(self, lo: int, hi: int) -> tuple[int, int]:
        """Returns the layers [lo, hi) of a group or state component that belong to KV layers [lo, hi)."""
        return self.layer_lo + bisect_left(self.kv_layers, lo), self.layer_lo + bisect_left(self.kv_layers, hi)

    @property
    def page_head_bytes(self) -> int:
        """Bytes of one head of one page (for state: one item) in one layer, over all planes."""
        return sum(plane.rows * plane.head_bytes for plane in self.planes)


@lru_cache(maxsize=256)
def segments(shape: ModelShape, page_size: int) -> tuple[Segment, ...]:
    """Returns the segments of a model: KV, the draft model if there is one, each KV group, each state component."""
    check_size("page_size", page_size)
    result = [Segment(0, "kv", 0, shape.num_layers, shape.num_kv_heads, shape.planes(page_size))]
    if shape.draft is not None:
        draft, first = shape.draft, shape.num_layers
        planes = draft.planes(page_size)
        result.append(Segment(1, "draft", first, first + draft.num_layers, draft.num_kv_heads, planes))
    end = result[-1].layer_hi
    for table, group in enumerate(shape.groups, 1):
        planes, first = group.kv.planes(group.page_size), end
        end += group.kv.num_layers
        result.append(Segment(len(result), group.name, first, end, group.kv.num_kv_heads, planes, group.layers, table))
    for state in shape.states:
        plane = Plane(state.name, state.rows, state.head_bytes)
        count = len(state.layers)
        result.append(Segment(len(result), state.name, 0, count, state.heads, (plane,), state.layers, None))
    return tuple(result)
