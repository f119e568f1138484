"""One clock per agent: all moments are taken monotonic and become wall time only when they are shown.

A wall clock that is stepped in the middle of a room would give negative stages. The offset is taken once, so the
distance between two moments that an agent shows is always the distance it measured.
"""

from __future__ import annotations

import time


class Clock:
    """Monotonic time with a fixed offset to the wall clock.

    Attributes:
        offset_ns: wall clock minus monotonic clock, taken at construction.
    """

    def __init__(self) -> None:
        # The tightest of a few readings: a thread switch between the three calls must not become the offset.
        best: tuple[int, int] | None = None
        for _ in range(5):
            before = time.monotonic_ns()
            wall = time.time_ns()
            after = time.monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, wall - (before + after) // 2)
        assert best is not None
        self.offset_ns: int = best[1]

    # Bound at class level: the hot path calls the C function directly.
    now_ns = staticmethod(time.monotonic_ns)

    def wall_ns(self, moment_ns: int) -> int:
        """Wall clock (ns since the epoch) of the monotonic moment `moment_ns`."""
        return moment_ns + self.offset_ns
