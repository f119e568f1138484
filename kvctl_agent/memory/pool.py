"""The KV pool of one rank: all memory of the engine that transfers read or write.

A pool has KV, the KV of a draft model, per-request state and aux rows. It is in the memory of the host or of one
device, except for aux rows, which are always in host memory. A pool either wraps an engine's tensors (`from_tensors`;
torch or numpy, without importing torch) or allocates its own memory (`allocate`, used by the synthetic worker).
Shapes and devices are checked here once, so that copies need no checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.values import shown
from kvctl_agent.device.base import Device
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import KVGroup, ModelShape, Plane, Segment, StateShape
from kvctl_agent.layout.sizes import check_size
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.allocations import Allocation, Bytes, DeviceAllocation, HugePageMemory
from kvctl_agent.memory.aux_rows import inspect_aux
from kvctl_agent.memory.pool_layouts import place_segment
from kvctl_agent.memory.region import Region, merge_adjacent
from kvctl_agent.memory.segment import SegmentMemory
from kvctl_agent.memory.tensors import (
    Buffer,
    DraftKV,
    GroupTensors,
    StateTensors,
    Tensors,
    TensorSpec,
    check_layers,
    check_no_overlap,
    common_device,
    group_spec,
    kv_spec,
    state_spec,
)

__all__ = ["Buffer", "DraftKV", "GroupTensors", "KVPool", "PoolAddresses", "StateTensors"]


class KVPool:
    """The KV pool of one rank: KV, draft model KV, per-request state and aux rows.

    A pool of tensors is assumed to hold all layers of the model and its first heads until the agent calls
    `assign_shards`. An allocated pool has its layers and heads from the start.

    Attributes:
        segments: The memory of each segment, in the model's order, KV first.
        aux: The buffers of the aux rows, each uint8 `[aux_slots, row bytes]`; empty if there are none.
        aux_slots: Number of aux rows; 0 if there are none.
        device: The device of all memory except the aux rows; None for the host.
        dtypes: Elements of each segment by its name, and of scales, such as "kv": "bfloat16"; of a segment that can
            receive several, all of them. A segment whose elements are unknown is absent.
    """

    def __init__(
        self,
        segments: Iterable[SegmentMemory],
        *,
        page_size: int,
        aux: Sequence[Bytes] = (),
        device: Device | None = None,
        owner: object = None,
        allocations: Sequence[Allocation] = (),
        shapes: tuple[ModelShape | KVGroup | StateShape, ...] = (),
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Wraps checked memory. Use `from_tensors` or `allocate` instead.

        Args:
            owner: Object whose reference keeps the memory of tensors alive.
            shapes: Shape of each segment with the layers of this rank; empty if unknown.
        """
        self.segments = tuple(segments)
        self.page_size = page_size
        self.aux = tuple(aux)
        self.aux_slots = len(self.aux[0]) if self.aux else 0
        self.nbytes = sum(segment.nbytes for segment in self.segments) + sum(buffer.nbytes for buffer in self.aux)
        self.device = device
        self.dtypes = dict(dtypes or {})
        self._owner = owner
        self._allocations = tuple(allocations)
        self._shapes = shapes
        self._at: dict[int, tuple[SegmentMemory, ...]] = {}  # segments in transfer pages, by split

    @classmethod
    def from_tensors(
        cls,
        k: Tensors,
        v: Tensors | None,
        *,
        page_size: int,
        total_kv_heads: int | None = None,
        aux: Any = None,
        k_scale: Tensors | None = None,
        v_scale: Tensors | None = None,
        draft: DraftKV | None = None,
        state: Sequence[StateTensors] = (),
        groups: Sequence[GroupTensors] = (),
        axes: str | None = None,
        overlaid: bool = False,
        dtype: str = "",
    ) -> KVPool:
        """Wraps an engine's tensors. The pool references them until it is closed.

        K and V may be views of one tensor, and all layers too: pass `kv[:, 0]` and `kv[:, 1]`, or `kv[..., :k_dim]` and
        `kv[..., k_dim:]`. Tensors may have any strides, equal in all layers, whose last dimension is contiguous.

        Args:
            k: K of each layer, torch or numpy, `[tokens, heads_local, k_dim]`, all on the CPU or all on one GPU; or
                latent rows, `[tokens, dim]` or `[tokens, 1, dim]`, which every tensor-parallel rank has (MLA).
            v: V of each layer, `[tokens, heads_local, v_dim]`, of the same dtype; None for latents.
            page_size: Tokens per page; `tokens` must be a multiple of it.
            total_kv_heads: KV heads of the model, from its configuration; omitted for latents.
            aux: One row per request slot, `[slots, ...]`, contiguous, on the CPU; or a list of such tensors, or of
                (address, nbytes, item_bytes) of host memory, of which an aux row consists in this order. The caller
                keeps memory given by addresses alive.
            k_scale, v_scale: For each layer the quantisation scales of each page, `[pages, heads_local, ...]`; of
                latents k_scale, `[pages, ...]`.
            draft: The draft model's layers, if this rank has them.
            state: The components of per-request state, in the same order on all ranks.
            groups: The KV groups, in the same order on all ranks.
            axes: Names of the dimensions of each K and V: "tokens heads dim" (the default), "pages tokens heads dim",
                "pages heads tokens dim" (HND), or another order of these with dim last.
            overlaid: Whether tensors may share memory, because the engine never uses both for one page or slot at one
                time, as vLLM's groups of hybrid models do.
            dtype: Elements of K and V, such as "float8_e4m3fn", if the tensors' dtype does not tell them, as unsigned
                integers do not, or if their order within a page is not that of `axes`. If this pool can receive other
                elements too, those follow, separated by ", ". Agents of both sides compare them when they connect.

        Raises:
            MemoryLayoutError: a tensor is unusable; the text names the layer and the tensor.
            DeviceUnavailable: the tensors are on a GPU, and the packages for GPUs are not installed.
        """
        if total_kv_heads is None and v is not None:
            raise MemoryLayoutError("total_kv_heads= is missing: pass the KV heads of the model, of all ranks together")
        kv = DraftKV(k, v, 1 if total_kv_heads is None else total_kv_heads, k_scale, v_scale, axes, dtype)
        page_size = check_size("page_size", page_size, error=MemoryLayoutError)
        if not isinstance(draft, DraftKV | None):
            raise MemoryLayoutError(f"draft is {shown(draft)}: it must be a DraftKV")
        if not isinstance(groups, Sequence) or not all(isinstance(each, GroupTensors) for each in groups):
            raise MemoryLayoutError(f"groups is {shown(groups)}: it must be a list of GroupTensors")
        if not isinstance(state, Sequence) or not all(isinstance(each, StateTensors) for each in state):
            raise MemoryLayoutError(f"state is {shown(state)}: it must be a list of StateTensors")
        for each in state:
            check_layers(f"state {shown(each.name)}: tensors", each.tensors)
        specs = [kv_spec(kv, page_size)]
        if draft is not None:
            specs.append(kv_spec(draft, page_size, "draft"))
            if specs[1].num_slots != specs[0].num_slots:
                raise MemoryLayoutError(
                    f"draft: {specs[1].num_slots} pages, but the target has {specs[0].num_slots}; "
                    "both use the same page numbers and must have equally many pages"
                )
        specs += [spec for each in groups if (spec := group_spec(each)) is not None]
        specs += [state_spec(each) for each in state if len(each.tensors)]
        tensors = [plane for spec in specs for layer in spec.layers for plane in layer]
        device_index = common_device(tensors)
        buffers = inspect_aux(aux)
        if not overlaid:
            check_no_overlap([*tensors, *buffers])
        return cls(
            _whole_segments(specs, page_size),
            page_size=page_size,
            aux=[buffer.region.array().reshape(buffer.shape) for buffer in buffers],
            device=None if device_index == HOST else _open(device_index),
            owner=(kv, draft, tuple(groups), tuple(state), aux),
            shapes=tuple(spec.shape for spec in specs),
            dtypes={name: dtype for spec in specs for name, dtype in spec.dtypes.items()},
        )

    @classmethod
    def allocate(
        cls,
        shards: tuple[LocalShard, ...],
        page_size: int,
        num_pages: int,
        state_slots: Mapping[str, int] | None = None,
        aux_slots: int = 0,
        aux_row_bytes: int = 0,
        device: Device | None = None,
        mem_pool: str = "default",
        layout: str = "nhd",
    ) -> KVPool:
        """Allocates a zeroed pool in one allocation, ordered by segment, with the aux rows last.

        With a device, the aux rows have an allocation of their own in host memory.

        Args:
            shards: The rank's shards, from `layout.parallel.local_shards` for this `page_size`.
            num_pages: Number of pages of the KV, and of the draft model's KV.
            state_slots: Number of pages of each KV group and of items of each state component that has layers on this
                rank, by name.
            aux_slots, aux_row_bytes: Number and size of aux rows.
            device: The device for all memory except the aux rows; None for the host.
            mem_pool: The device's memory pool, as for `Device.allocate`.
            layout: Order of the axes of KV, one of `POOL_LAYOUTS`.

        Raises:
            MemoryLayoutError: a number is missing or not positive, the layout is unknown, or the memory cannot be
                allocated.
            DeviceError: the device's memory cannot be allocated.
        """
        items = state_slots or {}
        slots = [num_pages if shard.segment.table == 0 else items.get(shard.segment.name, 0) for shard in shards]
        slots = [count if shard.num_layers else 0 for shard, count in zip(shards, slots, strict=True)]
        missing = [
            shard.segment.name for shard, count in zip(shards, slots, strict=True) if shard.num_layers and count <= 0
        ]
        if missing or min(aux_slots, aux_row_bytes) < 0 or (aux_slots > 0) != (aux_row_bytes > 0):
            raise MemoryLayoutError(
                "a pool needs pages, pages or items of every group and state component, and aux slots with a row size; "
                f"got {num_pages} pages, items {dict(items)}, aux {aux_slots} x {aux_row_bytes}"
                + (f": none for {', '.join(missing)}" if missing else "")
            )
        placed = [place_segment(shard, count, layout) for shard, count in zip(shards, slots, strict=True)]
        aux_bytes = aux_slots * aux_row_bytes
        allocations, view, rows = _allocations(sum(each.nbytes for each in placed), aux_bytes, device, mem_pool)
        addr, _, device_index = allocations[0].region
        segments = []
        for shard, count, (offsets, strides, nbytes) in zip(shards, slots, placed, strict=True):
            bases = [[addr + offset for offset in layer] for layer in offsets]
            segments.append(SegmentMemory.at_addresses(shard, count, bases, strides, device_index, view))
            addr += nbytes
        return cls(
            segments,
            page_size=page_size,
            aux=() if rows is None else (rows.reshape(aux_slots, aux_row_bytes),),
            device=device,
            allocations=allocations,
        )

    @property
    def num_pages(self) -> int:
        """Number of KV pages."""
        return self.segments[0].num_slots

    def shape(self) -> ModelShape:
        """Returns the shape of the model, which is assumed to have exactly the layers of this pool.

        Raises:
            MemoryLayoutError: the pool was created by `allocate`, so the model is unknown.
            LayoutError: a state component has KV layers that this pool does not have.
        """
        if not self._shapes:
            raise MemoryLayoutError("the model of an allocated pool is unknown; pass model= to the agent")
        kv, *others = self._shapes
        assert isinstance(kv, ModelShape)
        drafts = [other for other in others if isinstance(other, ModelShape)]
        groups = tuple(other for other in others if isinstance(other, KVGroup))
        states = tuple(other for other in others if isinstance(other, StateShape))
        return replace(kv, draft=drafts[0] if drafts else None, groups=groups, states=states)

    def assign_shards(self, shards: tuple[LocalShard, ...]) -> None:
        """Sets which layers and heads of the model this memory holds; call before registration and transfers.

        Raises:
            MemoryLayoutError: the pool does not fit the shards; the text has the segment and the numbers.
        """
        by_name = {segment.name: segment for segment in self.segments if segment.shard.num_layers}
        segments = [_with_shard(by_name.pop(shard.segment.name, None), shard) for shard in shards]
        if by_name:
            raise MemoryLayoutError(f"the pool holds {', '.join(by_name)}, which the model does not have")
        self.segments = tuple(segments)
        self._at.clear()

    def segments_at(self, split: int) -> tuple[SegmentMemory, ...]:
        """Returns the memory of each segment in transfer pages, `split` of which make one page of KV; cached.

        Per-request state is not divided. The result is valid until the pool is closed or its shards are assigned.

        Raises:
            MemoryLayoutError: a page of some plane cannot be divided by `split`, or there are too many pages.
        """
        if split == 1:
            return self.segments
        if split * self.num_pages >= 1 << 31:
            raise MemoryLayoutError(f"{self.num_pages} pages of {split} transfer pages each exceed 32 bits")
        if split not in self._at:
            self._at[split] = tuple(
                segment.at(split) if segment.shard.segment.table == 0 else segment for segment in self.segments
            )
        return self._at[split]

    def addresses(self, split: int = 1) -> PoolAddresses:
        """Returns the addresses and sizes of the pool, which are sent to peers and used to build descriptors.

        `split` is that of `segments_at`; the addresses for peers are in the engine's pages.
        """
        segments = tuple(segment.addresses for segment in self.segments_at(split))
        bases = tuple(buffer.ctypes.data for buffer in self.aux)
        return PoolAddresses(segments, bases, tuple(buffer.shape[1] for buffer in self.aux), self.aux_slots)

    def aux_row(self, slot: int) -> bytes:
        """Returns a copy of aux row `slot`."""
        return b"".join(buffer[slot].tobytes() for buffer in self.aux)

    def store_aux_row(self, slot: int, row: bytes) -> None:
        """Overwrites aux row `slot` with `row`, which has its size."""
        first = 0
        for buffer in self.aux:
            nbytes = buffer.shape[1]
            buffer[slot] = np.frombuffer(row, np.uint8, nbytes, first)
            first += nbytes

    def regions(self) -> list[Region]:
        """Returns the regions to register with a transport: one for each allocation or group of adjacent tensors."""
        if self._allocations:
            return [allocation.region for allocation in self._allocations]
        regions = [block for segment in self.segments for layer in segment.blocks for block in layer]
        regions += [Region(buffer.ctypes.data, buffer.nbytes) for buffer in self.aux]
        return merge_adjacent(regions)

    def close(self) -> None:
        """Frees the memory that the pool allocated, and drops its references to the engine's tensors; idempotent."""
        self._owner = None
        self.aux = ()
        for segment in chain(self.segments, *self._at.values()):
            segment.close()
        self._at.clear()
        for allocation in self._allocations:
            allocation.close()
        self._allocations = ()


