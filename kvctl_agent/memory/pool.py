"""The KV pool of one rank: what shape it must have, where its bytes are, what a transport registers.

A pool is per layer K and V, each `[tokens, heads_local, head_dim]` (NHD), contiguous, in CPU memory. It is
either an engine's own tensors (`from_tensors`: torch or numpy; torch is never imported here) or one slab of
ours (`allocate`: the synthetic worker). Everything is checked once, here, by name, so that kernels need not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.head_slice import HeadSlice
from kvctl_agent.memory.parts import PartLayout
from kvctl_agent.memory.region import Region, merge_adjacent
from kvctl_agent.memory.slab import Bytes, Slab

__all__ = ["KVPool", "PoolAddresses"]

# Layers of an allocated pool start on a cache line pair, as staging regions do.
_BLOCK_ALIGN_BYTES = 256


class KVPool:
    """One rank's KV memory.

    Attributes:
        num_layers, num_pages, page_size: the pool's extent; layers are numbered from the pool's own first.
        heads, total_kv_heads: KV heads on this rank, and in the model.
        k_dim, v_dim, dtype_bytes: elements of one head's row in K and in V, and bytes of an element.
        aux_slots, aux_row_bytes: the aux rows, 0 when there are none.
        nbytes: KV and aux bytes together.
        aux: the aux rows, uint8 `[aux_slots, aux_row_bytes]`, or None.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Bytes, Bytes]],
        *,
        page_size: int,
        heads: int,
        total_kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype_bytes: int,
        aux: Bytes | None,
        owner: object,
    ) -> None:
        """Wrap checked memory; use `from_tensors` or `allocate`.

        Args:
            blocks: per layer flat (K, V) bytes.
            owner: what keeps the memory alive; closed with the pool when it is a Slab.
        """
        self._blocks = tuple(blocks)
        self._owner = owner
        self._slices: dict[tuple[int, int], HeadSlice] = {}
        self.page_size = page_size
        self.heads = heads
        self.total_kv_heads = total_kv_heads
        self.k_dim = k_dim
        self.v_dim = v_dim
        self.dtype_bytes = dtype_bytes
        self.aux = aux
        self.aux_slots = 0 if aux is None else int(aux.shape[0])
        self.aux_row_bytes = 0 if aux is None else int(aux.shape[1])
        self.num_layers = len(self._blocks)
        self.num_pages = self._blocks[0][0].nbytes // (page_size * heads * k_dim * dtype_bytes)
        self.nbytes = sum(k.nbytes + v.nbytes for k, v in self._blocks) + (0 if aux is None else aux.nbytes)
        self._addresses = PoolAddresses(
            k_bases=tuple(k.ctypes.data for k, _ in self._blocks),
            v_bases=tuple(v.ctypes.data for _, v in self._blocks),
            page_size=page_size,
            heads=heads,
            k_row_bytes=k_dim * dtype_bytes,
            v_row_bytes=v_dim * dtype_bytes,
            num_pages=self.num_pages,
            aux_base=0 if aux is None else aux.ctypes.data,
            aux_row_bytes=self.aux_row_bytes,
            aux_slots=self.aux_slots,
        )

    @classmethod
    def from_tensors(
        cls,
        k: Sequence[Any],
        v: Sequence[Any],
        *,
        page_size: int,
        total_kv_heads: int,
        aux: Any = None,
    ) -> KVPool:
        """Wrap an engine's tensors, which stay the engine's; the pool keeps them alive until closed.

        Args:
            k: per layer K, torch or numpy, `[tokens, heads_local, k_dim]`, contiguous, on the CPU.
            v: per layer V, `[tokens, heads_local, v_dim]`, the same dtype.
            page_size: tokens per page; `tokens` is a multiple of it.
            total_kv_heads: KV heads of the model, from its config.
            aux: one row per request slot, uint8 `[slots, row_bytes]`, contiguous, on the CPU.

        Raises:
            MemoryLayoutError: names the layer, the tensor and what is wrong with it.
        """
        if not k or len(k) != len(v):
            raise MemoryLayoutError(f"{len(k)} K and {len(v)} V layers; give one K and one V for every layer")
        if page_size <= 0:
            raise MemoryLayoutError(f"page_size is {page_size}; it must be positive")
        first_k = _inspect(k[0], "layer 0 k", page_size)
        first_v = _inspect(v[0], "layer 0 v", page_size)
        tokens, heads, _ = first_k.shape
        if total_kv_heads <= 0 or total_kv_heads % heads:
            raise MemoryLayoutError(
                f"total_kv_heads is {total_kv_heads}, not a multiple of the {heads} heads on this rank; "
                "pass the number in the model's config"
            )
        blocks: list[tuple[Bytes, Bytes]] = []
        spans: list[tuple[Region, str]] = []
        for layer, pair in enumerate(zip(k, v, strict=True)):
            flat: list[Bytes] = []
            for kv, (tensor, dim) in enumerate(zip(pair, (first_k.shape[2], first_v.shape[2]), strict=True)):
                name = f"layer {layer} {'kv'[kv]}"
                seen = _inspect(tensor, name, page_size)
                if seen.shape != (tokens, heads, dim):
                    raise MemoryLayoutError(f"{name}: shape {seen.shape}, expected {(tokens, heads, dim)}")
                if seen.dtype != first_k.dtype:
                    raise MemoryLayoutError(f"{name}: dtype {seen.dtype}, but layer 0 k has {first_k.dtype}")
                spans.append((Region(seen.addr, seen.nbytes), name))
                flat.append(_bytes_at(seen.addr, seen.nbytes))
            blocks.append((flat[0], flat[1]))
        aux_rows = None
        if aux is not None:
            seen = _inspect_memory(aux, "aux")
            if len(seen.shape) != 2 or seen.itemsize != 1 or "uint8" not in seen.dtype:
                raise MemoryLayoutError(f"aux: {seen.dtype} {seen.shape}, expected uint8 [slots, row_bytes]")
            spans.append((Region(seen.addr, seen.nbytes), "aux"))
            aux_rows = _bytes_at(seen.addr, seen.nbytes).reshape(seen.shape)
        _refuse_overlap(spans)
        return cls(
            blocks,
            page_size=page_size,
            heads=heads,
            total_kv_heads=total_kv_heads,
            k_dim=first_k.shape[2],
            v_dim=first_v.shape[2],
            dtype_bytes=first_k.itemsize,
            aux=aux_rows,
            owner=(tuple(k), tuple(v), aux),
        )

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        heads_local: int,
        total_kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype_bytes: int,
        aux_slots: int = 0,
        aux_row_bytes: int = 0,
    ) -> KVPool:
        """A pool in one slab, zeroed: layer-major, K then V, aux rows last."""
        sizes = (num_layers, num_pages, page_size, heads_local, total_kv_heads, k_dim, v_dim, dtype_bytes)
        if min(sizes) <= 0 or total_kv_heads % heads_local or (aux_slots > 0) != (aux_row_bytes > 0):
            raise MemoryLayoutError(
                "a pool needs positive sizes, heads_local dividing total_kv_heads, and aux slots with a row "
                f"size; got layers {num_layers}, pages {num_pages}, page_size {page_size}, "
                f"heads {heads_local} of {total_kv_heads}, k_dim {k_dim}, v_dim {v_dim}, "
                f"dtype_bytes {dtype_bytes}, aux {aux_slots} x {aux_row_bytes}"
            )
        tokens = num_pages * page_size
        k_bytes = tokens * heads_local * k_dim * dtype_bytes
        v_bytes = tokens * heads_local * v_dim * dtype_bytes
        stride_k, stride_v = _aligned(k_bytes), _aligned(v_bytes)
        aux_bytes = aux_slots * aux_row_bytes
        slab = Slab(num_layers * (stride_k + stride_v) + aux_bytes)
        blocks = []
        for start in range(0, num_layers * (stride_k + stride_v), stride_k + stride_v):
            v_start = start + stride_k
            blocks.append((slab.array[start : start + k_bytes], slab.array[v_start : v_start + v_bytes]))
        aux = slab.array[slab.nbytes - aux_bytes :].reshape(aux_slots, aux_row_bytes) if aux_bytes else None
        return cls(
            blocks,
            page_size=page_size,
            heads=heads_local,
            total_kv_heads=total_kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype_bytes=dtype_bytes,
            aux=aux,
            owner=slab,
        )

    def addresses(self) -> PoolAddresses:
        """Base addresses and row sizes, for peers and for descriptor arithmetic."""
        return self._addresses

    def block(self, layer: int, kv: int) -> Bytes:
        """All bytes of one layer's K (kv 0) or V (kv 1), flat, in page order."""
        if not 0 <= layer < len(self._blocks):
            state = f"has layers 0 to {self.num_layers - 1}" if self._blocks else "is closed"
            raise MemoryLayoutError(f"layer {layer} asked for, but the pool {state}")
        return self._blocks[layer][kv]

    def head_slice(self, head: int, heads: int) -> HeadSlice:
        """Views of local heads [head, head + heads) in every layer, made once and kept while the pool is open."""
        found = self._slices.get((head, heads))
        if found is None:
            if not self._blocks:
                raise MemoryLayoutError(f"heads [{head}, {head + heads}) asked for, but the pool is closed")
            if head < 0 or heads <= 0 or head + heads > self.heads:
                raise MemoryLayoutError(
                    f"heads [{head}, {head + heads}) are outside the {self.heads} heads of this rank"
                )
            found = self._slices[head, heads] = HeadSlice(self._blocks, self._addresses, head, heads)
        return found

    def part_layout(self, first_layer: int, num_layers: int, num_pages: int, heads: int) -> PartLayout:
        """How a part of these layers (the pool's own numbers), pages and heads lies in its contiguous region."""
        return PartLayout(
            first_layer=first_layer,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=self.page_size,
            heads=heads,
            k_row_bytes=self.k_dim * self.dtype_bytes,
            v_row_bytes=self.v_dim * self.dtype_bytes,
        )

    def regions(self) -> list[Region]:
        """What a transport registers: one region per slab, or per run of tensors that touch."""
        if isinstance(self._owner, Slab):
            return [self._owner.region]
        arrays = [array for pair in self._blocks for array in pair]
        if self.aux is not None:
            arrays.append(self.aux)
        return merge_adjacent(Region(array.ctypes.data, array.nbytes) for array in arrays)

    def close(self) -> None:
        """Let go of the memory; a slab of ours goes back to the kernel now. Idempotent."""
        owner, self._owner = self._owner, None
        self._blocks, self.aux = (), None
        self._slices.clear()
        if isinstance(owner, Slab):
            owner.close()


