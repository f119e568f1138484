"""A queue that wakes a poller: how other threads talk to the control loop."""

from __future__ import annotations

import os
import threading
from collections import deque

from kvctl_agent.protocol.events import Event


class Mailbox:
    """Events for the control loop, from any thread; `fileno` is readable while there may be any."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._woken = False
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def put(self, *events: Event) -> None:
        """Queue events and wake the loop; after close they are dropped, for nobody would read them."""
        self._events.extend(events)
        self.wake()

    def wake(self) -> None:
        if self._woken:
            return  # the loop will look before it sleeps again
        with self._lock:
            if not self._closed and not self._woken:
                self._woken = True
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[Event]:
        """All queued events, in order."""
        if self._woken:
            # Under the lock, since a waker marks and writes in two steps: a mark taken without its write would leave
            # the descriptor readable, and the loop spinning.
            with self._lock:
                if not self._closed:
                    os.eventfd_read(self._fd)
                self._woken = False
        events: list[Event] = []
        queue = self._events
        while queue:
            events.append(queue.popleft())
        return events

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
