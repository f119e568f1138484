"""Checks an engine's tensors and derives the geometry of each segment from their shapes, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.values import integer, shown
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.layout.sizes import check_size, check_sizes
from kvctl_agent.memory.region import Region


class TensorInfo(NamedTuple):
    """Address, shape, dtype and device of a torch tensor or numpy array; `device` is a GPU's number, or HOST."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    addr: int
    nbytes: int
    device: int = HOST

    @property
    def region(self) -> Region:
        """The tensor's memory by address, which needs no torch and supports dtypes that numpy lacks (bf16, fp8)."""
        return Region(self.addr, self.nbytes, self.device)

    @property
    def device_name(self) -> str:
        """The tensor's device for error texts: "the CPU" or "cuda:0"."""
        return "the CPU" if self.device == HOST else f"cuda:{self.device}"

    def expect(self, shape: tuple[int, ...], like: TensorInfo) -> None:
        """Raises MemoryLayoutError unless the tensor has this shape and the dtype of `like`."""
        if self.shape != shape:
            raise MemoryLayoutError(f"{self.name}: shape {self.shape}, expected {shape}")
        if self.dtype != like.dtype:
            raise MemoryLayoutError(f"{self.name}: dtype {self.dtype}, but {like.name} has {like.dtype}")


def check_layer_tensors(
    tensors: Sequence[Any], names: Iterable[str], inspect: Callable[[Any, str], TensorInfo]
) -> list[TensorInfo]:
    """Returns `inspect(tensor, name)` for the tensor of every layer of one plane; `names` are for error texts.

    Raises:
        MemoryLayoutError: the tensors differ in shape or dtype, or `inspect` raised it.
    """
    infos = [inspect(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
    for info in infos:
        info.expect(infos[0].shape, infos[0])
    return infos


def inspect_rows(tensor: Any, name: str, page_size: int) -> TensorInfo:
    """Checks and describes K or V of a layer, `[tokens, heads, head_dim]` (NHD).

    Raises:
        MemoryLayoutError: the tensor has another layout, or its tokens are not whole pages.
    """
    shape = _shape(tensor, name)
    if len(shape) == 3 and _is_hnd(tensor, shape):
        raise MemoryLayoutError(
            f"{name}: the memory of shape {shape} is HND (heads outermost), which is not supported; "
            "configure the engine for NHD, [tokens, heads, head_dim]"
        )
    if len(shape) != 3:
        raise MemoryLayoutError(
            f"{name}: shape {shape} has {len(shape)} dimensions; a pool is [tokens, heads, head_dim] (NHD) "
            "per layer. Pass a paged NHD tensor as a view of this shape; HND is not supported"
        )
    info = inspect_tensor(tensor, name)
    if shape[0] % page_size:
        hint = " (is it HND, heads first? that is not supported)" if shape[1] % page_size == 0 else ""
        raise MemoryLayoutError(f"{name}: {shape[0]} tokens are not whole pages of {page_size}{hint}")
    return info


def inspect_latent(tensor: Any, name: str, page_size: int) -> TensorInfo:
    """Checks and describes the latent rows of a layer, `[tokens, dim]` or `[tokens, 1, dim]`.

    Raises:
        MemoryLayoutError: the tensor has another shape, or its tokens are not whole pages.
    """
    shape = _shape(tensor, name)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 1):
        raise MemoryLayoutError(f"{name}: shape {shape}; a latent is [tokens, dim] or [tokens, 1, dim] per layer")
    info = inspect_tensor(tensor, name)
    if shape[0] % page_size:
        raise MemoryLayoutError(f"{name}: {shape[0]} tokens are not whole pages of {page_size}")
    return info


def inspect_tensor(tensor: Any, name: str) -> TensorInfo:
    """Checks a torch tensor or numpy array, and returns its address, shape and dtype; `name` is for error texts.

    Raises:
        MemoryLayoutError: the tensor is empty, read-only or not contiguous, or is on an unsupported device.
    """
    shape = _shape(tensor, name)
    device = HOST
    if isinstance(tensor, np.ndarray):
        contiguous, addr, itemsize = tensor.flags.c_contiguous, tensor.ctypes.data, tensor.itemsize
        if not tensor.flags.writeable:
            raise MemoryLayoutError(f"{name}: the array is read-only; a pool must be writable")
    else:
        if tensor.device.type not in ("cpu", "cuda"):
            raise MemoryLayoutError(f"{name}: on device {tensor.device}; a pool must be on the CPU or a CUDA GPU")
        if tensor.device.type == "cuda":
            device = tensor.device.index or 0
        contiguous, addr, itemsize = tensor.is_contiguous(), tensor.data_ptr(), tensor.element_size()
    if min(shape, default=0) == 0:
        raise MemoryLayoutError(f"{name}: shape {shape} is empty")
    if not contiguous:
        raise MemoryLayoutError(f"{name}: shape {shape} is not contiguous; pass the whole pool, not a slice")
    return TensorInfo(name, shape, str(tensor.dtype), itemsize, addr, itemsize * int(np.prod(shape)), device)


def common_device(infos: Iterable[TensorInfo]) -> int:
    """Returns the number of the GPU that has all tensors, or HOST.

    Raises:
        MemoryLayoutError: the tensors are on different devices; the text names two of them.
    """
    first, *others = infos
    for info in others:
        if info.device != first.device:
            raise MemoryLayoutError(
                f"{first.name} is on {first.device_name}, {info.name} on {info.device_name}; all KV must be on one "
                "device"
            )
    return first.device


def check_no_overlap(infos: Iterable[TensorInfo]) -> None:
    """Raises MemoryLayoutError if two tensors share memory, because transfers would overwrite one with the other."""
    for before, after in pairwise(sorted(infos, key=lambda info: info.addr)):
        if before.addr + before.nbytes > after.addr:
            first, second = sorted((before.name, after.name))
            raise MemoryLayoutError(f"{first} and {second} share memory; every layer needs its own tensors")


def _shape(tensor: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of a numpy array or a torch tensor, which is recognised by its `data_ptr` method.

    Raises:
        MemoryLayoutError: `tensor` is neither.
    """
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
        raise MemoryLayoutError(f"{name}: {type(tensor).__name__} is neither a torch tensor nor a numpy array")
    return tuple(int(size) for size in tensor.shape)


def _is_hnd(tensor: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether the tensor is a [tokens, heads, dim] view of [heads, tokens, dim] memory."""
    if isinstance(tensor, np.ndarray):
        strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
    else:
        strides = tuple(tensor.stride())
    tokens, heads, dim = shape
    return heads > 1 and tokens > 1 and strides == (dim, tokens * dim, 1)


Tensors = Sequence[Any]


@dataclass(frozen=True, slots=True, eq=False)
class DraftKV:
    """KV tensors of a draft model, which uses the page numbers of the target model.

    Attributes:
        k: K of each layer, or the latent rows if `v` is None, as for `KVPool.from_tensors` and `KVPool.mla`.
        v: V of each layer; None for a latent.
        total_kv_heads: KV heads of the draft model; 1 for a latent.
        k_scale, v_scale: For each layer the scales of each page; scales of a latent are passed as `k_scale`.
    """

    k: Tensors
    v: Tensors | None = None
    total_kv_heads: int = 1
    k_scale: Tensors | None = None
    v_scale: Tensors | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StateTensors:
    """Tensors of one component of per-request state, or of pages with page numbers of their own.

    Attributes:
        name: Name of the component, an identifier, the same on both sides.
        tensors: For each layer `[slots, ...]`, contiguous, on the device of the KV; empty if this rank's pipeline stage
            has no layer of the component.
        layers: For each layer of the component the KV layer whose pipeline stage holds it; None for the first KV
            layers. Used only if the agent is created without a model.
        heads: Size over the whole model of the dimension that is divided over tensor-parallel ranks. 1 if every rank
            has the whole component; then one elected rank sends it.
        axis: The divided dimension of a tensor (0 is the slots); None if the component is not divided.
    """

    name: str
    tensors: Tensors
    layers: Sequence[int] | None = None
    heads: int = 1
    axis: int | None = None


class TensorSpec(NamedTuple):
    """Checked tensors of one segment.

    Attributes:
        name: Name of the segment.
        shape: Shape of the model or state component, with the number of layers of this rank.
        heads: Heads on this rank.
        num_slots: Number of pages (for state: items).
        layers: For each layer, the tensor of each plane.
    """

    name: str
    shape: ModelShape | StateShape
    heads: int
    num_slots: int
    layers: list[tuple[TensorInfo, ...]]


def kv_spec(kv: DraftKV, page_size: int, name: str = "kv") -> TensorSpec:
    """Checks K and V, or latent rows, and their scales, and returns their description.

    `name` is "kv" for the target model and "draft" for the draft model.

    Raises:
        MemoryLayoutError: a tensor is unusable; the text names the layer and the tensor.
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
            f"{label}{count} latent layers; pass one tensor for every layer"
            if kv.v is None
            else f"{label}{count} K and {len(kv.v)} V layers; pass one K and one V for every layer"
        )
    if kv.v is None and (kv.v_scale is not None or total_kv_heads != 1):
        raise MemoryLayoutError(f"{label}latent: it has no V and one head; pass no v_scale and total_kv_heads=1")

    def layers(tensors: Tensors, plane: str, inspect: Any) -> list[TensorInfo]:
        if len(tensors) != len(kv.k):
            raise MemoryLayoutError(f"{label}{len(tensors)} {plane} tensors for {len(kv.k)} layers")
        return check_layer_tensors(tensors, [f"{label}layer {layer} {plane}" for layer in range(len(kv.k))], inspect)

    if kv.v is None:
        planes = [layers(kv.k, "latent", partial(inspect_latent, page_size=page_size))]
        first = planes[0][0]
        heads, k_dim, v_dim = 1, first.shape[-1], 0
    else:
        inspect = partial(inspect_rows, page_size=page_size)
        planes = [layers(kv.k, "k", inspect), layers(kv.v, "v", inspect)]
        first, first_v = planes[0][0], planes[1][0]
        heads, k_dim, v_dim = *first.shape[1:], first_v.shape[2]
        first_v.expect((*first.shape[:2], v_dim), first)
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
        planes.append(layers(tensors, plane, inspect_tensor))
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


def state_spec(state: StateTensors) -> TensorSpec:
    """Checks the tensors of a state component and returns their description.

    Raises:
        MemoryLayoutError: a tensor is unusable; the text names the layer.
        LayoutError: the component's name or KV layers are invalid.
    """
    if not isinstance(state.name, str):
        raise MemoryLayoutError(f"state name is {shown(state.name)}: it must be a string")
    if not isinstance(state.tensors, Sequence):
        raise MemoryLayoutError(
            f"{state.name}: tensors is {shown(state.tensors)}: it must be a list, one for each layer"
        )
    count = len(state.tensors)
    kv_layers = tuple(range(count)) if state.layers is None else check_sizes(f"{state.name} layer", state.layers, 0)
    total_heads = check_size(f"{state.name}: heads", state.heads, error=MemoryLayoutError)
    if len(kv_layers) != count:
        raise MemoryLayoutError(f"{state.name}: {count} tensors, but {len(kv_layers)} KV layers in `layers`")
    names = [f"{state.name} layer {layer}" for layer in range(count)]
    layers = check_layer_tensors(state.tensors, names, inspect_tensor)
    shape, axis = layers[0].shape, state.axis
    if axis is None:
        if total_heads != 1:
            raise MemoryLayoutError(
                f"{state.name}: {total_heads} heads over the whole model, but no axis; set axis to the dimension of "
                f"{shape} that is divided over ranks"
            )
        rows, heads, row = 1, 1, shape[1:]
    else:
        if (number := integer(axis)) is None or not 0 < number < len(shape):
            raise MemoryLayoutError(
                f"{state.name}: axis {shown(axis)} is not a dimension of an item; the shape is {shape}"
            )
        rows, heads, row = prod(shape[1:number]), shape[number], shape[number + 1 :]
    if total_heads % heads:
        raise MemoryLayoutError(
            f"{state.name}: heads is {total_heads}, not a multiple of the {heads} on this rank; "
            "pass the size over the whole model"
        )
    component = StateShape(state.name, kv_layers, rows, total_heads, prod(row) * layers[0].itemsize)
    return TensorSpec(state.name, component, heads, shape[0], [(layer,) for layer in layers])


def check_layers(name: str, tensors: object) -> None:
    """Raises MemoryLayoutError unless `tensors` is a sequence, one tensor for each layer; `name` is for the text."""
    if not isinstance(tensors, Sequence):
        raise MemoryLayoutError(f"{name} is {shown(tensors)}: it must be a list of tensors, one for each layer")


def _scale_bytes(scale: TensorInfo, num_pages: int, heads: int, latent: bool) -> int:
    """Returns the bytes of the scales of one page and head.

    Args:
        scale: Scales of one layer.
        num_pages: Pages of the pool.
        heads: Heads on this rank.
        latent: Whether the scales belong to a latent, which has no dimension for heads.

    Raises:
        MemoryLayoutError: the tensor has another shape.
    """
    expected = (num_pages,) if latent else (num_pages, heads)
    if scale.shape[: len(expected)] != expected:
        layout = "[pages, ...]" if latent else "[pages, heads, ...]"
        raise MemoryLayoutError(
            f"{scale.name}: shape {scale.shape}; scales are {layout}, one row per page, so the shape must begin with "
            f"{expected}"
        )
    return scale.itemsize * prod(scale.shape[len(expected) :])
