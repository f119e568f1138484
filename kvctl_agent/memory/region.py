"""Spans of memory: what a transport registers, and what kernels copy from and to.

Plain tuples, so any transport can take them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.memory import HOST
from kvctl_agent.errors import MemoryLayoutError


class Region(NamedTuple):
    """One span of this process's memory, in bytes; `device` is the number of the GPU it is on."""

    addr: int
    nbytes: int
    device: int = HOST

    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, by address: they must outlive the array.

        Raises:
            MemoryLayoutError: they are on a device.
        """
        if self.device != HOST:
            raise MemoryLayoutError(f"{self.nbytes} bytes on GPU {self.device} cannot be read from the host")
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.addr))


class MemorySpan(NamedTuple):
    """Contiguous staging memory, of a buffer or of the ring; `array` is None on a device."""

    addr: int
    nbytes: int
    array: npt.NDArray[np.uint8] | None


def merge_adjacent(regions: Iterable[Region]) -> list[Region]:
    """Sort by address and join the regions that touch: every registration costs an engine a table entry."""
    merged: list[Region] = []
    for region in sorted(regions):
        last = merged[-1] if merged else None
        if last is not None and last.addr + last.nbytes == region.addr and last.device == region.device:
            merged[-1] = Region(last.addr, last.nbytes + region.nbytes, last.device)
        else:
            merged.append(region)
    return merged
