"""Short sleeps that are short: for threads that look for what nobody wakes them for."""

from __future__ import annotations

import ctypes

_PR_SET_TIMERSLACK = 29


def minimize_timer_slack() -> None:
    """Let the calling thread's sleeps end when they are over, even those of no time at all.

    Linux puts wake-ups off by up to 50 µs, so that timers can share an interrupt: of a pause of 20 µs it makes 74.
    Where that cannot be changed, pauses stay as long as they were.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
