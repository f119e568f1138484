"""Staging buffers: bounded, never waiting, counted, and without overlap."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.memory.buffers import StagingBuffers


def test_buffers_are_disjoint_and_lie_in_the_registered_region() -> None:
    staging = StagingBuffers(3, 5000)
    region = staging.region()
    buffers = [staging.acquire() for _ in range(3)]
    spans = []
    for buffer in buffers:
        assert buffer is not None
        addr, nbytes, array = buffer.span
        assert array is not None
        assert (array.ctypes.data, array.nbytes) == (addr, nbytes)
        assert nbytes == staging.buffer_bytes >= 5000
        spans.append((addr, addr + nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert region.addr <= spans[0][0]
    assert spans[-1][1] <= region.addr + region.nbytes
    del array, buffer, buffers
    staging.close()
    staging.close()


def test_an_exhausted_pool_says_none_and_serves_again_after_a_release() -> None:
    staging = StagingBuffers(2, 4096)
    first, second = staging.acquire(), staging.acquire()
    assert first is not None
    assert second is not None
    assert staging.acquire() is None
    assert (staging.in_use, staging.high_water) == (2, 2)
    staging.release(first)
    assert (staging.in_use, staging.high_water) == (1, 2)
    assert staging.acquire() is first, "the buffer that is hottest in cache comes first"
    staging.close()


def test_a_buffer_cannot_be_released_twice_or_to_another_pool() -> None:
    staging, other = StagingBuffers(1, 4096), StagingBuffers(1, 4096)
    buffer = staging.acquire()
    assert buffer is not None
    with pytest.raises(LocalProtocolError, match="buffer 0 was released but is not in use"):
        other.release(buffer)
    staging.release(buffer)
    with pytest.raises(LocalProtocolError, match="not in use"):
        staging.release(buffer)
    staging.close()
    other.close()


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(MemoryLayoutError, match="0 staging buffers of 4096 bytes"):
        StagingBuffers(0, 4096)
