"""The model's KV geometry as both sides must agree on it; per-rank shapes follow from it, never the reverse.

Everything that moves for a room lies in *segments*: consecutive layers of one geometry. The target model's layers are
one, a draft model's another, and each component of per-request state is one more. A segment is the same thing
everywhere: layers of planes, a plane a list of pages (of a state: items), a page some rows, a row some heads. MLA's
latent is one head that every rank holds; a replicated state likewise. So one arithmetic serves them all.
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
    """One array of a layer: a page has `rows` rows of all heads, `head_bytes` each."""

    name: str
    rows: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """One component of per-request state: Mamba's rows, sliding-window pages, index pages.

    An item is `[rows, heads, head_bytes]` in each of its layers. `heads` is the axis over which tensor-parallel ranks
    share it, cut as KV heads are; 1 is a component that every rank holds whole, written by one elected rank.

    Args:
        layers: for each of its layers the KV layer it runs beside, in order, several beside one where they are more:
            that decides its pipeline stage.

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
                f"state {shown(self.name)}: its name must be a word of at most 64 letters, not a segment's"
            )
        for size in ("rows", "heads", "head_bytes"):
            object.__setattr__(self, size, check_size(f"state {self.name} {size}", getattr(self, size)))
        object.__setattr__(self, "layers", check_sizes(f"state {self.name} layer", self.layers, minimum=0))
        if not self.layers or list(self.layers) != sorted(self.layers):
            raise LayoutError(f"state {self.name}: layers {self.layers!s:.80} are not ascending layer numbers")

    @property
    def item_bytes(self) -> int:
        """Bytes of one item in one layer, over the whole model."""
        return self.rows * self.heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's KV cache.

    `num_kv_heads` comes from the model's configuration, not from "heads on this rank times tp", which is wrong as soon
    as heads are replicated. `k_dim` and `v_dim` may differ. `kind` is "mha" (per-head rows; MQA and GQA included) or
    "mla": one latent row of `k_dim` elements a token, no V, the same on every rank.

    Args:
        k_scale_bytes, v_scale_bytes: bytes of quantisation scales per page and head, 0 for none.
        draft: the draft model's layers, in a pool of their own; numbered after the target's, on its last stage.
        states: components of per-request state.

    Raises:
        LayoutError: a size is not a positive whole number, or the kind is not served.
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
        latent = self.kind == "mla"
        set_sizes(self, "num_layers", "num_kv_heads", "k_dim", "dtype_bytes")
        set_sizes(self, "v_dim", minimum=0 if latent else 1)
        set_sizes(self, "k_scale_bytes", "v_scale_bytes", minimum=0)
        if latent and (self.num_kv_heads, self.v_dim, self.v_scale_bytes) != (1, 0, 0):
            raise LayoutError(
                f"kind 'mla' has one latent row a token: num_kv_heads must be 1, v_dim and v_scale_bytes 0, "
                f"not {self.num_kv_heads}, {self.v_dim} and {self.v_scale_bytes}"
            )
        if not isinstance(self.draft, ModelShape | None):
            raise LayoutError(f"draft is {shown(self.draft)}: it must be a ModelShape")
        if not isinstance(self.states, tuple | list) or not all(isinstance(each, StateShape) for each in self.states):
            raise LayoutError(f"states is {shown(self.states)}: it must be a list of StateShape")
        object.__setattr__(self, "states", tuple(self.states))
        if self.draft is not None and (self.draft.draft is not None or self.draft.states):
            raise LayoutError("a draft model has no draft model and no state of its own here")
        names = [state.name for state in self.states]
        if len(set(names)) != len(names) or len(names) > MAX_STATES:
            raise LayoutError(f"state components {names}: each needs a name of its own, and there may be {MAX_STATES}")
        for state in self.states:
            if state.layers[-1] >= self.num_layers:
                raise LayoutError(
                    f"state {state.name}: layer {state.layers[-1]} is beyond the {self.num_layers} layers"
                )

    @property
    def k_head_bytes(self) -> int:
        """Bytes of K of one token and one head in one layer."""
        return self.k_dim * self.dtype_bytes

    @property
    def v_head_bytes(self) -> int:
        """Bytes of V of one token and one head in one layer; 0 for a latent."""
        return self.v_dim * self.dtype_bytes

    @property
    def token_head_bytes(self) -> int:
        """Bytes of K and V of one token and one head in one layer."""
        return self.k_head_bytes + self.v_head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token: all layers, all heads, counted once; scales and draft left out."""
        return self.num_layers * self.num_kv_heads * self.token_head_bytes

    def planes(self, page_size: int) -> tuple[Plane, ...]:
        """The arrays of one layer, in the order in which a part holds them."""
        if self.kind == "mla":
            planes = [Plane("latent", page_size, self.k_head_bytes), Plane("scale", 1, self.k_scale_bytes)]
        else:
            planes = [
                Plane("k", page_size, self.k_head_bytes),
                Plane("v", page_size, self.v_head_bytes),
                Plane("k_scale", 1, self.k_scale_bytes),
                Plane("v_scale", 1, self.v_scale_bytes),
            ]
        return tuple(plane for plane in planes if plane.head_bytes)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of one geometry.

    Attributes:
        index: its place in `segments`.
        name: "kv", "draft", or a state component's.
        layer_lo, layer_hi: its layers; KV and draft share one numbering, each state component has its own from 0.
        heads: over the whole model.
        planes: the arrays of each layer.
        beside: of a state, the KV layer that each of its layers runs beside; else empty.
    """

    index: int
    name: str
    layer_lo: int
    layer_hi: int
    heads: int
    planes: tuple[Plane, ...]
    beside: tuple[int, ...] = ()

    @property
    def state(self) -> bool:
        """Whether its pages are items of per-request state, with index lists of their own."""
        return bool(self.beside)

    @property
    def page_head_bytes(self) -> int:
        """Bytes of one page (of a state: one item), in one layer, of one head."""
        return sum(plane.rows * plane.head_bytes for plane in self.planes)


@lru_cache(maxsize=256)
def segments(shape: ModelShape, page_size: int) -> tuple[Segment, ...]:
    """Everything a model's rooms consist of: KV first, then the draft's, then each state component."""
    check_size("page_size", page_size)
    found = [Segment(0, "kv", 0, shape.num_layers, shape.num_kv_heads, shape.planes(page_size))]
    if shape.draft is not None:
        draft, first = shape.draft, shape.num_layers
        planes = draft.planes(page_size)
        found.append(Segment(1, "draft", first, first + draft.num_layers, draft.num_kv_heads, planes))
    for state in shape.states:
        plane = Plane(state.name, state.rows, state.head_bytes)
        count = len(state.layers)
        found.append(Segment(len(found), state.name, 0, count, state.heads, (plane,), state.layers))
    return tuple(found)
