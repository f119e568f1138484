"""Where launches find their tables: pinned host memory, each slot with a twin on the device, taken in turns.

Made once: the hot path allocates nothing and waits only for a device that is many launches behind. Kernels that read
pinned memory themselves, in place of the twin, took 11 µs longer to gather 84 MB on an H200.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvctl_agent.device.base import Blocks, PageIds
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.events import CudaEvent


class UploadSlot:
    """Tables of one request.

    Attributes:
        host: address of the pinned memory.
        device: where kernels read: the twin, or the pinned memory itself.
        memory, words, places: the pinned memory, as bytes and in both types.
        until: when the device has read it; None: it was never used.
    """

    __slots__ = ("device", "host", "memory", "places", "until", "words")

    def __init__(self, host: int, device: int, nbytes: int) -> None:
        memory = self.memory = memoryview((ctypes.c_uint8 * nbytes).from_address(host))
        self.host, self.device = host, device
        self.words: Blocks = np.ndarray(nbytes // 8, np.int64, memory)
        self.places: PageIds = np.ndarray(nbytes // 4, np.int32, memory)
        self.until: CudaEvent | None = None


class UploadSlots:
    """Of one stream, which runs what reads them in the order they were taken in."""

    def __init__(self, context: Context, count: int, nbytes: int) -> None:
        """
        Args:
            nbytes: of each.

        Raises:
            DeviceError: there is no memory for them.
        """
        self.nbytes = nbytes
        self._driver = load()
        self._context = context
        self._device: Any = None
        total = count * nbytes
        with context.visit():
            self._host = checked(self._driver.cuMemHostAlloc(total, 0), f"cannot pin {total} bytes of host memory")
            try:
                self._device = checked(self._driver.cuMemAlloc(total), f"cannot allocate {total} bytes for tables")
            except BaseException:
                self.close()
                raise
        self._slots = [
            UploadSlot(int(self._host) + at, int(self._device) + at, nbytes) for at in range(0, total, nbytes)
        ]
        self._next = 0

    def take(self) -> UploadSlot:
        """The oldest slot; waits while the device may still read it. The caller sets `until`."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.until is not None and not slot.until.done():
            checked(self._driver.cuEventSynchronize(slot.until.handle), "a kernel failed")
        return slot

    def close(self) -> None:
        """Gives the memory back; idempotent. The stream must have come to its end."""
        self._slots = []
        with self._context.visit():
            # Unchecked: on a lost device nothing can be given back, and events have said why.
            if self._device is not None:
                self._driver.cuMemFree(self._device)
            if self._host is not None:
                self._driver.cuMemFreeHost(self._host)
        self._device = self._host = None
