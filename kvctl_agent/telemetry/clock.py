"""Clock of an agent: measures with the monotonic clock and converts to wall time for output.

A step of the wall clock while a room is active would make durations negative. The offset between the clocks is
measured once, so that differences between reported wall times equal the measured durations.
"""

from __future__ import annotations

import time


class Clock:
    """Monotonic time with a fixed offset to the wall clock.

    Attributes:
        offset_ns: wall clock minus monotonic clock, taken at construction unless it is given.
    """

    offset_ns: int

    def __init__(self, offset_ns: int | None = None) -> None:
        if offset_ns is not None:
            self.offset_ns = offset_ns
            return
        # The best of five readings: a thread switch between the three calls must not distort the offset.
        best: tuple[int, int] | None = None
        for _ in range(5):
            before = time.monotonic_ns()
            wall = time.time_ns()
            after = time.monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, wall - (before + after) // 2)
        assert best is not None
        self.offset_ns = best[1]

    # A class attribute, so that the hot path calls the C function directly.
    now_ns = staticmethod(time.monotonic_ns)

    def stop(self, at_ns: int) -> None:
        """Stops the clock at monotonic `at_ns`, for readers of what a process that has ended has left."""
        self.now_ns = lambda: at_ns

    def wall_ns(self, moment_ns: int) -> int:
        """Converts a monotonic time to wall clock time (ns since the epoch)."""
        return moment_ns + self.offset_ns


def since(at_ns: int, now_ns: int) -> int | None:
    """Returns the ns from `at_ns` to `now_ns`; None if `at_ns` is 0, which means never."""
    return max(0, now_ns - at_ns) if at_ns else None
