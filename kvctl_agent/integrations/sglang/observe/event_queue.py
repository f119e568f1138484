"""Hands what hooks see in the threads of one of SGLang's managers to the manager's tracker, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic_ns as now_ns
from typing import Any

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.sglang.observe.tracker import Tracker, Wait, Writer

logger = logging.getLogger("kvctl")

_MOST_EVENTS = 4096  # before `open`, and while they wait
_WAIT_NS = 10_000_000
_PUBLISH_NS = 1_000_000
_MOST_WAITS = 4096


class EventQueue:
    """Events of one manager; SGLang's threads call its methods, none of which waits.

    Events wait for the scheduler's next turn, which applies them together: that costs a room of nine events 35 µs
    instead of 45. In a longer turn, a thread whose event comes 10 ms after the latest ones were applied applies all. A
    thread that finds another one at the events, or at the documents, leaves its event to that thread.

    Attributes:
        writers: prefill ranks that receivers have looked up, by the arguments of the look-up.
        waits: prefill: chunks that wait for a ring, by room, chunk and endpoint.
    """

    def __init__(self) -> None:
        """Creates a queue that keeps its events until `open`."""
        self.writers: dict[tuple[Any, ...], tuple[Writer, ...]] = {}
        self.waits: dict[tuple[int, int, str], Wait] = {}
        self._events: deque[tuple[Callable[..., None], int, tuple[Any, ...]]] = deque(maxlen=_MOST_EVENTS)
        self._using = threading.Lock()
        self._using.acquire()
        self._due_ns = self._publish_ns = 0
        self._tracker: Tracker
        self._publisher: DocumentPublisher
        self._failure = ""  # of the latest publication

    def open(self, tracker: Tracker, publisher: DocumentPublisher) -> None:
        """Applies events from now on, at first those so far, and publishes documents in the turns."""
        self._tracker, self._publisher = tracker, publisher
        self._using.release()
        self._apply()

    def add(self, method: Callable[..., None], at_ns: int, *arguments: Any) -> None:
        """Adds a call of a method of the tracker for an event at monotonic `at_ns`."""
        self._events.append((method, at_ns, arguments))
        if at_ns >= self._due_ns:
            self._apply()

    def wait(self, at_ns: int, key: tuple[int, int, str], pages: int, ring_round: int, end: int) -> None:
        """Records that a chunk may not be written yet; called again and again for the same chunk.

        Args:
            key: room, chunk and endpoint.
            ring_round, end: of its region in the decode rank's ring, for whose watermark it waits; end -1: it has none.
        """
        known = self.waits.get(key)
        if known is None or known.end != end:
            if len(self.waits) >= _MOST_WAITS:
                self.waits.clear()
            self.waits[key] = Wait(at_ns if known is None else known.since_ns, pages, ring_round, end)
            self.add(Tracker.parked, at_ns, key[0])

    def wait_over(self, key: tuple[int, int, str]) -> bool:
        """Records that a chunk may be written, or can never be; returns whether it had to wait."""
        if self.waits.pop(key, None) is None:
            return False
        self.add(Tracker.parked, now_ns(), key[0])
        return True

    def forget_waits(self, room: int) -> None:
        """Forgets the waits of a room that has ended."""
        if self.waits:
            for key in [key for key in self.waits.copy() if key[0] == room]:
                self.waits.pop(key, None)

    def flush(self) -> None:
        """Applies events and writes what a reader asks for, as `publish`."""
        self._publish_ns = 0
        self.publish()

    def publish(self) -> None:
        """Applies events, and publishes documents that are due, unless another thread is at them."""
        if self._events:
            self._apply()
        if now_ns() < self._publish_ns or not self._using.acquire(False):
            return
        try:
            self._publish_ns = now_ns() + _PUBLISH_NS
            self._tracker.telemetry.flush()  # also what a reader asks for
            self._publisher.turn()
        except Exception as error:  # an object of SGLang is not as expected: its document is built again in a minute
            former, self._failure = self._failure, f"{type(error).__name__}: {error}"
            if self._failure != former:
                logger.error("kvctl: the state of SGLang's objects is not shown: %s", self._failure)
        finally:
            self._using.release()
        self._apply()

    def _apply(self) -> None:
        events, using = self._events, self._using
        while events and using.acquire(False):  # by name the argument takes 0.2 µs
            try:
                tracker = self._tracker
                self._due_ns = now_ns() + _WAIT_NS
                while events:
                    method, at_ns, arguments = events.popleft()
                    try:
                        method(tracker, at_ns, *arguments)
                    except Exception as error:  # costs this event alone
                        telemetry, text = tracker.telemetry, f"{type(error).__name__}: {error}"
                        telemetry.metrics.add("kvctl_internal_errors_total", 1)
                        telemetry.recorder.record("observe", f"an event was lost: {text}", "error")
                tracker.telemetry.flush()
            finally:
                using.release()
