"""Staging memory: the writer's staging buffers and the decode rank's ring."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvctl_agent.device.base import Device
from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.memory.allocation import allocate
from kvctl_agent.memory.region import MemorySpan, Region

_BUFFER_ALIGN_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One staging buffer."""

    index: int
    span: MemorySpan


class StagingBuffers:
    """A fixed number of staging buffers of equal size in one allocation, so that one registration covers all.

    `acquire` and `release` may be called from any thread and do not wait. A buffer whose write may still be in flight
    is quarantined by not releasing it; `in_use` counts it.

    Attributes:
        count: Number of buffers.
        buffer_bytes: Bytes of each.
        high_water: Largest number of buffers in use at one time so far.
    """

    def __init__(self, count: int, buffer_bytes: int, device: Device | None = None, mem_pool: str = "default") -> None:
        """Allocate `count` buffers of `buffer_bytes`, rounded up to whole 4 KiB pages.

        Args:
            device, mem_pool: As for `allocate`.

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
        self._acquired: dict[int, Buffer] = {}
        self.high_water = 0

    def acquire(self) -> Buffer | None:
        """Return a free buffer, or None if all are in use. Does not wait."""
        with self._lock:
            if not self._free:
                return None
            buffer = self._free.pop()
            self._acquired[buffer.index] = buffer
            self.high_water = max(self.high_water, len(self._acquired))
            return buffer

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the free list.

        Raises:
            LocalProtocolError: the buffer is not in use.
        """
        with self._lock:
            if self._acquired.get(buffer.index) is not buffer:
                raise LocalProtocolError(f"staging buffer {buffer.index} was released but is not in use")
            del self._acquired[buffer.index]
            self._free.append(buffer)

    @property
    def in_use(self) -> int:
        """Number of buffers in use."""
        return len(self._acquired)

    def region(self) -> Region:
        """Return the region of all buffers, to register with the transport."""
        return self._memory.region

    def close(self) -> None:
        """Free the memory; idempotent. Copies into it and writes from it must have ended."""
        with self._lock:
            self._free.clear()
        self._memory.close()

    def _buffer(self, index: int) -> Buffer:
        return Buffer(index, self._memory.span(index * self.buffer_bytes, self.buffer_bytes))


class RingMemory:
    """The memory of a decode rank's ring. The protocol keeps the grants; this class knows none.

    Attributes:
        nbytes: Size of the ring.
        addr: Address of its first byte.
    """

    def __init__(self, nbytes: int, device: Device | None = None, mem_pool: str = "default") -> None:
        """Allocate a ring of `nbytes`; the arguments are those of `allocate`."""
        self._memory = allocate(nbytes, device, mem_pool)
        self._open_bytes = nbytes  # 0 after close
        self.nbytes = nbytes
        self.addr = self._memory.region.addr

    def view(self, offset: int, nbytes: int) -> MemorySpan:
        """Return ring region [offset, offset + nbytes).

        Raises:
            MemoryLayoutError: the region is not inside the ring, or the ring is closed.
        """
        if offset < 0 or nbytes <= 0 or offset + nbytes > self._open_bytes:
            raise MemoryLayoutError(
                f"ring region [{offset}, {offset + nbytes}) is outside the ring of {self._open_bytes} bytes"
            )
        return self._memory.span(offset, nbytes)

    def region(self) -> Region:
        """Return the region of the ring, to register with the transport."""
        return self._memory.region

    def close(self) -> None:
        """Free the memory; idempotent. All writers must have drained."""
        self._open_bytes = 0
        self._memory.close()
