"""Allocates host or device memory for staging buffers, the staging ring, and pools of the synthetic worker.

Host memory is backed by huge pages, with which copies between processes reach 15 GB/s instead of 6 GB/s. The mapping is
private, because a shared anonymous mapping is shmem, which the kernel does not back with huge pages by default. Every
page is touched once at allocation, because the first write to a new page costs more than copying it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import HOST
from kvctl_agent.device.base import Device
from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.memory.region import MemorySpan, Region

HUGE_PAGE_BYTES = 2 << 20
_SMALL_PAGE_BYTES = 4096
# Below this size, starting a second thread costs more than it saves in page faults.
_TWO_THREADS_FROM_BYTES = 32 << 20

# Between tensors that malloc placed side by side are its headers and the rest of a page.
_ALLOCATOR_GAP_BYTES = 2 * _SMALL_PAGE_BYTES

_MADV_COLLAPSE = 25  # the module mmap does not name it
_COLLAPSE_BYTES = 128 << 20  # at once
_COLLAPSE_S = 10.0
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

Bytes = npt.NDArray[np.uint8]


class HugePageMemory:
    """Anonymous host memory, zeroed, aligned to 2 MiB, with all pages faulted in.

    Attributes:
        array: The memory, uint8 `[nbytes]`.
        addr: Address of the first byte, a multiple of 2 MiB.
        nbytes: The requested size. The mapping is rounded up to whole huge pages.
    """

    def __init__(self, nbytes: int) -> None:
        """Maps `nbytes` bytes, advises the kernel to use huge pages and faults all pages in.

        Raises:
            MemoryLayoutError: `nbytes` is not positive, or the memory cannot be mapped.
        """
        if nbytes <= 0:
            raise MemoryLayoutError(f"cannot map {nbytes} bytes; request at least one byte")
        self.nbytes = nbytes
        mapped_bytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            # One huge page more than needed, so that there is always an aligned start.
            self._map = mmap.mmap(-1, mapped_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryLayoutError(
                f"cannot map {nbytes} bytes: {error}; request less or raise the memory limit"
            ) from error
        # madvise fails on a kernel without transparent huge pages; small pages still work.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        lead = -whole.ctypes.data % HUGE_PAGE_BYTES
        _touch(whole[lead : lead + mapped_bytes])
        self.array: Bytes = whole[lead : lead + nbytes]
        self.addr: int = self.array.ctypes.data
        self.region = Region(self.addr, nbytes)
        self._closed = False

    def view(self, region: Region) -> Bytes:
        """Returns the bytes of a region inside this memory; unlike `Region.array`, valid also after `close`."""
        start = region.addr - self.addr
        return self.array[start : start + region.nbytes]

    def span(self, offset: int, nbytes: int) -> MemorySpan:
        """Returns bytes [offset, offset + nbytes) as a span for copies."""
        return MemorySpan(self.addr + offset, nbytes, self.array[offset : offset + nbytes])

    def close(self) -> None:
        """Returns the memory to the kernel; idempotent. First deregister its regions and let all writes end.

        The pages are freed immediately even if views still exist: a late reader sees zeros instead of crashing the
        process. The address range is unmapped with the last view.
        """
        if self._closed:
            return
        self._closed = True
        self.array = np.empty(0, dtype=np.uint8)
        self._map.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):  # a view still exists; the mapping ends with it
            self._map.close()
        del self._map

    def __enter__(self) -> HugePageMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _touch(array: Bytes) -> None:
    """Faults every page in, on two threads if there are two cores, because the kernel zeroes pages in parallel."""
    half = array.nbytes // 2 // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if array.nbytes < _TWO_THREADS_FROM_BYTES or len(os.sched_getaffinity(0)) < 2:
        array[::_SMALL_PAGE_BYTES] = 0
        return
    other = threading.Thread(target=_touch_part, args=(array[half:],), name="kvctl-page-touch")
    other.start()
    _touch_part(array[:half])
    other.join()


def _touch_part(array: Bytes) -> None:
    array[::_SMALL_PAGE_BYTES] = 0


def back_with_huge_pages(regions: Iterable[Region]) -> None:
    """Moves an engine's host memory into huge pages, as far as the kernel permits; the content stays.

    An allocator's memory has pages of 4 KiB, unless huge pages are always on. Each write between processes pins the
    pages that it goes to: SGLang's pools on two cores move 1.4 times as many rooms of 1,024 tokens with huge pages
    (TP1 -> TP1, path bulk).

    Only private anonymous memory changes: memory that is shared, mapped from a file or on a device stays as it is, and
    the kernel refuses pages that a driver has pinned. Pages that are not present are not allocated by the call; they
    come as huge pages when first written. Tensors that an allocator placed side by side count as one region, of which
    the whole huge pages change.

    The kernel copies 1 GB in 0.3 to 2 s (a virtual machine with two cores). What is not moved after 10 s is left to
    its background thread.
    """
    ranges: list[tuple[int, int]] = []
    for region in sorted(region for region in regions if region.device == HOST):
        end = region.addr + region.nbytes
        if ranges and region.addr <= ranges[-1][1] + _ALLOCATOR_GAP_BYTES:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
        else:
            ranges.append((region.addr, end))
    deadline = time.monotonic() + _COLLAPSE_S
    for first, last in _private_anonymous(ranges):
        start = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = last // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if start < end:
            # Both fail on kernels without transparent huge pages, and the second one before Linux 6.1.
            _madvise(start, end - start, mmap.MADV_HUGEPAGE)
            for part in range(start, end, _COLLAPSE_BYTES):
                if time.monotonic() < deadline:
                    _madvise(part, min(_COLLAPSE_BYTES, end - part), _MADV_COLLAPSE)


def _private_anonymous(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the parts of address ranges, in ascending order, that private anonymous mappings of this process hold."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        span, access, _offset, _device, inode = line.split(maxsplit=5)[:5]
        if access[3] != "p" or inode != "0":
            continue
        first, last = (int(address, 16) for address in span.split("-"))
        for start, end in ranges:
            if max(start, first) < min(end, last):
                yield max(start, first), min(end, last)


class Allocation(Protocol):
    """Interface of an allocation: `HugePageMemory` for the host, `DeviceAllocation` for devices."""

    region: Region
    """The region to register with a transport."""

    def span(self, offset: int, nbytes: int) -> MemorySpan:
        """Returns bytes [offset, offset + nbytes) as a span for copies."""
        ...

    def close(self) -> None:
        """Frees the memory; idempotent. Its region must be deregistered and all writes must have ended before."""
        ...


class DeviceAllocation:
    """An allocation in a device's memory, which is not zeroed."""

    def __init__(self, device: Device, nbytes: int, mem_pool: str = "default") -> None:
        """Allocates `nbytes` on `device`.

        Raises:
            DeviceError: the memory cannot be allocated.
        """
        self._memory = device.allocate(nbytes, mem_pool)
        self.region = Region(self._memory.addr, nbytes, device.index)

    def span(self, offset: int, nbytes: int) -> MemorySpan:
        return MemorySpan(self.region.addr + offset, nbytes, None)

    def close(self) -> None:
        self._memory.close()


