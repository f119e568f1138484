"""Memory of our own, wherever a pool is: staging, the ring, and pools of the synthetic worker are allocations."""

from __future__ import annotations

from typing import Protocol

from kvctl_agent.device.base import Device
from kvctl_agent.memory.huge_pages import HugePageMemory
from kvctl_agent.memory.region import MemorySpan, Region


class Allocation(Protocol):
    """One allocation; `HugePageMemory` is one, too."""

    @property
    def region(self) -> Region:
        """What a transport registers."""
        ...

    def stretch(self, offset: int, nbytes: int) -> MemorySpan:
        """Bytes [offset, offset + nbytes) for kernels."""
        ...

    def close(self) -> None:
        """Give the memory back now; idempotent. Deregister and drain before closing."""
        ...


class DeviceAllocation:
    """Memory of a device, not zeroed."""

    def __init__(self, device: Device, nbytes: int, mem_pool: str = "default") -> None:
        """Raises DeviceError when it cannot be had."""
        self._memory = device.allocate(nbytes, mem_pool)
        self.region = Region(self._memory.addr, nbytes, device.index)

    def stretch(self, offset: int, nbytes: int) -> MemorySpan:
        return MemorySpan(self.region.addr + offset, nbytes, None)

    def close(self) -> None:
        self._memory.close()


def allocate(nbytes: int, device: Device | None, mem_pool: str = "default") -> Allocation:
    """Memory of `device`, or of the host where that is None.

    Args:
        mem_pool: of a device, as `Device.allocate` takes it.

    Raises:
        DeviceError, MemoryLayoutError: it cannot be had; says how much was asked for.
    """
    return HugePageMemory(nbytes) if device is None else DeviceAllocation(device, nbytes, mem_pool)
