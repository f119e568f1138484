"""What an engine gives of each segment: tensors in its own words, read as planes of rows of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from kvctl_agent.contract.values import integer, shown
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.layout.sizes import check_size, check_sizes
from kvctl_agent.memory.tensor_checks import TensorInfo, check_layer_tensors, inspect_latent, inspect_rows, see

Tensors = Sequence[Any]


@dataclass(frozen=True, slots=True, eq=False)
class DraftKV:
    """One model's KV tensors. An engine gives them for a draft model, which has the page numbers of its target; the
    target's own are arguments of the pool, and are read the same way.

    Attributes:
        k: per layer K, or the latent where `v` is None, as `KVPool.from_tensors` and `KVPool.mla` take them.
        v: per layer V; None for a latent.
        total_kv_heads: KV heads of that model; 1 for a latent.
        k_scale, v_scale: per layer the scales of each page; a latent's are `k_scale`.
    """

    k: Tensors
    v: Tensors | None = None
    total_kv_heads: int = 1
    k_scale: Tensors | None = None
    v_scale: Tensors | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StateTensors:
    """One component of per-request state, or of pages with numbers of their own.

    Attributes:
        name: a word, the same on both sides.
        tensors: per layer `[slots, ...]`, contiguous, on the device of the KV; none where this rank's stage has none.
        layers: for each of its layers the KV layer that it runs beside; None: the first layers. Only asked for
            where the agent is given no model.
        heads: size of the dimension that is cut over tensor-parallel ranks, over the whole model; 1: every rank has
            the whole component, and one is elected to send it.
        axis: which dimension of a tensor that is (0 being the slots); None for a component that is not cut.
    """

    name: str
    tensors: Tensors
    layers: Sequence[int] | None = None
    heads: int = 1
    axis: int | None = None


class TensorSpec(NamedTuple):
    """One segment's tensors, checked.

    Attributes:
        name: the segment's.
        shape: of the model, or of the state component, with as many layers as this rank has.
        heads: on this rank.
        num_slots: pages or items.
        layers: for each layer its planes.
    """

    name: str
    shape: ModelShape | StateShape
    heads: int
    num_slots: int
    layers: list[tuple[TensorInfo, ...]]


def read_kv(kv: DraftKV, page_size: int, name: str = "kv") -> TensorSpec:
    """K and V, or latents, and their scales; `name` is "kv" for the target's.

    Raises:
        MemoryLayoutError: names the layer, the tensor and what is wrong with it.
    """
    label = "" if name == "kv" else f"{name} "
    scales = {"k_scale": kv.k_scale, "v_scale": kv.v_scale} if kv.v is not None else {"scale": kv.k_scale}
    first_plane = "k" if kv.v is not None else "latent"
    for plane, tensors in {first_plane: kv.k, "v": kv.v, **scales}.items():
        if plane == first_plane or tensors is not None:
            check_layers(f"{label}{plane}", tensors)
    total_kv_heads = check_size(f"{label}total_kv_heads", kv.total_kv_heads, error=MemoryLayoutError)
    if not kv.k or (kv.v is not None and len(kv.k) != len(kv.v)):
        count = len(kv.k)
        raise MemoryLayoutError(
            f"{label}{count} latent layers; give one tensor for every layer"
            if kv.v is None
            else f"{label}{count} K and {len(kv.v)} V layers; give one K and one V for every layer"
        )
    if kv.v is None and (kv.v_scale is not None or total_kv_heads != 1):
        raise MemoryLayoutError(f"{label}latent: it has no V and one head; give no v_scale and total_kv_heads=1")

    def layers(tensors: Tensors, plane: str, look: Any) -> list[TensorInfo]:
        if len(tensors) != len(kv.k):
            raise MemoryLayoutError(f"{label}{len(tensors)} {plane} tensors for {len(kv.k)} layers")
        return check_layer_tensors(tensors, [f"{label}layer {layer} {plane}" for layer in range(len(kv.k))], look)

    if kv.v is None:
        planes = [layers(kv.k, "latent", partial(inspect_latent, page_size=page_size))]
        first = planes[0][0]
        heads, k_dim, v_dim = 1, first.shape[-1], 0
    else:
        look = partial(inspect_rows, page_size=page_size)
        planes = [layers(kv.k, "k", look), layers(kv.v, "v", look)]
        first, other = planes[0][0], planes[1][0]
        heads, k_dim, v_dim = *first.shape[1:], other.shape[2]
        other.expect((*first.shape[:2], v_dim), first)
    if total_kv_heads % heads:
        raise MemoryLayoutError(
            f"{label}total_kv_heads is {total_kv_heads}, not a multiple of the {heads} heads on this rank; "
            "pass the number in the model's config"
        )
    num_pages = first.shape[0] // page_size
    scale_bytes = []
    for plane, tensors in scales.items():
        if tensors is None:
            scale_bytes.append(0)
            continue
        planes.append(layers(tensors, plane, see))
        scale_bytes.append(_scale_bytes(planes[-1][0], num_pages, heads, latent=kv.v is None))
    shape = ModelShape(
        num_layers=len(kv.k),
        num_kv_heads=total_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        dtype_bytes=first.itemsize,
        kind="mla" if kv.v is None else "mha",
        k_scale_bytes=scale_bytes[0],
        v_scale_bytes=sum(scale_bytes[1:]),
    )
    return TensorSpec(name, shape, heads, num_pages, list(zip(*planes, strict=True)))


def read_state(state: StateTensors) -> TensorSpec:
    """A component of state.

    Raises:
        MemoryLayoutError: names the layer and what is wrong with it.
        LayoutError: its name, or the layers it runs beside, are none.
    """
    if not isinstance(state.name, str):
        raise MemoryLayoutError(f"state name is {shown(state.name)}: it must be a word")
    if not isinstance(state.tensors, Sequence):
        raise MemoryLayoutError(
            f"{state.name}: tensors is {shown(state.tensors)}: it must be a list, one for each layer"
        )
    count = len(state.tensors)
    beside = tuple(range(count)) if state.layers is None else check_sizes(f"{state.name} layer", state.layers, 0)
    of_model = check_size(f"{state.name}: heads", state.heads, error=MemoryLayoutError)
    if len(beside) != count:
        raise MemoryLayoutError(f"{state.name}: {count} tensors, but {len(beside)} layers that they run beside")
    layers = check_layer_tensors(state.tensors, [f"{state.name} layer {layer}" for layer in range(count)], see)
    shape, axis = layers[0].shape, state.axis
    if axis is None:
        if of_model != 1:
            raise MemoryLayoutError(
                f"{state.name}: {of_model} heads over the whole model, but no axis; say which of {shape} is cut"
            )
        rows, heads, row = 1, 1, shape[1:]
    else:
        if (number := integer(axis)) is None or not 0 < number < len(shape):
            raise MemoryLayoutError(
                f"{state.name}: axis {shown(axis)} is no dimension of an item; the shape is {shape}"
            )
        rows, heads, row = prod(shape[1:number]), shape[number], shape[number + 1 :]
    if of_model % heads:
        raise MemoryLayoutError(
            f"{state.name}: heads is {of_model}, not a multiple of the {heads} on this rank; "
            "pass the size over the whole model"
        )
    component = StateShape(state.name, beside, rows, of_model, prod(row) * layers[0].itemsize)
    return TensorSpec(state.name, component, heads, shape[0], [(layer,) for layer in layers])


def check_layers(name: str, tensors: object) -> None:
    """Raises MemoryLayoutError for what is no list of tensors."""
    if not isinstance(tensors, Sequence):
        raise MemoryLayoutError(f"{name} is {shown(tensors)}: it must be a list of tensors, one for each layer")


def _scale_bytes(scale: TensorInfo, num_pages: int, heads: int, latent: bool) -> int:
    """Bytes of one page's and head's scales."""
    wanted = (num_pages,) if latent else (num_pages, heads)
    if scale.shape[: len(wanted)] != wanted:
        words = "[pages, ...]" if latent else "[pages, heads, ...]"
        raise MemoryLayoutError(
            f"{scale.name}: shape {scale.shape}; scales are {words}, one row a page, so it must begin with {wanted}"
        )
    return scale.itemsize * prod(scale.shape[len(wanted) :])
