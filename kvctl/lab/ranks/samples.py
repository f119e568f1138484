"""A figure looked at from time to time during a run: how full the ring is.

Looking must cost nothing that could be measured, so it happens between other things, at most every few milliseconds,
and a long run is sampled more and more coarsely.
"""

from __future__ import annotations

from collections.abc import Callable

_LEAST_NS = 5_000_000  # between two looks when something happens anyway
_IDLE_NS = 20_000_000  # between two looks when nothing does
_MOST = 1024


class Samples:
    """`taken` holds [monotonic ns, figure], at most `_MOST` of them."""

    def __init__(self, read: Callable[[], int] | None) -> None:
        """None: there is nothing to look at."""
        self._read = read
        self._every = 1
        self._last_ns: int | None = None
        self.taken: list[list[int]] = []

    @property
    def next_ns(self) -> int | None:
        """When to look if nothing happens before."""
        return None if self._read is None or self._last_ns is None else self._last_ns + self._every * _IDLE_NS

    def look(self, now_ns: int) -> None:
        """Take a sample, unless the last one was just before."""
        if self._read is None or (self._last_ns is not None and now_ns < self._last_ns + self._every * _LEAST_NS):
            return
        self._last_ns = now_ns
        self.taken.append([now_ns, self._read()])
        if len(self.taken) >= _MOST:
            del self.taken[1::2]
            self._every *= 2
