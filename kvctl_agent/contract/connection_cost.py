"""Cost model of writes over one peer connection, measured by agents in order to choose transfer paths."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class ConnectionCost(NamedTuple):
    """Measured costs of writes over one peer connection.

    Attributes:
        write_gb_per_s: rate of one large contiguous write, 10⁹ bytes per second.
        us_per_write: fixed cost of posting and completing a write, µs.
        us_by_bytes: pairs of a descriptor size and its cost in µs, by ascending size.
        counts: number of descriptors in the measured write of each size in `us_by_bytes`.
        big_bytes: size of the large write.
        us_taken: duration in µs of each measured write: one per size in `us_by_bytes`, then the large write.
    """

    write_gb_per_s: float
    us_per_write: float
    us_by_bytes: tuple[tuple[int, float], ...]
    counts: tuple[int, ...] = ()
    big_bytes: int = 0
    us_taken: tuple[float, ...] = ()

    def descriptor_us(self, nbytes: float) -> float:
        """Predicts the cost in µs of one descriptor of `nbytes` bytes.

        Interpolates between the measured sizes. The cost is constant below the smallest size, and follows
        `write_gb_per_s` above the largest.
        """
        points = self.us_by_bytes
        if nbytes <= points[0][0]:
            return points[0][1]
        for (below, low_us), (above, high_us) in pairwise(points):
            if nbytes <= above:
                return low_us + (high_us - low_us) * (nbytes - below) / (above - below)
        largest, us = points[-1]
        return us + (nbytes - largest) / (self.write_gb_per_s * 1e3)

    def write_us(self, descriptors: int, nbytes: float) -> float:
        """Predicts the duration in µs of a write of `nbytes` bytes in `descriptors` descriptors of equal size."""
        return self.us_per_write + descriptors * self.descriptor_us(nbytes / max(descriptors, 1))