def allocate(nbytes: int, device: Device | None, mem_pool: str = "default") -> Allocation:
    """Allocates memory on `device`, or huge-page memory on the host if `device` is None.

    `mem_pool` is the device's memory pool, as for `Device.allocate`; it is not used on the host.

    Raises:
        DeviceError, MemoryLayoutError: the memory cannot be allocated; the text has the size.
    """
    return HugePageMemory(nbytes) if device is None else DeviceAllocation(device, nbytes, mem_pool)


_BUFFER_ALIGN_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One staging buffer: its number in `StagingBuffers`, and its memory."""

    index: int
    span: MemorySpan


class StagingBuffers:
    """A fixed number of staging buffers of equal size in one allocation, so that one registration covers all.

    A peer never takes a buffer when it already holds as many as are free: at most half of the buffers, rounded up, if
    no other peer holds any. A stopped peer, whose writes do not end, therefore leaves buffers for the others.

    `acquire` and `release` may be called from any thread and do not wait. A buffer whose write may still be in flight
    is quarantined by not releasing it; `in_use` counts it.

    Attributes:
        high_water: Largest number of buffers in use at one time so far.
    """

    def __init__(self, count: int, buffer_bytes: int, device: Device | None = None, mem_pool: str = "default") -> None:
        """Allocates `count` buffers of `buffer_bytes` bytes each, rounded up to whole 4 KiB pages.

        `device` and `mem_pool` are as for `allocate`.

        Raises:
            MemoryLayoutError: a number is not positive, or the memory cannot be allocated.
        """
        if count <= 0 or buffer_bytes <= 0:
            raise MemoryLayoutError(f"{count} staging buffers of {buffer_bytes} bytes; both must be positive")
        self.count = count
        self.buffer_bytes = -(-buffer_bytes // _BUFFER_ALIGN_BYTES) * _BUFFER_ALIGN_BYTES
        self._memory = allocate(count * self.buffer_bytes, device, mem_pool)
        self._lock = threading.Lock()
        # Last in, first out: the cache lines of the most recently released buffer are still in cache.
        self._free = [self._buffer(index) for index in reversed(range(count))]
        self._acquired: dict[Buffer, str] = {}  # the peer of each
        self._counts: Counter[str] = Counter()  # by peer
        self.high_water = 0

    def acquire(self, peer: str) -> Buffer | None:
        """Returns a free buffer for a write to `peer`, or None if the peer may not take one now. Does not wait."""
        with self._lock:
            if self._counts[peer] >= len(self._free):
                return None
            buffer = self._free.pop()
            self._acquired[buffer] = peer
            self._counts[peer] += 1
            self.high_water = max(self.high_water, len(self._acquired))
            return buffer

    def release(self, buffer: Buffer) -> None:
        """Returns a buffer to the free list.

        Raises:
            LocalProtocolError: the buffer is not in use.
        """
        with self._lock:
            if buffer not in self._acquired:
                raise LocalProtocolError(f"staging buffer {buffer.index} was released but is not in use")
            peer = self._acquired.pop(buffer)
            self._counts[peer] -= 1
            if not self._counts[peer]:
                del self._counts[peer]
            self._free.append(buffer)

    @property
    def in_use(self) -> int:
        """Number of buffers in use."""
        return len(self._acquired)

    def region(self) -> Region:
        """Returns the region of all buffers, to register with the transport."""
        return self._memory.region

    def close(self) -> None:
        """Frees the memory; idempotent. Copies into it and writes from it must have ended."""
        with self._lock:
            self._free.clear()
        self._memory.close()

    def _buffer(self, index: int) -> Buffer:
        return Buffer(index, self._memory.span(index * self.buffer_bytes, self.buffer_bytes))


class RingMemory:
    """Memory of a decode rank's staging ring. Grants of ring regions are recorded by the protocol, not here."""

    def __init__(self, nbytes: int, device: Device | None = None, mem_pool: str = "default") -> None:
        """Allocates a ring of `nbytes` bytes; the arguments and exceptions are those of `allocate`."""
        self._memory = allocate(nbytes, device, mem_pool)
        self._open_bytes = nbytes  # 0 after close
        self.nbytes = nbytes
        self.addr = self._memory.region.addr

    def view(self, offset: int, nbytes: int) -> MemorySpan:
        """Returns the ring region [offset, offset + nbytes) as a span for copies.

        Raises:
            MemoryLayoutError: the region is not inside the ring, or the ring is closed.
        """
        if offset < 0 or nbytes <= 0 or offset + nbytes > self._open_bytes:
            raise MemoryLayoutError(
                f"ring region [{offset}, {offset + nbytes}) is outside the ring of {self._open_bytes} bytes"
            )
        return self._memory.span(offset, nbytes)

    def region(self) -> Region:
        """Returns the region of the ring, to register with the transport."""
        return self._memory.region

    def close(self) -> None:
        """Frees the memory; idempotent. No writer may have a write to the ring in flight."""
        self._open_bytes = 0
        self._memory.close()
