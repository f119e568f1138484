"""What a lane costs: agents measure it and choose paths by it, `kvctl tune` predicts with it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class ConnectionCost(NamedTuple):
    """Costs of one lane.

    Attributes:
        write_gb_per_s: rate of one large contiguous write, 10⁹ bytes a second.
        us_per_write: post and completion of a write, whatever it holds.
        us_by_bytes: (bytes, µs) of one descriptor, by ascending size.
        counts: how many descriptors were in one write of each of these sizes.
        big_bytes: size of the large write.
        us_taken: by whole writes as they were measured: one of each of these sizes, and the large one.
    """

    write_gb_per_s: float
    us_per_write: float
    us_by_bytes: tuple[tuple[int, float], ...]
    counts: tuple[int, ...] = ()
    big_bytes: int = 0
    us_taken: tuple[float, ...] = ()

    def descriptor_us(self, nbytes: float) -> float:
        """Predicted µs of one descriptor: flat below the smallest size, the large rate above the largest."""
        points = self.us_by_bytes
        if nbytes <= points[0][0]:
            return points[0][1]
        for (below, low_us), (above, high_us) in pairwise(points):
            if nbytes <= above:
                return low_us + (high_us - low_us) * (nbytes - below) / (above - below)
        largest, us = points[-1]
        return us + (nbytes - largest) / (self.write_gb_per_s * 1e3)

    def write_us(self, descriptors: int, nbytes: float) -> float:
        """Predicted µs of a write of `nbytes` bytes in `descriptors` equal descriptors."""
        return self.us_per_write + descriptors * self.descriptor_us(nbytes / max(descriptors, 1))
