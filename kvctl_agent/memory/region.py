"""What a transport registers: an address and a length. A plain tuple, so any transport can take it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Region(NamedTuple):
    """One span of this process's memory, in bytes."""

    addr: int
    nbytes: int


def merge_adjacent(regions: Iterable[Region]) -> list[Region]:
    """Sort by address and join the regions that touch: every registration costs an engine a table entry."""
    merged: list[Region] = []
    for region in sorted(regions):
        if merged and merged[-1].addr + merged[-1].nbytes == region.addr:
            merged[-1] = Region(merged[-1].addr, merged[-1].nbytes + region.nbytes)
        else:
            merged.append(region)
    return merged
