"""The end of the terminal is the end of the program.

A hang-up signal ends it by itself. But whoever runs under nohup, or in a session without a leader, gets no signal:
there, reading from the lost terminal returns nothing at once, for ever, and a full output queue blocks. So a thread
waits for the hang-up and ends the process, which holds nothing that would have to be put away.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import TracebackType

_LOOK_MS = 500
_HUNG_UP = 128 + signal.SIGHUP


class TerminalWatch:
    """Ends this process once the terminal behind `descriptor` is gone; a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvctl-top-terminal", daemon=True)

    def __enter__(self) -> TerminalWatch:
        # nohup and some shells have it ignored; a screen that nobody sees must not live on.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, 0)  # hang-ups and errors are told anyway
        while not self._done.is_set():
            if poll.poll(_LOOK_MS):
                os._exit(_HUNG_UP)
