"""Shows whether code gives up the GIL: a thread that waits for it then gets it and does not give it back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_LONGEST_S = 2.0


def gave_up_the_gil(code: Callable[[], object]) -> bool:
    """Runs `code` and returns whether another thread ran Python meanwhile.

    Nobody can take the GIL from a thread within the test's switch interval. A release of less than the wake-up of the
    other thread may pass unseen, so `code` should do what it does many times.
    """
    before = sys.getswitchinterval()
    begin, ended = threading.Event(), False
    ran: list[float] = []

    def compute() -> None:
        begin.wait()
        if ended:
            return
        since = time.monotonic()
        while not ended and time.monotonic() - since < _LONGEST_S:
            pass
        ran.append(time.monotonic())

    other = threading.Thread(target=compute)
    other.start()
    time.sleep(0.01)  # it waits for `begin`
    sys.setswitchinterval(60.0)
    try:
        begin.set()
        code()
        ended = True
    finally:
        ended = True
        sys.setswitchinterval(before)
        other.join()
    return bool(ran)
