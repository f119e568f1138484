"""Time that something took, overlaps counted once: what of a room's transfer was hidden behind its forward.

Parts of one room move at once, so their times must not be added up; the union is what an operator could have waited.
"""

from __future__ import annotations


class BusyTime:
    """Union of intervals in monotonic ns; one thread adds, any thread reads.

    Readers see one complete list or the other: adding puts a new list in place of the old one's end.
    """

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: tuple[tuple[int, int], ...] = ()

    def add(self, start: int, end: int) -> None:
        """One more interval; in about the order of time, so that what it touches is near the end."""
        spans = self._spans
        place = len(spans)
        later: tuple[tuple[int, int], ...] = ()
        while place and spans[place - 1][1] >= start:
            place -= 1
            first, last = spans[place]
            if first > end:
                later = (spans[place], *later)
            else:
                start, end = min(start, first), max(end, last)
        self._spans = (*spans[:place], (start, end), *later)

    def __len__(self) -> int:
        return len(self._spans)

    def split(self, moment: int) -> tuple[int, int]:
        """Length before and after `moment`."""
        before = after = 0
        for start, end in self._spans:
            before += max(0, min(end, moment) - start)
            after += max(0, end - max(start, moment))
        return before, after
