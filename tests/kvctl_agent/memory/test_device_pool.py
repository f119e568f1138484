"""Pools on a device: addresses, registered regions, and refused tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import DeviceError, MemoryLayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.pool import DraftKV, KVPool, StateTensors
from kvctl_agent.memory.region import Region
from tests.support.host_device import HostDevice

SHAPE = ModelShape(3, 4, 8, 6, 2, states=(StateShape("conv", (0, 2), 3, 8, 4),))
HELD = local_shards(SHAPE, 4, ParallelConfig(tp=2), RankCoord(0, 0, 0, 1))


class Cuda:
    """Resembles a tensor on a GPU; its memory is that of a CPU tensor."""

    def __init__(self, shape: tuple[int, ...], index: int = 0, dtype: torch.dtype = torch.float16) -> None:
        self.memory = torch.zeros(shape, dtype=dtype)
        self.shape, self.dtype = shape, dtype
        self.device = SimpleNamespace(type="cuda", index=index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


def layers(count: int, shape: tuple[int, ...], index: int = 0) -> list[Cuda]:
    return [Cuda(shape, index) for _ in range(count)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The opened devices, which are stand-ins."""
    asked: list[int] = []

    def open_device(index: int) -> HostDevice:
        asked.append(index)
        return HostDevice(index=index)

    monkeypatch.setattr("kvctl_agent.device.cuda.open_device", open_device)
    return asked


class TestAllocate:
    @pytest.mark.parametrize("index", [HOST, 3])
    def test_blocks_are_on_the_device_and_aux_rows_are_the_hosts(self, index: int) -> None:
        device = HostDevice(index=index)
        pool = KVPool.allocate(HELD, 4, 5, {"conv": 3}, aux_slots=2, aux_row_bytes=10, device=device)
        blocks, aux = pool.regions()
        assert (blocks.device, aux.device) == (index, HOST)
        assert pool.aux[0].shape == (2, 10)
        assert (aux.nbytes, (aux.addr,)) == (20, pool.addresses().aux_bases)
        for segment in pool.segments:
            for region in (block for layer in segment.blocks for block in layer):
                assert region.device == index
                assert blocks.addr <= region.addr <= blocks.addr + blocks.nbytes - region.nbytes
        zeroed = np.empty(blocks.nbytes, np.uint8)
        device.download(blocks.addr, zeroed)
        assert not zeroed.any()
        assert pool.device is device
        pool.close()
        pool.close()

    def test_without_aux_rows_there_is_one_region(self) -> None:
        pool = KVPool.allocate(HELD, 4, 5, {"conv": 3}, device=HostDevice())
        assert len(pool.regions()) == 1
        pool.close()

    def test_the_layout_is_the_hosts(self) -> None:
        here = KVPool.allocate(HELD, 4, 5, {"conv": 3}, aux_slots=2, aux_row_bytes=10)
        there = KVPool.allocate(HELD, 4, 5, {"conv": 3}, aux_slots=2, aux_row_bytes=10, device=HostDevice())

        def places(pool: KVPool) -> list[list[int]]:
            bases = [base for segment in pool.addresses().segments for layer in segment.bases for base in layer]
            return [[base - bases[0] for base in bases], [pool.nbytes]]

        assert places(here) == places(there)
        here.close()
        there.close()

    def test_the_host_cannot_look_at_a_gpu(self) -> None:
        pool = KVPool.allocate(HELD, 4, 5, {"conv": 3}, device=HostDevice(index=3))
        with pytest.raises(MemoryLayoutError, match="bytes on GPU 3 cannot be read from the host"):
            pool.segments[0].block(0, 0)
        pool.close()

    def test_a_kind_of_memory_that_is_not_there(self) -> None:
        with pytest.raises(DeviceError, match="mem_pool"):
            KVPool.allocate(HELD, 4, 5, {"conv": 3}, device=HostDevice(), mem_pool="other")


class TestTensors:
    def test_they_are_taken_where_they_are(self, opened: list[int]) -> None:
        k, v = layers(2, (20, 4, 8), 1), layers(2, (20, 4, 6), 1)
        pool = KVPool.from_tensors(k, v, page_size=4, total_kv_heads=8, aux=np.zeros((2, 8), np.uint8))
        assert opened == [1]
        assert pool.device is not None
        assert pool.device.index == 1
        wanted = [Region(each.data_ptr(), each.memory.nbytes, 1) for each in k + v]
        assert sorted(region for region in pool.regions() if region.device == 1) == sorted(wanted)
        assert [region.device for region in pool.regions()].count(HOST) == 1

    def test_latents_scales_draft_and_state_too(self, opened: list[int]) -> None:
        pool = KVPool.from_tensors(
            layers(2, (20, 1, 8)),
            None,
            page_size=4,
            k_scale=layers(2, (5, 2)),
            draft=DraftKV(layers(1, (20, 2, 8)), layers(1, (20, 2, 8)), 2),
            state=[StateTensors("conv", layers(2, (6, 3)))],
        )
        assert opened == [0]
        assert {block.device for segment in pool.segments for layer in segment.blocks for block in layer} == {0}

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ({"v": layers(2, (20, 4, 8), 1)}, "layer 0 k is on cuda:0, layer 0 v on cuda:1; all KV must be on one"),
            ({"v": [torch.zeros(20, 4, 8, dtype=torch.float16)] * 2}, "layer 0 v on the CPU"),
            ({"state": [StateTensors("conv", layers(1, (6, 3), 2))]}, "conv layer 0 on cuda:2"),
            ({"aux": Cuda((2, 8), 0, torch.uint8)}, "aux: on cuda:0; aux rows must be on the CPU"),
        ],
    )
    def test_what_is_apart_is_refused_by_name(self, opened: list[int], parts: dict[str, Any], message: str) -> None:
        given: dict[str, Any] = {"k": layers(2, (20, 4, 8)), "v": layers(2, (20, 4, 8)), **parts}
        with pytest.raises(MemoryLayoutError, match=message):
            KVPool.from_tensors(**given, page_size=4, total_kv_heads=8)
        assert opened == []

    def test_heads_outermost_is_described_by_strides_as_on_the_host(self, opened: list[int]) -> None:
        k, v = layers(2, (20, 4, 8)), layers(2, (20, 4, 8))
        for each in k + v:
            each.memory = torch.zeros(4, 20, 8, dtype=torch.float16).transpose(0, 1)
        pool = KVPool.from_tensors(k, v, page_size=4, total_kv_heads=8)
        assert pool.segments[0].addresses.strides == ((64, 16, 320),) * 2


class TestStaging:
    def test_it_is_on_the_device(self) -> None:
        device = HostDevice(index=2)
        staging, ring = StagingBuffers(2, 4096, device), RingMemory(1 << 20, device)
        buffer = staging.acquire("peer")
        assert buffer is not None
        assert (staging.region().device, ring.region().device) == (2, 2)
        assert buffer.span.array is ring.view(0, 1).array is None
        assert staging.region().addr <= buffer.span.addr < staging.region().addr + 4096 * 2
        assert ring.view(256, 16) == (ring.addr + 256, 16, None)
        ring.close()
        with pytest.raises(MemoryLayoutError, match="outside the ring of 0 bytes"):
            ring.view(256, 16)
        staging.close()
