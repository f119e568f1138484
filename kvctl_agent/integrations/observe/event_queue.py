"""Passes the events that hooks record in the threads of an engine to the tracker of the observed rank, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic_ns as now_ns
from typing import Any

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.observe.tracker import EventTracker

logger = logging.getLogger("kvctl")

_MOST_EVENTS = 4096  # before `open`, and while they wait
_MOST_WAITING = 1024  # for a turn, once they can be applied
_WAIT_NS = 10_000_000
_PUBLISH_NS = 1_000_000


class EventQueue:
    """Events of one rank; the engine's threads call its methods, none of which waits.

    Events wait for the scheduler's next turn, which applies them together: that costs a room of nine events 35 µs
    instead of 45. In a longer turn, a thread whose event comes 10 ms after the latest ones were applied applies all. A
    thread that finds another one at the events, or at the documents, leaves its event to that thread.
    """

    def __init__(self, engine: str) -> None:
        """Creates a queue that keeps its events until `open`."""
        self._engine = engine
        self._events: deque[tuple[Callable[..., None], int, tuple[Any, ...]]] = deque(maxlen=_MOST_EVENTS)
        self._using = threading.Lock()
        self._using.acquire()
        self._due_ns = self._publish_ns = 0
        self._tracker: EventTracker
        self._publisher: DocumentPublisher
        self._dropped = 0
        self._failure = ""  # the latest one that was logged

    def open(self, tracker: EventTracker, publisher: DocumentPublisher) -> None:
        """Applies events from now on, at first those so far, and publishes documents in the turns."""
        self._tracker, self._publisher = tracker, publisher
        self._using.release()
        self._apply()

    def add(self, method: Callable[..., None], at_ns: int, *arguments: Any) -> None:
        """Adds a call of a method of the tracker for an event at monotonic `at_ns`."""
        events = self._events
        waiting = len(events)
        if waiting == _MOST_EVENTS:
            self._dropped += 1
        events.append((method, at_ns, arguments))
        if at_ns >= self._due_ns or waiting >= _MOST_WAITING:
            self._apply()

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
        except Exception as error:  # an object of the engine is not as expected: its document is built in a minute
            self._log(f"the state of {self._engine}'s objects is not shown", error)
        finally:
            self._using.release()
        self._apply()

    def _log(self, text: str, error: Exception) -> None:
        former, self._failure = self._failure, f"{type(error).__name__}: {error}"
        if self._failure != former:
            logger.error("kvctl: %s: %s", text, self._failure)

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
                        tracker.lost(1, f"an event was lost: {type(error).__name__}: {error}")
                if self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    tracker.lost(dropped, f"{dropped} events were lost: too many at once")
                tracker.telemetry.flush()
            except Exception as error:  # the hook, and the next events, go on
                self._log(f"events of {self._engine} are not shown", error)
            finally:
                using.release()
