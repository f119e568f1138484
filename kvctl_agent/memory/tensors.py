"""Checks an engine's tensors and derives the geometry of each segment from their shapes, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.values import integer, shown
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.shape import KVGroup, ModelShape, StateShape
from kvctl_agent.layout.sizes import MAX_SIZE, check_size, check_sizes
from kvctl_agent.memory.addresses import PlaneStrides, nested_extent
from kvctl_agent.memory.region import Region

_MAX_ADDRESS = (1 << 63) - 1  # address arithmetic is int64
_MAX_DTYPE = 256
_MOST_WORK = 1_000_000  # a few ms, of `numpy.shares_memory`


class TensorInfo(NamedTuple):
    """Address, shape, strides, dtype and device of a torch tensor or numpy array.

    `nbytes` is the distance from the first element to the end of the last, `strides` are in bytes (empty if the tensor
    is contiguous), and `device` is a GPU's number, or HOST.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    addr: int
    nbytes: int
    device: int = HOST
    strides: tuple[int, ...] = ()

    @property
    def region(self) -> Region:
        """The tensor's memory by address, which needs no torch and supports dtypes that numpy lacks (bf16, fp8)."""
        return Region(self.addr, self.nbytes, self.device)

    @property
    def device_name(self) -> str:
        """The tensor's device for error texts: "the CPU" or "cuda:0"."""
        return "the CPU" if self.device == HOST else f"cuda:{self.device}"

    @property
    def element(self) -> str:
        """Name of the elements, the same for torch and numpy; "" if the dtype is only storage for other elements.

        Unsigned integers are: engines keep fp8 in uint8, and numpy has no bfloat16. So are raw bytes and `Buffer`.
        """
        name = self.dtype.removeprefix("torch.")
        return name if name.isidentifier() and not name.startswith(("uint", "bits")) else ""

    def expect(self, shape: tuple[int, ...], like: TensorInfo) -> None:
        """Raises MemoryLayoutError unless the tensor has this shape, and the dtype of `like`."""
        if self.shape != shape:
            raise MemoryLayoutError(f"{self.name}: shape {self.shape}, expected {shape}")
        if self.dtype != like.dtype:
            raise MemoryLayoutError(f"{self.name}: dtype {self.dtype}, but {like.name} has {like.dtype}")


