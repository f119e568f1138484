"""Memory regions, which transports register, and memory spans, which copies read and write."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import MemoryLayoutError


class Region(NamedTuple):
    """A range of this process's memory: `nbytes` bytes at `addr`. `device` is the GPU's number, or HOST."""

    addr: int
    nbytes: int
    device: int = HOST

    def array(self) -> npt.NDArray[np.uint8]:
        """Returns an array that views the bytes. The memory must outlive the array.

        Raises:
            MemoryLayoutError: the region is on a device.
        """
        if self.device != HOST:
            raise MemoryLayoutError(f"{self.nbytes} bytes on GPU {self.device} cannot be read from the host")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.addr))


class MemorySpan(NamedTuple):
    """Contiguous memory of a staging buffer or the ring. `array` has its bytes, and is None on a device."""

    addr: int
    nbytes: int
    array: npt.NDArray[np.uint8] | None


def merge_adjacent(regions: Iterable[Region]) -> list[Region]:
    """Returns the regions sorted by address, with adjacent and overlapping ones joined: the engine registers fewer."""
    merged: list[Region] = []
    for region in sorted(regions):
        last = merged[-1] if merged else None
        if last is not None and last.addr + last.nbytes >= region.addr and last.device == region.device:
            end = max(last.addr + last.nbytes, region.addr + region.nbytes)
            merged[-1] = Region(last.addr, end - last.addr, last.device)
        else:
            merged.append(region)
    return merged
