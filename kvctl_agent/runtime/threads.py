"""Base class of an agent's threads, and a function that reduces the timer slack of threads that poll."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod

_PR_SET_TIMERSLACK = 29


class AgentThread(ABC):
    """Base class of a daemon thread that runs `_run` until `_request_stop` is called."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Asks the thread to stop and waits up to `timeout` seconds; returns whether it has ended or never started."""
        self._request_stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None: ...

    @abstractmethod
    def _request_stop(self) -> None: ...


def minimize_timer_slack() -> None:
    """Reduces the timer slack of the calling thread, so that it can sleep for microseconds.

    Linux delays wake-ups by up to 50 µs so that timers can share an interrupt: a sleep of 20 µs takes 74 µs. If the
    slack cannot be changed, sleeps stay that long.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
