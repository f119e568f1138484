"""Ends the process when its terminal has been closed.

Normally SIGHUP ends it. Under nohup, or in a session without a leader, the signal has no effect or is not sent; reads
from the closed terminal then return immediately without data, again and again, and writes block when the output queue
is full. A thread therefore waits for the hang-up and ends the process, which has nothing to clean up.
"""

from __future__ import annotations

import os
import select
import signal
import threading

_POLL_MS = 500
_EXIT_CODE = 128 + signal.SIGHUP


class TerminalWatch:
    """Context manager that ends this process when the terminal of file descriptor `descriptor` has been closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvctl-top-terminal", daemon=True)

    def __enter__(self) -> TerminalWatch:
        # nohup and some shells ignore SIGHUP; the app must not continue without a terminal.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, 0)  # hang-ups and errors are always reported
        while not self._done.is_set():
            if poll.poll(_POLL_MS):
                os._exit(_EXIT_CODE)
