"""Mappings of this process and their pages, from /proc/self/smaps and /proc/self/pagemap."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_PRESENT = 1 << 63  # of a page's entry in pagemap


def mappings(first: int, last: int) -> list[dict[str, str]]:
    """Returns the fields of each mapping of this process that overlaps the addresses `[first, last)`."""
    found: list[dict[str, str]] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < last and first < int(span[2], 16)
            if inside:
                found.append({})
        elif inside:
            key, _, value = line.partition(":")
            found[-1][key] = value.strip()
    return found


def mapped_kib(addr: int, key: str, nbytes: int = 1) -> int | None:
    """Returns the sum of `key` of the mappings that hold `nbytes` bytes from `addr`, in KiB; None if there are none.

    The kernel makes one mapping of neighbours with the same properties: other memory may be in the sum.
    """
    found = mappings(addr, addr + nbytes)
    return sum(int(each[key].split()[0]) for each in found) if found else None


def resident_kib(addr: int, nbytes: int) -> int:
    """Returns how much of the `nbytes` bytes from `addr`, whole pages, is in memory, in KiB."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(addr // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(nbytes // mmap.PAGESIZE * 8), np.uint64)
    return int(np.count_nonzero(entries & np.uint64(_PRESENT))) * mmap.PAGESIZE // 1024


def _kernel_collapses() -> bool:
    """Whether this kernel moves pages into huge ones when asked to (Linux 6.1 and newer)."""
    with mmap.mmap(-1, 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start += -start % _HUGE_PAGE_BYTES
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
        return int(madvise(start, _HUGE_PAGE_BYTES, _MADV_COLLAPSE)) == 0


needs_collapse = pytest.mark.skipif(not _kernel_collapses(), reason="this kernel does not collapse pages when asked to")