def _allocations(
    blocks_bytes: int, aux_bytes: int, device: Device | None, mem_pool: str
) -> tuple[list[Allocation], Callable[[Region], Bytes], Bytes | None]:
    """Allocates zeroed memory for the blocks and the aux rows.

    On the host, aux rows follow the blocks in one allocation; with a device they have an allocation of their own.

    Returns:
        The allocations, the first of which has the blocks; a function that returns the bytes of a block; and the bytes
        of the aux rows.
    """
    if device is None:
        memory = HugePageMemory(blocks_bytes + aux_bytes)
        return [memory], memory.view, memory.array[blocks_bytes:] if aux_bytes else None
    device_memory = DeviceAllocation(device, blocks_bytes, mem_pool)
    device.fill(device_memory.region.addr, blocks_bytes, 0)
    if not aux_bytes:
        return [device_memory], Region.array, None
    aux_memory = HugePageMemory(aux_bytes)
    return [device_memory, aux_memory], Region.array, aux_memory.array


def _open(index: int) -> Device:
    # Imported here because only pools on a GPU need the GPU packages.
    from kvctl_agent.device.cuda import open_device

    return open_device(index)


def _whole_segments(specs: Sequence[TensorSpec], page_size: int) -> Iterator[SegmentMemory]:
    """Yields the memory of each segment, assuming that this rank has all layers and the first heads of it."""
    end = table = 0  # of the layers that KV, draft and groups share
    for index, spec in enumerate(specs):
        shape, count = spec.shape, len(spec.layers)
        if isinstance(shape, StateShape):
            plane = Plane(spec.name, shape.rows, shape.head_bytes)
            segment = Segment(index, spec.name, 0, count, shape.heads, (plane,), shape.layers, None)
        elif isinstance(shape, KVGroup):
            table += 1
            heads, planes = shape.kv.num_kv_heads, shape.kv.planes(shape.page_size)
            segment = Segment(index, spec.name, end, end + count, heads, planes, shape.layers, table)
        else:
            segment = Segment(index, spec.name, end, end + count, shape.num_kv_heads, shape.planes(page_size))
        end += 0 if segment.state else count
        shard = LocalShard(segment, segment.layer_lo, segment.layer_hi, 0, spec.heads)
        bases = [[plane.addr for plane in layer] for layer in spec.layers]
        yield SegmentMemory.at_addresses(shard, spec.num_slots, bases, spec.strides, spec.layers[0][0].device)


