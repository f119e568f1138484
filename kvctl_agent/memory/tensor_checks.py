"""Checks of an engine's torch tensors and numpy arrays, made without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.region import Region


class TensorInfo(NamedTuple):
    """Address, shape and dtype of a torch tensor or numpy array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    addr: int
    nbytes: int
    device: int = HOST

    @property
    def region(self) -> Region:
        """The tensor's memory. Access by address needs no torch and supports dtypes that numpy lacks (bf16, fp8)."""
        return Region(self.addr, self.nbytes, self.device)

    @property
    def device_name(self) -> str:
        """The tensor's device for error texts: "the CPU" or "cuda:0"."""
        return "the CPU" if self.device == HOST else f"cuda:{self.device}"

    def expect(self, shape: tuple[int, ...], like: TensorInfo) -> None:
        """Raise MemoryLayoutError unless the tensor has this shape and the dtype of `like`."""
        if self.shape != shape:
            raise MemoryLayoutError(f"{self.name}: shape {self.shape}, expected {shape}")
        if self.dtype != like.dtype:
            raise MemoryLayoutError(f"{self.name}: dtype {self.dtype}, but {like.name} has {like.dtype}")


def check_layer_tensors(
    tensors: Sequence[Any], names: Iterable[str], inspect: Callable[[Any, str], TensorInfo]
) -> list[TensorInfo]:
    """Inspect one plane's tensor of every layer.

    Args:
        tensors: One tensor per layer.
        names: The tensors' names for error texts.
        inspect: Inspects one tensor.

    Raises:
        MemoryLayoutError: the tensors differ in shape or dtype, or `inspect` raised it.
    """
    infos = [inspect(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
    for info in infos:
        info.expect(infos[0].shape, infos[0])
    return infos


def inspect_rows(tensor: Any, name: str, page_size: int) -> TensorInfo:
    """Inspect K or V of a layer, `[tokens, heads, head_dim]` (NHD).

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
    """Inspect the latent rows of a layer, `[tokens, dim]` or `[tokens, 1, dim]`.

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
    """Return address, shape and dtype of a tensor.

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
    """Return the device of all tensors, or HOST.

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
    """Raise MemoryLayoutError if two tensors share memory, because transfers would overwrite one with the other."""
    for before, after in pairwise(sorted(infos, key=lambda info: info.addr)):
        if before.addr + before.nbytes > after.addr:
            first, second = sorted((before.name, after.name))
            raise MemoryLayoutError(f"{first} and {second} share memory; every layer needs its own tensors")


def _shape(tensor: Any, name: str) -> tuple[int, ...]:
    """The shape of a numpy array or a torch tensor; the latter is recognised by its `data_ptr` method."""
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
        raise MemoryLayoutError(f"{name}: {type(tensor).__name__} is neither a torch tensor nor a numpy array")
    return tuple(int(size) for size in tensor.shape)


def _is_hnd(tensor: Any, shape: tuple[int, ...]) -> bool:
    """Whether the tensor is a [tokens, heads, dim] view of [heads, tokens, dim] memory."""
    if isinstance(tensor, np.ndarray):
        strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
    else:
        strides = tuple(tensor.stride())
    tokens, heads, dim = shape
    return heads > 1 and tokens > 1 and strides == (dim, tokens * dim, 1)
