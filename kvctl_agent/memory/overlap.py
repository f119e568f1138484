"""Decides whether two strided tensors share bytes, by arithmetic on their strides instead of their extents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Tensors of unlike strides that alternate more often are taken to share bytes.
_MAX_STEPS = 4096

Axes = tuple[tuple[int, int], ...]


class Elements(NamedTuple):
    """Blocks of bytes of a tensor: `nbytes` bytes at `addr` plus any sum of multiples of the axes' strides.

    Attributes:
        axes: (count, stride) in bytes, by ascending stride; each stride is at least the extent of the axes before it.
    """

    addr: int
    nbytes: int
    axes: Axes

    @property
    def end(self) -> int:
        """End of the last block."""
        return self.addr + sum((count - 1) * stride for count, stride in self.axes) + self.nbytes


def elements(addr: int, itemsize: int, axes: Iterable[tuple[int, int]]) -> Elements:
    """Returns the blocks of a tensor whose elements do not overlap, with contiguous axes merged."""
    nbytes, merged = itemsize, list[tuple[int, int]]()
    for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if not merged and stride == nbytes:
            nbytes *= count
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0] * count, merged[-1][1]
        else:
            merged.append((count, stride))
    return Elements(addr, nbytes, tuple(merged))


def disjoint(a: Elements, b: Elements) -> bool:
    """Returns whether two tensors share no byte.

    Tensors of unlike strides that alternate often are taken to share bytes.
    """
    if a.end <= b.addr or b.end <= a.addr:
        return True
    if not a.axes and not b.axes:
        return False
    if a.axes and b.axes and a.axes[-1][1] == b.axes[-1][1]:
        # Only the difference of the two positions on this axis matters.
        (a_count, stride), (b_count, _) = a.axes[-1], b.axes[-1]
        inner, other, lowest, highest = _inner(a), _inner(b), 1 - b_count, a_count - 1
    else:
        if not b.axes or (a.axes and a.axes[-1][1] > b.axes[-1][1]):
            a, b = b, a
        # `b` has the larger stride.
        (count, stride), inner, other = b.axes[-1], _inner(b), a
        lowest, highest = 0, count - 1
    # Positions at which the extents of `inner` and `other` overlap.
    lowest = max(lowest, -((inner.end - 1 - other.addr) // stride))
    highest = min(highest, (other.end - 1 - inner.addr) // stride)
    if highest - lowest > _MAX_STEPS:
        return False
    return all(disjoint(inner._replace(addr=inner.addr + step * stride), other) for step in range(lowest, highest + 1))


def _inner(tensor: Elements) -> Elements:
    """Returns the first of the blocks along the outermost axis."""
    return tensor._replace(axes=tensor.axes[:-1])
