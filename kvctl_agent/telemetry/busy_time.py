"""Union of time intervals, used for the part of a room's transfer time that overlaps its forward.

Parts of one room are transferred concurrently, so adding their durations would count the same time repeatedly.
"""

from __future__ import annotations


class BusyTime:
    """Union of intervals in monotonic ns; one thread adds, any thread reads.

    `add` replaces the tuple of intervals as a whole, so that readers always see a consistent one.
    """

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: tuple[tuple[int, int], ...] = ()

    def add(self, start: int, end: int) -> None:
        """Adds an interval; fast if intervals arrive roughly in order of time."""
        spans = self._spans
        index = len(spans)
        later: tuple[tuple[int, int], ...] = ()
        while index and spans[index - 1][1] >= start:
            index -= 1
            first, last = spans[index]
            if first > end:
                later = (spans[index], *later)
            else:
                start, end = min(start, first), max(end, last)
        self._spans = (*spans[:index], (start, end), *later)

    def __len__(self) -> int:
        return len(self._spans)

    def split(self, moment: int) -> tuple[int, int]:
        """Returns the total length before and after `moment`, in ns."""
        before = after = 0
        for start, end in self._spans:
            before += max(0, min(end, moment) - start)
            after += max(0, end - max(start, moment))
        return before, after
