"""Geometry of a model's KV cache and per-request state, on which both sides must agree.

The shape on each rank is derived from the shape of the model, never the reverse. All data of a room is in *segments*:
consecutive layers of one geometry. The target model's layers are one segment, a draft model's layers another, and each
component of per-request state one more. Every segment has the same structure: a layer consists of planes, a plane of
pages (for state: items), a page of rows, a row of heads. An MLA latent is one head that every rank holds, and so is a
replicated state component, so the same arithmetic serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.contract.values import shown
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_size, check_sizes, set_sizes

KINDS = ("mha", "mla")
MAX_STATES = 16
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
        if (
            not isinstance(self.name, str)
            or not self.name.isidentifier()
            or self.name in _KV_NAMES
            or len(self.name) > 64
        ):
            raise LayoutError(
                f"state {shown(self.name)}: the name must be an identifier of at most 64 characters other than "
                f"{', '.join(_KV_NAMES)}"
            )
        for size in ("rows", "heads", "head_bytes"):
            object.__setattr__(self, size, check_size(f"state {self.name} {size}", getattr(self, size)))
        object.__setattr__(self, "layers", check_sizes(f"state {self.name} layer", self.layers, minimum=0))
        if not self.layers or list(self.layers) != sorted(self.layers):
            raise LayoutError(f"state {self.name}: layers {self.layers!s:.80} are not ascending layer numbers")


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
        if self.draft is not None and (self.draft.draft is not None or self.draft.states):
            raise LayoutError("the draft model must not have a draft model or state components of its own")
        names = [state.name for state in self.states]
        if len(set(names)) != len(names) or len(names) > MAX_STATES:
            raise LayoutError(f"state components {names}: names must be unique, and at most {MAX_STATES} are allowed")
        for state in self.states:
            if state.layers[-1] >= self.num_layers:
                raise LayoutError(
                    f"state {state.name}: layer {state.layers[-1]} is beyond the {self.num_layers} layers"
                )

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


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of one geometry.

    Attributes:
        index: Position in the tuple that `segments` returns.
        name: "kv", "draft", or the name of a state component.
        layer_lo, layer_hi: Layers [layer_lo, layer_hi). KV and draft layers share one numbering; the layers of each
            state component are numbered from 0.
        heads: Number of heads in the whole model.
        planes: The arrays of each layer.
        kv_layers: For each layer of a state component, the KV layer whose pipeline stage holds it; empty for KV and
            draft.
    """

    index: int
    name: str
    layer_lo: int
    layer_hi: int
    heads: int
    planes: tuple[Plane, ...]
    kv_layers: tuple[int, ...] = ()

    @property
    def state(self) -> bool:
        """Whether the segment is per-request state, whose items have index lists of their own, rather than KV pages."""
        return bool(self.kv_layers)

    @property
    def page_head_bytes(self) -> int:
        """Bytes of one head of one page (for state: one item) in one layer, over all planes."""
        return sum(plane.rows * plane.head_bytes for plane in self.planes)


@lru_cache(maxsize=256)
def segments(shape: ModelShape, page_size: int) -> tuple[Segment, ...]:
    """Returns the segments of a model: KV, then the draft model if there is one, then each state component."""
    check_size("page_size", page_size)
    result = [Segment(0, "kv", 0, shape.num_layers, shape.num_kv_heads, shape.planes(page_size))]
    if shape.draft is not None:
        draft, first = shape.draft, shape.num_layers
        planes = draft.planes(page_size)
        result.append(Segment(1, "draft", first, first + draft.num_layers, draft.num_kv_heads, planes))
    for state in shape.states:
        plane = Plane(state.name, state.rows, state.head_bytes)
        count = len(state.layers)
        result.append(Segment(len(result), state.name, 0, count, state.heads, (plane,), state.layers))
    return tuple(result)
