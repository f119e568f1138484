"""Overlap of strided tensors, compared with the sets of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.memory.overlap import disjoint, elements


def octets(addr: int, itemsize: int, axes: list[tuple[int, int]]) -> set[int]:
    found = {addr + byte for byte in range(itemsize)}
    for count, stride in axes:
        found = {byte + position * stride for byte in found for position in range(count)}
    return found


def nested_axes(random: np.random.Generator, itemsize: int) -> list[tuple[int, int]]:
    axes, extent = [], itemsize
    for _ in range(random.integers(0, 4)):
        count, stride = int(random.integers(1, 5)), extent + int(random.integers(0, 2) * random.integers(0, 7))
        axes.append((count, stride))
        extent += (count - 1) * stride
    return axes


def test_it_agrees_with_the_sets_of_bytes() -> None:
    random = np.random.default_rng(3)
    alternating = 0
    for _ in range(4000):
        itemsize = int(random.integers(1, 4))
        axes = nested_axes(random, itemsize)
        other_itemsize, other = (itemsize, axes) if random.integers(2) else (2, nested_axes(random, 2))
        first, second = octets(100, itemsize, axes), octets(at := int(random.integers(60, 160)), other_itemsize, other)
        apart = first.isdisjoint(second)
        a, b = elements(100, itemsize, axes), elements(at, other_itemsize, other)
        assert disjoint(a, b) == disjoint(b, a) == apart, (axes, at, other)
        assert (a.end, b.end) == (max(first) + 1, max(second) + 1)
        alternating += apart and a.end > b.addr and b.end > a.addr
    assert alternating > 100, "many of the disjoint pairs alternate"


@pytest.mark.parametrize(("shift", "apart"), [(64, True), (63, False), (65, False), (0, False)])
def test_fused_rows_of_a_large_pool_take_no_time(shift: int, apart: bool) -> None:
    axes: list[Any] = [(64, 1), (16, 128), (8, 16 * 128), (200_000, 8 * 16 * 128)]
    assert disjoint(elements(1 << 40, 1, axes), elements((1 << 40) + shift, 1, axes)) == apart


def test_unlike_strides_that_alternate_without_end_are_taken_to_overlap() -> None:
    assert not disjoint(elements(0, 1, [(1 << 20, 4)]), elements(1, 1, [(1 << 20, 8)]))
