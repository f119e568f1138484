"""What a transport registers: an address, a length and a device. A plain tuple, so any transport can take it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvctl_agent.contract.memory import HOST


class Region(NamedTuple):
    """One span of this process's memory, in bytes; `device` is the number of the GPU it is on."""

    addr: int
    nbytes: int
    device: int = HOST


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
