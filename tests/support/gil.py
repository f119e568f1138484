"""Detects whether code gives up the GIL: a second thread runs Python then."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from operator import itemgetter, not_

_LONGEST_S = 2.0
_BEFORE, _BETWEEN = range(5_000_000), range(5_000)  # their sums take 100 ms and 100 µs, in which the GIL is kept


def gave_up_the_gil(code: Callable[[], object]) -> bool:
    """Runs `code` and returns whether another thread ran Python meanwhile; it keeps the GIL for two seconds.

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


def releases_the_gil(calls: Iterator[object]) -> bool:
    """Makes calls until one has released the GIL, and returns whether one has.

    A second thread has requested the GIL meanwhile, and CPython releases it only to hand it over then, so that no
    release is missed, however short.

    Args:
        calls: iterator that runs no bytecode, which would hand the GIL over between calls: a `map` of a function in C.
    """
    ran: list[None] = []
    ended = False

    def request() -> None:
        while not ended:
            ran.append(None)

    before = sys.getswitchinterval()
    other = threading.Thread(target=request)
    found = zip(map(sum, repeat(_BETWEEN)), calls, map(len, repeat(ran)), strict=False)
    sys.setswitchinterval(1e-5)
    gc.disable()  # finalizers are bytecode
    try:
        other.start()
        return any(chain(map(list.clear, [ran]), map(not_, map(sum, [_BEFORE])), map(itemgetter(2), found)))
    finally:
        ended = True
        gc.enable()
        sys.setswitchinterval(before)
        other.join()
