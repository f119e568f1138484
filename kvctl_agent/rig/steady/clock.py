"""A wall clock that is off: for a whole process, as on a host whose clock was set back while the rank was down."""

from __future__ import annotations

import time


def shift_wall_clock(seconds: float) -> None:
    """From now on this process's wall clock is off by so much; the monotonic clock is not. Call it once, early."""
    real_ns, shift_ns = time.time_ns, round(seconds * 1e9)

    def shifted_ns() -> int:
        return real_ns() + shift_ns

    time.time_ns = shifted_ns
    time.time = lambda: shifted_ns() / 1e9