class _Seen(NamedTuple):
    """What matters of a torch tensor or a numpy array."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    addr: int
    nbytes: int


def _inspect(tensor: Any, name: str, page_size: int) -> _Seen:
    """Check one layer's K or V alone; comparisons between layers are the caller's."""
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
    seen = _inspect_memory(tensor, name)
    if shape[0] % page_size:
        hint = " (is it HND, heads first? that is not served)" if shape[1] % page_size == 0 else ""
        raise MemoryLayoutError(f"{name}: {shape[0]} tokens are not whole pages of {page_size}{hint}")
    return seen


def _inspect_memory(tensor: Any, name: str) -> _Seen:
    """Address and size of CPU memory that we may write to; raises MemoryLayoutError otherwise."""
    shape = _shape(tensor, name)
    if isinstance(tensor, np.ndarray):
        contiguous, addr, itemsize = tensor.flags.c_contiguous, tensor.ctypes.data, tensor.itemsize
        if not tensor.flags.writeable:
            raise MemoryLayoutError(f"{name}: the array is read-only; a pool must be writable")
    else:
        if tensor.device.type != "cpu":
            raise MemoryLayoutError(f"{name}: on device {tensor.device}; only CPU pools are served")
        contiguous, addr, itemsize = tensor.is_contiguous(), tensor.data_ptr(), tensor.element_size()
    if min(shape, default=0) == 0:
        raise MemoryLayoutError(f"{name}: shape {shape} holds nothing")
    if not contiguous:
        raise MemoryLayoutError(f"{name}: shape {shape} is not contiguous; pass the whole pool, not a slice")
    return _Seen(shape, str(tensor.dtype), itemsize, addr, itemsize * int(np.prod(shape)))


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


def _bytes_at(addr: int, nbytes: int) -> Bytes:
    """A uint8 view by address: the one way that needs no torch and takes dtypes numpy lacks (bf16, fp8)."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr))


def _refuse_overlap(spans: list[tuple[Region, str]]) -> None:
    """Two tensors that share bytes would overwrite each other silently."""
    spans.sort()
    for (before, name), (after, other) in pairwise(spans):
        if before.addr + before.nbytes > after.addr:
            raise MemoryLayoutError(f"{name} and {other} share memory; every layer needs its own K and V")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_ALIGN_BYTES) * _BLOCK_ALIGN_BYTES
