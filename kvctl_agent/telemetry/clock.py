"""Clock of an agent: measures with the monotonic clock and converts to wall time for output.

A step of the wall clock while a room is active would make durations negative. The offset between the clocks is
measured once, so that differences between reported wall times equal the measured durations.
"""

from __future__ import annotations

import time


class Clock:
    """Monotonic time with a fixed offset to the wall clock.

    Attributes:
        offset_ns: wall clock minus monotonic clock, taken at construction.
    """

    def __init__(self) -> None:
        # The best of five readings: a thread switch between the three calls must not distort the offset.
        best: tuple[int, int] | None = None
        for _ in range(5):
            before = time.monotonic_ns()
            wall = time.time_ns()
            after = time.monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, wall - (before + after) // 2)
        assert best is not None
        self.offset_ns: int = best[1]

    # A class attribute, so that the hot path calls the C function directly.
    now_ns = staticmethod(time.monotonic_ns)

    def wall_ns(self, moment_ns: int) -> int:
        """Converts a monotonic time to wall clock time (ns since the epoch)."""
        return moment_ns + self.offset_ns
