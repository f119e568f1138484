"""Memory that parts pass through: the writer's bounded staging buffers and the decode rank's ring."""

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
    stretch: MemorySpan


class StagingBuffers:
    """A fixed number of equal buffers in one allocation, so that one registration covers them; never waited for.

    `acquire` and `release` may be called from any thread. A buffer whose write may still be in flight is simply
    not released: that is its quarantine, and `in_use` shows it.
    """

    def __init__(self, count: int, buffer_bytes: int, device: Device | None = None, mem_pool: str = "default") -> None:
        """Make `count` buffers of `buffer_bytes` each (rounded up to whole 4 KiB pages); see `allocate`."""
        if count <= 0 or buffer_bytes <= 0:
            raise MemoryLayoutError(f"{count} staging buffers of {buffer_bytes} bytes; both must be positive")
        self.count = count
        self.buffer_bytes = -(-buffer_bytes // _BUFFER_ALIGN_BYTES) * _BUFFER_ALIGN_BYTES
        self._memory = allocate(count * self.buffer_bytes, device, mem_pool)
        self._lock = threading.Lock()
        # The most recently released buffer goes out first: its lines are still in cache.
        self._free = [self._buffer(index) for index in reversed(range(count))]
        self._out: dict[int, Buffer] = {}
        self.high_water = 0

    def acquire(self) -> Buffer | None:
        """A buffer of `buffer_bytes`, or None when all are in use; never waits."""
        with self._lock:
            if not self._free:
                return None
            buffer = self._free.pop()
            self._out[buffer.index] = buffer
            self.high_water = max(self.high_water, len(self._out))
            return buffer

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back; raises LocalProtocolError for one that is not out."""
        with self._lock:
            if self._out.get(buffer.index) is not buffer:
                raise LocalProtocolError(f"staging buffer {buffer.index} was released but is not in use")
            del self._out[buffer.index]
            self._free.append(buffer)

    @property
    def in_use(self) -> int:
        """Buffers that are out now."""
        return len(self._out)

    def region(self) -> Region:
        """What the transport registers."""
        return self._memory.region

    def close(self) -> None:
        """Release the memory; idempotent. Copies into it and writes from it must have ended."""
        with self._lock:
            self._free.clear()
        self._memory.close()

    def _buffer(self, index: int) -> Buffer:
        return Buffer(index, self._memory.stretch(index * self.buffer_bytes, self.buffer_bytes))


class RingMemory:
    """The bytes of a decode rank's ring; who owns which of them is the protocol's affair."""

    def __init__(self, nbytes: int, device: Device | None = None, mem_pool: str = "default") -> None:
        """Make `nbytes` of ring; see `allocate`."""
        self._memory = allocate(nbytes, device, mem_pool)
        self._left = nbytes  # none once it is closed
        self.nbytes = nbytes
        self.addr = self._memory.region.addr

    def view(self, offset: int, nbytes: int) -> MemorySpan:
        """One granted region; raises MemoryLayoutError when it does not lie in the ring."""
        if offset < 0 or nbytes <= 0 or offset + nbytes > self._left:
            raise MemoryLayoutError(
                f"ring region [{offset}, {offset + nbytes}) is outside the ring of {self._left} bytes"
            )
        return self._memory.stretch(offset, nbytes)

    def region(self) -> Region:
        """What the transport registers."""
        return self._memory.region

    def close(self) -> None:
        """Release the memory; idempotent. Writers must have drained."""
        self._left = 0
        self._memory.close()
