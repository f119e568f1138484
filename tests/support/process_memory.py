"""Mappings of this process and their pages, from /proc/self/smaps."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


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
    """Returns the sum of `key` of the mappings that hold `nbytes` bytes from `addr`, in KiB; None if there are none."""
    found = mappings(addr, addr + nbytes)
    return sum(int(each[key].split()[0]) for each in found) if found else None


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
