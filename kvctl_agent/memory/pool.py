"""The KV pool of one rank: what shape it must have, where its bytes are, what a transport registers.

A pool is all the memory that rooms move in: KV, a draft model's KV, per-request state, aux rows; contiguous memory of
the host or of one device, but for aux rows, which are always the host's. It is either an engine's own tensors
(`from_tensors`, `mla`: torch or numpy; torch is never imported here) or memory of ours (`allocate`: the synthetic
worker). Everything is checked once, here, by name, so that kernels need not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvctl_agent.contract.memory import HOST
from kvctl_agent.contract.values import shown
from kvctl_agent.device.base import Device
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.local_shard import LocalShard
from kvctl_agent.layout.shape import ModelShape, Plane, Segment, StateShape
from kvctl_agent.layout.sizes import check_size
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.allocation import Allocation, DeviceAllocation
from kvctl_agent.memory.huge_pages import Bytes, HugePageMemory
from kvctl_agent.memory.region import Region, merge_adjacent
from kvctl_agent.memory.segment import SegmentMemory
from kvctl_agent.memory.tensor_checks import one_device, refuse_overlap, see
from kvctl_agent.memory.tensor_specs import (
    DraftKV,
    StateTensors,
    Tensors,
    TensorSpec,
    check_layers,
    read_kv,
    read_state,
)

__all__ = ["DraftKV", "KVPool", "PoolAddresses", "StateTensors"]

# Layers of an allocated pool start on a cache line pair, as staging regions do.
_BLOCK_ALIGN_BYTES = 256


class KVPool:
    """One rank's memory.

    Until an agent says by `place` which layers and heads of the model it is, a pool of tensors is taken for all layers
    and the first heads; what it is was known from the start where it was allocated.

    Attributes:
        page_size: tokens of a page.
        segments: what it holds of each segment of the model, in the model's order: KV first.
        aux: the aux rows, uint8 `[aux_slots, aux_row_bytes]`, or None.
        aux_slots, aux_row_bytes: 0 when there are none.
        nbytes: all bytes together.
        device: where everything but the aux rows is; None: in the host's memory.
    """

    def __init__(
        self,
        segments: Iterable[SegmentMemory],
        *,
        page_size: int,
        aux: Bytes | None,
        device: Device | None = None,
        owner: object = None,
        allocations: Sequence[Allocation] = (),
        shapes: tuple[ModelShape | StateShape, ...] = (),
    ) -> None:
        """Wrap checked memory; use `from_tensors`, `mla` or `allocate`.

        Args:
            owner: what keeps the memory of tensors alive.
            allocations: memory of ours, all of it; closed with the pool.
            shapes: of each segment, with as many layers as there are here; empty where nobody said.
        """
        self.segments = tuple(segments)
        self.page_size = page_size
        self.aux = aux
        self.aux_slots = 0 if aux is None else int(aux.shape[0])
        self.aux_row_bytes = 0 if aux is None else int(aux.shape[1])
        self.nbytes = sum(segment.nbytes for segment in self.segments) + (0 if aux is None else aux.nbytes)
        self.device = device
        self._owner = owner
        self._allocations = tuple(allocations)
        self._shapes = shapes

    @classmethod
    def from_tensors(
        cls,
        k: Tensors,
        v: Tensors,
        *,
        page_size: int,
        total_kv_heads: int,
        aux: Any = None,
        k_scale: Tensors | None = None,
        v_scale: Tensors | None = None,
        draft: DraftKV | None = None,
        state: Sequence[StateTensors] = (),
    ) -> KVPool:
        """Wrap an engine's tensors, which stay the engine's; the pool keeps them alive until closed.

        Args:
            k: per layer K, torch or numpy, `[tokens, heads_local, k_dim]`, contiguous, all on the CPU or all on
                one GPU.
            v: per layer V, `[tokens, heads_local, v_dim]`, the same dtype.
            page_size: tokens per page; `tokens` is a multiple of it.
            total_kv_heads: KV heads of the model, from its config.
            aux: one row per request slot, uint8 `[slots, row_bytes]`, contiguous, on the CPU.
            k_scale, v_scale: per layer the quantisation scales of each page, `[pages, heads_local, ...]`.
            draft: the draft model's layers, where this rank has them.
            state: the components of per-request state, in the same order on all ranks.

        Raises:
            MemoryLayoutError: names the layer, the tensor and what is wrong with it.
            DeviceUnavailable: they are on a GPU, and what drives one is not installed.
        """
        return cls._of_tensors(DraftKV(k, v, total_kv_heads, k_scale, v_scale), page_size, aux, draft, state)

    @classmethod
    def mla(
        cls,
        latent: Tensors,
        *,
        page_size: int,
        aux: Any = None,
        scale: Tensors | None = None,
        draft: DraftKV | None = None,
        state: Sequence[StateTensors] = (),
    ) -> KVPool:
        """Wrap the tensors of a model with latent attention, which every tensor-parallel rank holds whole.

        Args:
            latent: per layer the latent rows, `[tokens, dim]` or `[tokens, 1, dim]`, contiguous, all on one device.
            scale: per layer the quantisation scales of each page, `[pages, ...]`.

        The rest, and what is raised, as for `from_tensors`.
        """
        return cls._of_tensors(DraftKV(latent, None, 1, scale), page_size, aux, draft, state)

    @classmethod
    def _of_tensors(
        cls, kv: DraftKV, page_size: int, aux: Any, draft: DraftKV | None, state: Sequence[StateTensors]
    ) -> KVPool:
        page_size = check_size("page_size", page_size, error=MemoryLayoutError)
        if not isinstance(draft, DraftKV | None):
            raise MemoryLayoutError(f"draft is {shown(draft)}: it must be a DraftKV")
        if not isinstance(state, Sequence) or not all(isinstance(each, StateTensors) for each in state):
            raise MemoryLayoutError(f"state is {shown(state)}: it must be a list of StateTensors")
        for each in state:
            check_layers(f"state {shown(each.name)}: tensors", each.tensors)
        given = [read_kv(kv, page_size)]
        if draft is not None:
            given.append(read_kv(draft, page_size, "draft"))
            if given[1].num_slots != given[0].num_slots:
                raise MemoryLayoutError(
                    f"draft: {given[1].num_slots} pages, but the target has {given[0].num_slots}; "
                    "both go by the same page numbers, so give them equal pools"
                )
        given += [read_state(each) for each in state if len(each.tensors)]
        seen = [plane for each in given for layer in each.layers for plane in layer]
        index = one_device(seen)
        rows = None
        if aux is not None:
            found = see(aux, "aux")
            if len(found.shape) != 2 or found.itemsize != 1 or "uint8" not in found.dtype:
                raise MemoryLayoutError(f"aux: {found.dtype} {found.shape}, expected uint8 [slots, row_bytes]")
            if found.device != HOST:
                raise MemoryLayoutError(f"aux: on {found.place}; aux rows are the host's: give them on the CPU")
            rows = found.region.array().reshape(found.shape)
            seen.append(found)
        refuse_overlap(seen)
        return cls(
            (_all_of(index, each, page_size, given[0]) for index, each in enumerate(given)),
            page_size=page_size,
            aux=rows,
            device=None if index == HOST else _open(index),
            owner=(kv, draft, tuple(state), aux),
            shapes=tuple(each.shape for each in given),
        )

    @classmethod
    def allocate(
        cls,
        held: tuple[LocalShard, ...],
        page_size: int,
        num_pages: int,
        state_slots: Mapping[str, int] | None = None,
        aux_slots: int = 0,
        aux_row_bytes: int = 0,
        device: Device | None = None,
        mem_pool: str = "default",
    ) -> KVPool:
        """A pool in one allocation, zeroed: segment by segment, layer by layer, K before V, aux rows last.

        Args:
            held: what the rank holds, of `layout.holding.held` for this `page_size`.
            num_pages: of KV and draft.
            state_slots: items of each state component, by name; needed for those that have layers here.
            device: where it shall be, aux rows excepted; None: in the host's memory.
            mem_pool: of the device, as `Device.allocate` takes it.
        """
        items = state_slots or {}
        slots = [items.get(each.segment.name, 0) if each.segment.state else num_pages for each in held]
        slots = [count if each.num_layers else 0 for each, count in zip(held, slots, strict=True)]
        short = [each.segment.name for each, count in zip(held, slots, strict=True) if each.num_layers and count <= 0]
        if short or min(aux_slots, aux_row_bytes) < 0 or (aux_slots > 0) != (aux_row_bytes > 0):
            raise MemoryLayoutError(
                "a pool needs pages, items of every state component, and aux slots with a row size; "
                f"got {num_pages} pages, items {dict(items)}, aux {aux_slots} x {aux_row_bytes}"
                + (f": none for {', '.join(short)}" if short else "")
            )
        sizes = [
            [count * plane.rows * each.heads * plane.head_bytes for plane in each.segment.planes]
            for each, count in zip(held, slots, strict=True)
        ]
        aux_bytes = aux_slots * aux_row_bytes
        blocks_bytes = sum(
            each.num_layers * sum(map(_aligned, planes)) for each, planes in zip(held, sizes, strict=True)
        )
        allocations, view, rows = _allocations(blocks_bytes, aux_bytes, device, mem_pool)
        at, _, index = allocations[0].region
        segments = []
        for each, count, planes in zip(held, slots, sizes, strict=True):
            blocks = []
            for _ in range(each.num_layers):
                layer = []
                for nbytes in planes:
                    layer.append(Region(at, nbytes, index))
                    at += _aligned(nbytes)
                blocks.append(tuple(layer))
            segments.append(SegmentMemory(each, count, blocks, view))
        return cls(
            segments,
            page_size=page_size,
            aux=None if rows is None else rows.reshape(aux_slots, aux_row_bytes),
            device=device,
            allocations=allocations,
        )

    @property
    def num_pages(self) -> int:
        """Pages of KV."""
        return self.segments[0].num_slots

    def shape(self) -> ModelShape:
        """The model, where this pool has all of its layers.

        Raises:
            MemoryLayoutError: the pool was allocated, so that only whoever planned it knows the model.
            LayoutError: a state component runs beside layers that are not here.
        """
        if not self._shapes:
            raise MemoryLayoutError("this pool was allocated for a plan: its model is not known; give the agent model=")
        kv, *others = self._shapes
        assert isinstance(kv, ModelShape)
        drafts = [other for other in others if isinstance(other, ModelShape)]
        states = tuple(other for other in others if isinstance(other, StateShape))
        return replace(kv, draft=drafts[0] if drafts else None, states=states)

    def place(self, held: tuple[LocalShard, ...]) -> None:
        """Say which layers and heads of the model this memory is, before it is registered or written to.

        Raises:
            MemoryLayoutError: the pool is not that; names the segment and the numbers.
        """
        mine = {segment.name: segment for segment in self.segments if segment.held.num_layers}
        placed = [_placed(mine.pop(each.segment.name, None), each) for each in held]
        if mine:
            raise MemoryLayoutError(f"the pool holds {', '.join(mine)}, which the model does not have")
        self.segments = tuple(placed)

    def addresses(self) -> PoolAddresses:
        """Base addresses and sizes, for peers and for descriptor arithmetic."""
        segments = tuple(segment.addresses for segment in self.segments)
        base = 0 if self.aux is None else self.aux.ctypes.data
        return PoolAddresses(segments, base, self.aux_row_bytes, self.aux_slots)

    def regions(self) -> list[Region]:
        """What a transport registers: one region per allocation, or per run of tensors that touch."""
        if self._allocations:
            return [allocation.region for allocation in self._allocations]
        regions = [block for segment in self.segments for layer in segment.blocks for block in layer]
        if self.aux is not None:
            regions.append(Region(self.aux.ctypes.data, self.aux.nbytes))
        return merge_adjacent(regions)

    def close(self) -> None:
        """Let go of the memory; what is ours is given back now. Idempotent."""
        self._owner = None
        self.aux = None
        for segment in self.segments:
            segment.close()
        for allocation in self._allocations:
            allocation.close()
        self._allocations = ()


def _allocations(
    blocks_bytes: int, aux_bytes: int, device: Device | None, mem_pool: str
) -> tuple[list[Allocation], Callable[[Region], Bytes], Bytes | None]:
    """Zeroed memory of ours: the first holds the blocks; how the host sees those; and the aux rows' bytes.

    Aux rows lie behind the blocks of the host, and beside those of a device.
    """
    if device is None:
        slab = HugePageMemory(blocks_bytes + aux_bytes)
        return [slab], slab.view, slab.array[blocks_bytes:] if aux_bytes else None
    there = DeviceAllocation(device, blocks_bytes, mem_pool)
    device.fill(there.region.addr, blocks_bytes, 0)
    if not aux_bytes:
        return [there], Region.array, None
    beside = HugePageMemory(aux_bytes)
    return [there, beside], Region.array, beside.array


def _open(index: int) -> Device:
    # Only pools on a GPU need what drives one.
    from kvctl_agent.device.registry import open_device

    return open_device(index)


def _all_of(index: int, given: TensorSpec, page_size: int, target: TensorSpec) -> SegmentMemory:
    """The memory of a segment that is taken to be here with all of its layers, and with its first heads."""
    count = len(given.layers)
    if isinstance(given.shape, StateShape):
        plane = Plane(given.name, given.shape.rows, given.shape.head_bytes)
        segment = Segment(index, given.name, 0, count, given.shape.heads, (plane,), given.shape.layers)
    else:
        first = 0 if given is target else len(target.layers)
        planes = given.shape.planes(page_size)
        segment = Segment(index, given.name, first, first + count, given.shape.num_kv_heads, planes)
    held = LocalShard(segment, segment.layer_lo, segment.layer_hi, 0, given.heads)
    return SegmentMemory(held, given.num_slots, [tuple(plane.region for plane in layer) for layer in given.layers])


def _placed(memory: SegmentMemory | None, held: LocalShard) -> SegmentMemory:
    """The same bytes under the plan's numbers; raises MemoryLayoutError where they are something else."""
    name = held.segment.name
    if memory is None:
        if held.num_layers:
            raise MemoryLayoutError(
                f"{name}: the pool has none of it, but this rank holds {held.num_layers} of its layers"
            )
        return SegmentMemory(held, 0, ())
    was, now = memory.held, held
    compared = [
        ("layers", was.num_layers, now.num_layers),
        ("heads on this rank", was.heads, now.heads),
        ("heads of the model", was.segment.heads, now.segment.heads),
        ("planes", _words(was.segment.planes), _words(now.segment.planes)),
    ]
    for what, here, planned in compared:
        if here != planned:
            raise MemoryLayoutError(f"{name}: the pool has {here} {what}, but the plan says {planned}")
    return SegmentMemory(held, memory.num_slots, memory.blocks, memory.view)


def _words(planes: tuple[Plane, ...]) -> str:
    return ", ".join(f"{plane.name} {plane.rows} x {plane.head_bytes} bytes" for plane in planes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_ALIGN_BYTES) * _BLOCK_ALIGN_BYTES
