"""Detects whether code gives up the GIL: a second thread then takes it and keeps it for two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_LONGEST_S = 2.0


def gave_up_the_gil(code: Callable[[], object]) -> bool:
    """Runs `code` and returns whether another thread ran Python meanwhile.

    Meanwhile the switch interval is a minute, so that the other thread can run only if `code` releases the GIL. It may
    miss a release that is shorter than its wake-up, so `code` should repeat the call under test many times.
    """
    before = sys.getswitchinterval()
    begin, ran, ended = threading.Event(), threading.Event(), False

    def compute() -> None:
        begin.wait()
        if ended:
            return
        since = time.monotonic()
        while not ended and time.monotonic() - since < _LONGEST_S:
            pass
        ran.set()

    other = threading.Thread(target=compute)
    other.start()
    time.sleep(0.01)  # it waits for `begin`
    sys.setswitchinterval(60.0)
    try:
        begin.set()
        code()
    finally:
        ended = True
        sys.setswitchinterval(before)
        other.join()
    return ran.is_set()
