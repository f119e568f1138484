"""Allocations in host or device memory: staging buffers, the ring, and pools of the synthetic worker."""

from __future__ import annotations

from typing import Protocol

from kvctl_agent.device.base import Device
from kvctl_agent.memory.huge_pages import HugePageMemory
from kvctl_agent.memory.region import MemorySpan, Region


class Allocation(Protocol):
    """An allocation; implemented by `HugePageMemory` for the host and by `DeviceAllocation` for devices."""

    @property
    def region(self) -> Region:
        """The region to register with a transport."""
        ...

    def span(self, offset: int, nbytes: int) -> MemorySpan:
        """Return bytes [offset, offset + nbytes) as a span for copies."""
        ...

    def close(self) -> None:
        """Free the memory; idempotent. Its regions must be deregistered and all writes drained before."""
        ...


class DeviceAllocation:
    """An allocation in a device's memory, not zeroed."""

    def __init__(self, device: Device, nbytes: int, mem_pool: str = "default") -> None:
        """Allocate `nbytes` on `device`.

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
    """Allocate memory on `device`, or huge-page memory on the host if `device` is None.

    Args:
        nbytes: Size of the allocation.
        device: The device, or None for the host.
        mem_pool: The device's memory pool, as for `Device.allocate`; not used on the host.

    Raises:
        DeviceError, MemoryLayoutError: the memory cannot be allocated; the text has the size.
    """
    return HugePageMemory(nbytes) if device is None else DeviceAllocation(device, nbytes, mem_pool)