def _with_shard(memory: SegmentMemory | None, shard: LocalShard) -> SegmentMemory:
    """Returns the segment's memory with the layers and heads of `shard`; empty if the rank has none of its layers.

    Raises:
        MemoryLayoutError: the memory does not fit the shard, or is missing.
    """
    name = shard.segment.name
    if memory is None:
        if shard.num_layers:
            raise MemoryLayoutError(
                f"{name}: the pool has no memory for it, but this rank holds {shard.num_layers} of its layers"
            )
        return SegmentMemory(shard, 0, ())
    current = memory.shard
    compared = [
        ("layers", current.num_layers, shard.num_layers),
        ("heads on this rank", current.heads, shard.heads),
        ("heads of the model", current.segment.heads, shard.segment.heads),
        ("planes", _describe(current.segment.planes), _describe(shard.segment.planes)),
    ]
    for noun, actual, planned in compared:
        if actual != planned:
            raise MemoryLayoutError(f"{name}: the pool has {actual} {noun}, but the plan requires {planned}")
    return SegmentMemory(shard, memory.num_slots, memory.blocks, memory.view, memory.addresses.strides)


def _describe(planes: tuple[Plane, ...]) -> str:
    return ", ".join(f"{plane.name} {plane.rows} x {plane.head_bytes} bytes" for plane in planes)