def check_layer_tensors(
    tensors: Sequence[Any], names: Iterable[str], inspect: Callable[[Any, str], TensorInfo]
) -> list[TensorInfo]:
    """Returns `inspect(tensor, name)` for the tensor of every layer of one plane; `names` are for error texts.

    Raises:
        MemoryLayoutError: the tensors differ in shape, strides or dtype, or `inspect` raised it.
    """
    infos = [inspect(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
    for info in infos:
        info.expect(infos[0].shape, infos[0])
        if info.strides != infos[0].strides:
            raise MemoryLayoutError(
                f"{info.name}: strides of {info.strides} bytes, but {infos[0].name} has {infos[0].strides}; all layers "
                "need the same strides"
            )
    return infos


KV_AXES = "tokens heads dim"
"""Axes of a contiguous K or V tensor of a layer."""
_AXES = {"pages", "tokens", "heads", "dim"}


class KVSizes(NamedTuple):
    """Sizes and strides of K, V or latents of one layer."""

    num_pages: int
    heads: int
    dim: int
    strides: PlaneStrides


def check_axes(axes: object) -> tuple[str, ...]:
    """Returns the names in `axes`, such as "pages heads tokens dim".

    Raises:
        MemoryLayoutError: `axes` does not name tokens, at most pages and heads, and dim last.
    """
    names = tuple(axes.split()) if isinstance(axes, str) else ()
    if len(set(names)) != len(names) or not {"tokens", "dim"} <= set(names) <= _AXES or names[-1] != "dim":
        raise MemoryLayoutError(
            f"axes is {shown(axes)}: it must name the dimensions of a layer's K, such as {KV_AXES!r} or "
            "'pages heads tokens dim', with dim last"
        )
    return names


def kv_sizes(info: TensorInfo, axes: tuple[str, ...], page_size: int) -> KVSizes:
    """Returns the sizes and strides of K, V or latents of a layer, whose dimensions are `axes`.

    Raises:
        MemoryLayoutError: the tensor has other dimensions, or its tokens are not whole pages.
    """
    if len(info.shape) != len(axes):
        raise MemoryLayoutError(
            f"{info.name}: shape {info.shape} has {len(info.shape)} dimensions, but axes is {' '.join(axes)!r}; pass "
            "axes= with their names, such as 'pages heads tokens dim'; pass views of a tensor that K and V share"
        )
    shape, strides = dict(zip(axes, info.shape, strict=True)), dict(zip(axes, info.strides, strict=True))
    if "pages" in shape and shape["tokens"] != page_size:
        raise MemoryLayoutError(f"{info.name}: pages of {shape['tokens']} tokens, but page_size is {page_size}")
    if shape["tokens"] % page_size:
        hint = " (is it HND? then pass axes=)" if shape.get("heads", 1) % page_size == 0 else ""
        raise MemoryLayoutError(f"{info.name}: {shape['tokens']} tokens are not whole pages of {page_size}{hint}")
    row, dim_bytes = strides["tokens"], shape["dim"] * info.itemsize
    page = strides.get("pages", page_size * row)
    num_pages = shape.get("pages", shape["tokens"] // page_size)
    return KVSizes(
        num_pages, shape.get("heads", 1), shape["dim"], PlaneStrides(page, row, strides.get("heads", dim_bytes))
    )


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one layer that an engine describes by its address, in place of a tensor `[items, *shape]`.

    An item is a page, or one slot of per-request state. The caller keeps the memory alive.

    Attributes:
        nbytes: Bytes of the memory, a multiple of `item_bytes`.
        item_bytes: Bytes from one item to the next.
        shape: Elements in each dimension of an item.
        strides: Bytes from one element to the next in each dimension of an item; None if the item is contiguous.
        offset: Bytes from the start of an item to its first element.
        gpu: Number of the GPU that has the memory; None for the host.
    """

    address: int
    nbytes: int
    item_bytes: int
    shape: Sequence[int]
    dtype_bytes: int = 1
    strides: Sequence[int] | None = None
    offset: int = 0
    gpu: int | None = None


def _inspect_buffer(buffer: Buffer, name: str) -> TensorInfo:
    """Checks and describes memory that is given by its address; `name` is for error texts.

    Raises:
        MemoryLayoutError: a number is malformed, the elements of an item overlap or are not inside the item, or the
            last dimension is not contiguous.
    """
    limits = {"address": _MAX_ADDRESS, "nbytes": _MAX_ADDRESS, "item_bytes": _MAX_ADDRESS, "dtype_bytes": MAX_SIZE}
    addr, nbytes, item_bytes, itemsize = (
        check_size(f"{name}: {field}", getattr(buffer, field), 1, limit, MemoryLayoutError)
        for field, limit in limits.items()
    )
    offset = check_size(f"{name}: offset", buffer.offset, 0, error=MemoryLayoutError)
    device = HOST if buffer.gpu is None else check_size(f"{name}: gpu", buffer.gpu, 0, error=MemoryLayoutError)
    shape = check_sizes(f"{name}: shape", buffer.shape, error=MemoryLayoutError)
    strides = dense = _contiguous(shape, itemsize)
    if buffer.strides is not None:
        strides = check_sizes(f"{name}: strides", buffer.strides, error=MemoryLayoutError)
    if addr + nbytes > _MAX_ADDRESS or nbytes % item_bytes:
        raise MemoryLayoutError(f"{name}: {nbytes} bytes at address {addr} are not whole items of {item_bytes} bytes")
    if not shape or len(strides) != len(shape):
        raise MemoryLayoutError(f"{name}: strides {strides} for items of shape {shape}; give one for each dimension")
    strides = _meaningful(shape, strides, dense)
    extent = nested_extent(itemsize, *zip(shape, strides, strict=True))
    if extent is None or offset + extent > item_bytes or strides[-1] != itemsize:
        raise MemoryLayoutError(
            f"{name}: an item of {item_bytes} bytes cannot have {shape} elements of {itemsize} bytes at strides of "
            f"{strides} bytes from offset {offset} on, with the last dimension contiguous"
        )
    count = nbytes // item_bytes
    return TensorInfo(
        name,
        (count, *shape),
        f"{itemsize}-byte elements",
        itemsize,
        addr + offset,
        (count - 1) * item_bytes + extent,
        device,
        (item_bytes, *strides),
    )


def inspect_strided(tensor: Any, name: str) -> TensorInfo:
    """Checks and describes a torch tensor, numpy array or `Buffer` of any strides; `name` is for error texts.

    Raises:
        MemoryLayoutError: the tensor is empty or read-only, its elements overlap, the last dimension is not contiguous,
            or it is on an unsupported device.
    """
    if isinstance(tensor, Buffer):
        return _inspect_buffer(tensor, name)
    shape = _shape(tensor, name)
    device = HOST
    if isinstance(tensor, np.ndarray):
        strides, addr, itemsize = tensor.strides, tensor.ctypes.data, tensor.itemsize
        if not tensor.flags.writeable:
            raise MemoryLayoutError(f"{name}: the array is read-only; a pool must be writable")
    else:
        if tensor.device.type not in ("cpu", "cuda"):
            raise MemoryLayoutError(f"{name}: on device {tensor.device}; a pool must be on the CPU or a CUDA GPU")
        if tensor.device.type == "cuda":
            device = tensor.device.index or 0
        addr, itemsize = tensor.data_ptr(), tensor.element_size()
        strides = tuple(stride * itemsize for stride in tensor.stride())
    if min(shape, default=0) == 0:
        raise MemoryLayoutError(f"{name}: shape {shape} is empty")
    strides = _meaningful(shape, strides, _contiguous(shape, itemsize))
    if strides[-1] != itemsize:
        raise MemoryLayoutError(f"{name}: the last dimension of shape {shape} is not contiguous")
    nbytes = nested_extent(itemsize, *zip(shape, strides, strict=True))
    if nbytes is None:
        raise MemoryLayoutError(f"{name}: elements of shape {shape} and strides of {strides} bytes overlap")
    return TensorInfo(name, shape, str(tensor.dtype), itemsize, addr, nbytes, device, strides)


def inspect_tensor(tensor: Any, name: str) -> TensorInfo:
    """Checks and describes a contiguous torch tensor or numpy array; `name` is for error texts.

    Raises:
        MemoryLayoutError: the tensor is not contiguous, or as for `inspect_strided`.
    """
    info = inspect_strided(tensor, name)
    check_contiguous(info, 0)
    return info


def check_contiguous(info: TensorInfo, first: int) -> int:
    """Returns the bytes of the dimensions from `first` on; raises MemoryLayoutError unless they are contiguous."""
    if info.strides[first:] != _contiguous(info.shape, info.itemsize)[first:]:
        raise MemoryLayoutError(
            f"{info.name}: shape {info.shape} is not contiguous"
            + (f" from dimension {first} on" if first else "; pass the whole pool, not a slice")
        )
    return info.itemsize * prod(info.shape[first:])


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in bytes."""
    return tuple(itemsize * prod(shape[number + 1 :]) for number in range(len(shape)))


def _meaningful(shape: tuple[int, ...], strides: tuple[int, ...], dense: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, with those of dimensions of one element, which are arbitrary, replaced by `dense` ones."""
    return tuple(own if size > 1 else usual for size, own, usual in zip(shape, strides, dense, strict=True))


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
    """Raises MemoryLayoutError if two tensors share bytes, because transfers would overwrite one with the other.

    Tensors whose elements alternate, such as K and V of fused rows, share none.
    """
    ordered = sorted(infos, key=lambda info: info.addr)
    for number, before in enumerate(ordered):
        for after in ordered[number + 1 :]:
            if before.addr + before.nbytes <= after.addr:
                break
            if _share_bytes(before, after):
                first, second = sorted((before.name, after.name))
                raise MemoryLayoutError(
                    f"{first} and {second} share memory; every layer needs its own tensors. If the engine guarantees "
                    "that no room uses both at one time, pass overlaid=True"
                )


def _share_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Returns whether two tensors share bytes; those for which that takes long to find out are taken to."""
    try:
        return np.shares_memory(np.asarray(_Addresses(one)), np.asarray(_Addresses(other)), _MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """What numpy needs for an array at a tensor's addresses, which nobody reads: they may be on a device."""

    def __init__(self, info: TensorInfo) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (info.addr, False),
            "typestr": "|u1",
            "shape": (*info.shape, info.itemsize),
            "strides": (*(info.strides or _contiguous(info.shape, info.itemsize)), 1),
        }


def _shape(tensor: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of a numpy array or a torch tensor, which is recognised by its `data_ptr` method.

    Raises:
        MemoryLayoutError: `tensor` is neither.
    """
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
        raise MemoryLayoutError(f"{name}: {type(tensor).__name__} is neither a torch tensor nor a numpy array")
    return tuple(int(size) for size in tensor.shape)


Tensors = Sequence[Any]


@dataclass(frozen=True, slots=True, eq=False)
class DraftKV:
    """KV tensors of a draft model, which uses the page numbers of the target model.

    Attributes:
        k: K of each layer, or the latent rows if `v` is None, as for `KVPool.from_tensors`.
        v: V of each layer; None for a latent.
        total_kv_heads: KV heads of the draft model; 1 for a latent.
        k_scale, v_scale: For each layer the scales of each page; scales of a latent are passed as `k_scale`.
        axes: Names of the dimensions of each K and V, or None for `[tokens, heads, dim]`; see `KVPool.from_tensors`.
        dtype: Elements of K and V, in place of the tensors' dtype; see `KVPool.from_tensors`.
    """

    k: Tensors
    v: Tensors | None = None
    total_kv_heads: int = 1
    k_scale: Tensors | None = None
    v_scale: Tensors | None = None
    axes: str | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensors:
    """Tensors of a KV group, whose pages the engine manages in a table of their own; see `layout.shape.KVGroup`.

    Attributes:
        name: Name of the group, an identifier, the same on both sides.
        kv: The tensors, on the device of the KV; its lists are empty if this rank's pipeline stage has no layer of the
            group.
        layers: For each layer of the group the KV layer whose pipeline stage holds it; None for the first KV layers.
            Used only if the agent is created without a model.
    """

    name: str
    kv: DraftKV
    page_size: int
    layers: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StateTensors:
    """Tensors of one component of per-request state, or of pages with page numbers of their own.

    Attributes:
        name: Name of the component, an identifier, the same on both sides.
        tensors: For each layer `[slots, ...]`, on the device of the KV; empty if this rank's pipeline stage has no
            layer of the component. Items are contiguous. Those of a divided component may have gaps between rows, as in
            a view of one of several blocks of channels.
        layers: For each layer of the component the KV layer whose pipeline stage holds it; None for the first KV
            layers. Used only if the agent is created without a model.
        heads: Size over the whole model of the dimension that is divided over tensor-parallel ranks. 1 if every rank
            has the whole component; then one elected rank sends it.
        axis: The divided dimension of a tensor (0 is the slots); None if the component is not divided.
        dtype: Elements, in place of the tensors' dtype; see `KVPool.from_tensors`.
    """

    name: str
    tensors: Tensors
    layers: Sequence[int] | None = None
    heads: int = 1
    axis: int | None = None
    dtype: str = ""


class TensorSpec(NamedTuple):
    """Checked tensors of one segment.

    Attributes:
        shape: Shape of the model, group or state component, with the number of layers of this rank.
        num_slots: Number of pages (for state: items).
        dtypes: Elements of the segment, by its name, and of its scales; without those that are unknown.
    """

    name: str
    shape: ModelShape | KVGroup | StateShape
    heads: int
    num_slots: int
    layers: list[tuple[TensorInfo, ...]]
    strides: tuple[PlaneStrides, ...]
    dtypes: dict[str, str]


def kv_spec(kv: DraftKV, page_size: int, name: str = "kv") -> TensorSpec:
    """Checks K and V, or latent rows, and their scales, and returns their description.

    `name` is "kv" for the target model, "draft" for the draft model, or the name of a KV group.

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
        planes = [layers(kv.k, "latent", inspect_strided)]
        first = planes[0][0]
        flat = "tokens dim" if len(first.shape) == 2 else KV_AXES
        axes = check_axes(flat if kv.axes is None else kv.axes)
    else:
        planes = [layers(kv.k, "k", inspect_strided), layers(kv.v, "v", inspect_strided)]
        first, first_v = planes[0][0], planes[1][0]
        axes = check_axes(KV_AXES if kv.axes is None else kv.axes)
    num_pages, heads, k_dim, k_strides = kv_sizes(first, axes, page_size)
    strides, v_dim = [k_strides], 0
    if kv.v is None:
        if heads != 1:
            raise MemoryLayoutError(f"{first.name}: shape {first.shape}; a latent is [tokens, dim] or [tokens, 1, dim]")
    else:
        v_dim = first_v.shape[-1]
        first_v.expect((*first.shape[:-1], v_dim), first)
        strides.append(kv_sizes(first_v, axes, page_size).strides)
    if total_kv_heads % heads:
        raise MemoryLayoutError(
            f"{label}total_kv_heads is {total_kv_heads}, not a multiple of the {heads} heads on this rank; "
            "pass the number in the model's config"
        )
    scale_bytes, dtypes = [], _elements_of(name, kv.dtype, first)
    for plane, tensors in scales.items():
        if tensors is None:
            scale_bytes.append(0)
            continue
        planes.append(layers(tensors, plane, inspect_strided))
        scale = planes[-1][0]
        dtypes |= _elements_of(f"{name} {plane}", "", scale)
        scale_bytes.append(_scale_bytes(scale, num_pages, heads, latent=kv.v is None))
        head_stride = scale_bytes[-1] if kv.v is None else scale.strides[1]
        strides.append(PlaneStrides(scale.strides[0], scale.strides[0], head_stride))
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
    return TensorSpec(name, shape, heads, num_pages, list(zip(*planes, strict=True)), tuple(strides), dtypes)


def _elements_of(name: str, given: object, info: TensorInfo) -> dict[str, str]:
    """Returns the elements of a segment or its scales by name, as the engine or else the tensor says; empty if unknown.

    Raises:
        MemoryLayoutError: the engine's name is not a text of at most 256 characters.
    """
    if not isinstance(given, str) or len(given) > _MAX_DTYPE:
        raise MemoryLayoutError(f"{name}: dtype is {shown(given)}: it must be a name such as 'bfloat16'")
    element = given or info.element
    return {name: element} if element else {}


def group_spec(group: GroupTensors) -> TensorSpec | None:
    """Checks the tensors of a KV group and returns their description; None if there are none.

    Raises:
        MemoryLayoutError: a tensor is unusable; the text names the group and the layer.
        LayoutError: the group's name or KV layers are invalid.
    """
    if not isinstance(group.name, str) or not isinstance(group.kv, DraftKV):
        raise MemoryLayoutError(f"group {shown(group.name)}: it must have a name and its tensors as a DraftKV")
    if not group.kv.k:
        return None
    page_size = check_size(f"{group.name}: page_size", group.page_size, error=MemoryLayoutError)
    spec = kv_spec(group.kv, page_size, group.name)
    assert isinstance(spec.shape, ModelShape)
    layers = tuple(range(len(spec.layers))) if group.layers is None else tuple(group.layers)
    return spec._replace(shape=KVGroup(group.name, spec.shape, layers, page_size))


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
    layers = check_layer_tensors(state.tensors, names, inspect_strided)
    first, axis = layers[0], state.axis
    shape = first.shape
    if axis is None:
        if total_heads != 1:
            raise MemoryLayoutError(
                f"{state.name}: {total_heads} heads over the whole model, but no axis; set axis to the dimension of "
                f"{shape} that is divided over ranks"
            )
        rows, heads, head_bytes = 1, 1, check_contiguous(first, 1)
        strides = PlaneStrides(first.strides[0], head_bytes, head_bytes)
    else:
        if (number := integer(axis)) is None or not 0 < number < len(shape):
            raise MemoryLayoutError(
                f"{state.name}: axis {shown(axis)} is not a dimension of an item; the shape is {shape}"
            )
        rows, heads, head_bytes = prod(shape[1:number]), shape[number], check_contiguous(first, number + 1)
        strides = PlaneStrides(first.strides[0], _row_stride(first, number), first.strides[number])
    if total_heads % heads:
        raise MemoryLayoutError(
            f"{state.name}: heads is {total_heads}, not a multiple of the {heads} on this rank; "
            "pass the size over the whole model"
        )
    component = StateShape(state.name, kv_layers, rows, total_heads, head_bytes)
    dtypes = _elements_of(state.name, state.dtype, first)
    return TensorSpec(state.name, component, heads, shape[0], [(layer,) for layer in layers], (strides,), dtypes)


def _row_stride(info: TensorInfo, axis: int) -> int:
    """Returns the bytes between consecutive rows of an item, whose rows are the dimensions from 1 to before `axis`.

    Raises:
        MemoryLayoutError: the rows are not evenly spaced.
    """
    dims = [(info.shape[number], info.strides[number]) for number in range(1, axis) if info.shape[number] > 1]
    if any(stride != size * inner for (_, stride), (size, inner) in pairwise(dims)):
        raise MemoryLayoutError(f"{info.name}: the rows before dimension {axis} of shape {info.shape} have unlike gaps")
    return dims[-1][1] if dims else info.shape[axis] * info.strides[axis]


def check_layers(name: str, tensors: object) -> None:
    """Raises MemoryLayoutError unless `tensors` is a sequence, one tensor for each layer; `name` is for the text."""
    if not isinstance(tensors, Sequence):
        raise MemoryLayoutError(f"{name} is {shown(tensors)}: it must be a list of tensors, one for each layer")


def _scale_bytes(scale: TensorInfo, num_pages: int, heads: int, latent: bool) -> int:
    """Returns the bytes of the scales of one page and head.

    Args:
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
    return check_contiguous(scale, len(expected))
