"""What an engine's tensors must be like to be written to: checked by name, without ever importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.memory import HOST
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.region import Region


class TensorInfo(NamedTuple):
    """What matters of a torch tensor or a numpy array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    addr: int
    nbytes: int
    device: int = HOST

    @property
    def region(self) -> Region:
        """Its memory: by address, the one way that needs no torch and takes dtypes numpy lacks (bf16, fp8)."""
        return Region(self.addr, self.nbytes, self.device)

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return "the CPU" if self.device == HOST else f"cuda:{self.device}"

    def expect(self, shape: tuple[int, ...], like: TensorInfo) -> None:
        """Raises MemoryLayoutError unless it has this shape and the dtype of `like`."""
        if self.shape != shape:
            raise MemoryLayoutError(f"{self.name}: shape {self.shape}, expected {shape}")
        if self.dtype != like.dtype:
            raise MemoryLayoutError(f"{self.name}: dtype {self.dtype}, but {like.name} has {like.dtype}")


def check_layer_tensors(
    tensors: Sequence[Any], names: Iterable[str], see: Callable[[Any, str], TensorInfo]
) -> list[TensorInfo]:
    """Look at one plane of every layer; all layers are alike, or MemoryLayoutError says which is not."""
    seen = [see(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
    for each in seen:
        each.expect(seen[0].shape, seen[0])
    return seen


def inspect_rows(tensor: Any, name: str, page_size: int) -> TensorInfo:
    """A layer's K or V, `[tokens, heads, head_dim]` (NHD)."""
    shape = _shape(tensor, name)
    if len(shape) == 3 and _is_hnd(tensor, shape):
        raise MemoryLayoutError(
            f"{name}: the memory of shape {shape} is HND (heads outermost), which is not served; "
            "configure the engine for NHD, [tokens, heads, head_dim]"
        )
    if len(shape) != 3:
        raise MemoryLayoutError(
            f"{name}: shape {shape} has {len(shape)} dimensions; a pool is [tokens, heads, head_dim] (NHD) "
            "per layer. A paged NHD tensor can be viewed so; HND is not served"
        )
    seen = see(tensor, name)
    if shape[0] % page_size:
        hint = " (is it HND, heads first? that is not served)" if shape[1] % page_size == 0 else ""
        raise MemoryLayoutError(f"{name}: {shape[0]} tokens are not whole pages of {page_size}{hint}")
    return seen


def inspect_latent(tensor: Any, name: str, page_size: int) -> TensorInfo:
    """A layer's latent rows, `[tokens, dim]` or `[tokens, 1, dim]`."""
    shape = _shape(tensor, name)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != 1):
        raise MemoryLayoutError(f"{name}: shape {shape}; a latent is [tokens, dim] or [tokens, 1, dim] per layer")
    seen = see(tensor, name)
    if shape[0] % page_size:
        raise MemoryLayoutError(f"{name}: {shape[0]} tokens are not whole pages of {page_size}")
    return seen


def see(tensor: Any, name: str) -> TensorInfo:
    """Address and size of memory that we may write to, on the CPU or a GPU; raises MemoryLayoutError otherwise."""
    shape = _shape(tensor, name)
    device = HOST
    if isinstance(tensor, np.ndarray):
        contiguous, addr, itemsize = tensor.flags.c_contiguous, tensor.ctypes.data, tensor.itemsize
        if not tensor.flags.writeable:
            raise MemoryLayoutError(f"{name}: the array is read-only; a pool must be writable")
    else:
        if tensor.device.type not in ("cpu", "cuda"):
            raise MemoryLayoutError(f"{name}: on device {tensor.device}; only pools on the CPU or a GPU are served")
        if tensor.device.type == "cuda":
            device = tensor.device.index or 0
        contiguous, addr, itemsize = tensor.is_contiguous(), tensor.data_ptr(), tensor.element_size()
    if min(shape, default=0) == 0:
        raise MemoryLayoutError(f"{name}: shape {shape} holds nothing")
    if not contiguous:
        raise MemoryLayoutError(f"{name}: shape {shape} is not contiguous; pass the whole pool, not a slice")
    return TensorInfo(name, shape, str(tensor.dtype), itemsize, addr, itemsize * int(np.prod(shape)), device)


def one_device(seen: Iterable[TensorInfo]) -> int:
    """The device that all are on, or HOST; raises MemoryLayoutError naming two that are not on the same."""
    first, *others = seen
    for each in others:
        if each.device != first.device:
            raise MemoryLayoutError(
                f"{first.name} is on {first.place}, {each.name} on {each.place}; give all KV on one device"
            )
    return first.device


def refuse_overlap(seen: Iterable[TensorInfo]) -> None:
    """Two tensors that share bytes would overwrite each other silently."""
    for before, after in pairwise(sorted(seen, key=lambda each: each.addr)):
        if before.addr + before.nbytes > after.addr:
            first, second = sorted((before.name, after.name))
            raise MemoryLayoutError(f"{first} and {second} share memory; every layer needs tensors of its own")


def _shape(tensor: Any, name: str) -> tuple[int, ...]:
    """The shape of a torch tensor, known by its `data_ptr`, or of a numpy array; all else is refused."""
    if not isinstance(tensor, np.ndarray) and not hasattr(tensor, "data_ptr"):
        raise MemoryLayoutError(f"{name}: {type(tensor).__name__} is neither a torch tensor nor a numpy array")
    return tuple(int(size) for size in tensor.shape)


def _is_hnd(tensor: Any, shape: tuple[int, ...]) -> bool:
    """True for a [tokens, heads, dim] view of [heads, tokens, dim] memory."""
    if isinstance(tensor, np.ndarray):
        strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
    else:
        strides = tuple(tensor.stride())
    tokens, heads, dim = shape
    return heads > 1 and tokens > 1 and strides == (dim, tokens * dim, 1)
