"""Checking and merging descriptors loses no byte and lets none through that is not registered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import TransportError
from kvctl_agent.transport import Region
from kvctl_agent.transport.checks import Ranges, merge


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=20))
def test_ranges_accept_exactly_what_lies_in_one_region(descriptors: list[tuple[int, int]]) -> None:
    regions = [Region(5, 10), Region(20, 5), Region(30, 8)]
    ranges = Ranges("engine", regions)
    inside = all(
        any(region.addr <= addr and addr + size <= region.addr + region.nbytes for region in regions)
        for addr, size in descriptors
    )
    addrs, lengths = u64(*(addr for addr, _ in descriptors)), u64(*(size for _, size in descriptors))
    if inside:
        ranges.check(addrs, lengths, "us")
    else:
        with pytest.raises(TransportError, match="not in the registered memory of us"):
            ranges.check(addrs, lengths, "us")


def test_ranges_cannot_be_left_by_overflow() -> None:
    ranges = Ranges("engine", [Region(4096, 4096)])
    with pytest.raises(TransportError):
        ranges.check(u64(5000), u64(2**64 - 1), "us")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40, unique=True), st.booleans())
def test_merging_keeps_every_byte(rows: list[int], ordered: bool) -> None:
    rows = sorted(rows) if ordered else rows
    local = u64(*(row * 8 for row in rows))
    remote = u64(*(1000 + row * 8 for row in rows))
    merged = merge(local, remote, np.full(len(rows), 8, np.uint64))
    before = {(row * 8 + byte, 1000 + row * 8 + byte) for row in rows for byte in range(8)}
    after = {(int(a) + byte, int(b) + byte) for a, b, size in zip(*merged, strict=True) for byte in range(int(size))}
    assert after == before
    if ordered and rows == list(range(rows[0], rows[0] + len(rows))):
        assert len(merged[0]) == 1
