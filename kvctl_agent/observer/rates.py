"""Transfer rate, and ends of rooms, over the last seconds and minutes."""

from __future__ import annotations

from collections import Counter, deque

from kvctl_agent.contract.snapshots import RateWindow
from kvctl_agent.contract.states import RoomState

_SLICES_OF_WINDOW = 30

_Span = tuple[int, int, float]
"""Start and end of an interval with at least one transfer in progress, and the bytes transferred in it."""


class SpanRate:
    """Transfer rate over the last `window_ns`: bytes divided by the wall-clock union of the transfer spans.

    Dividing by the sum of overlapping spans would divide the rate by the concurrency. A window without a transfer has
    no rate (None) instead of a rate of zero.

    Overlapping spans are merged when they are added, so the memory depends on the gaps between transfers and not on
    their number. A span stops growing at 1/64 of the window, which keeps the start of the window precise; of a span
    that crosses an end of the window, the proportional share of its bytes counts. Totals over all stored spans make the
    cost of a query depend only on the spans that cross or lie outside the window's ends.
    """

    def __init__(self, window_ns: int) -> None:
        self._window = window_ns
        self._grain = max(1, window_ns // 64)
        self._spans: deque[_Span] = deque()
        self._busy_ns = 0  # total length of the spans
        self._bytes = 0.0
        self._rooms: deque[int] = deque()
        self._latest = 0

    def add(self, start: int, end: int, nbytes: int) -> None:
        """Adds a transfer of `nbytes` bytes from monotonic `start` to `end`; in any order."""
        end = max(end, start + 1)
        self._merge(start, end, float(nbytes))
        self._prune(end)

    def room(self, at: int) -> None:
        """Counts a room that finished at monotonic `at`, which is not before that of the previous call."""
        self._rooms.append(at)
        self._prune(at)

    def window(self, now: int) -> RateWindow:
        """Returns the rate over the window that ends at monotonic `now`."""
        since = now - self._window
        moved, busy, finished = self._bytes, self._busy_ns, len(self._rooms)
        for start, end, nbytes in self._spans:
            if start >= since:
                break
            outside = min(end, since) - start
            moved -= nbytes * outside / (end - start)
            busy -= outside
        for start, end, nbytes in reversed(self._spans):
            if end <= now:
                break
            outside = end - max(start, now)
            moved -= nbytes * outside / (end - start)
            busy -= outside
        for at in self._rooms:
            if at > since:
                break
            finished -= 1
        for at in reversed(self._rooms):
            if at <= now:
                break
            finished -= 1
        return {
            "window_ns": self._window,
            "bytes": round(moved) if busy else 0,
            "gb_per_s": moved / busy if busy else None,  # bytes per ns are GB per s
            "rooms_per_s": finished * 1e9 / self._window if finished else None,
        }

    def _merge(self, start: int, end: int, nbytes: float) -> None:
        spans = self._spans
        later: list[_Span] = []
        self._bytes += nbytes
        while spans and spans[-1][1] >= start:
            last = spans.pop()
            last_start, last_end, last_bytes = last
            if last_start > end:
                later.append(last)
                continue
            if last_start <= start and last_end - last_start >= self._grain:
                # The last span has its maximum length: it gets its share of the bytes, the rest starts a new span.
                share = nbytes * (min(end, last_end) - start) / (end - start)
                spans.append((last_start, last_end, last_bytes + share))
                start, nbytes = last_end, nbytes - share
                break
            self._busy_ns -= last_end - last_start
            start, end, nbytes = min(start, last_start), max(end, last_end), nbytes + last_bytes
        if start < end:
            self._busy_ns += end - start
            spans.append((start, end, nbytes))
        spans.extend(reversed(later))

    def _prune(self, moment: int) -> None:
        self._latest = max(self._latest, moment)
        since = self._latest - self._window
        while self._spans and self._spans[0][1] <= since:
            start, end, nbytes = self._spans.popleft()
            self._busy_ns -= end - start
            self._bytes = self._bytes - nbytes if self._spans else 0.0  # zero, so that rounding errors do not add up
        while self._rooms and self._rooms[0] <= since:
            self._rooms.popleft()


class RecentEnds:
    """Numbers of rooms that ended in the last `window_ns`, by state label.

    They are kept for slices of 1/30 of the window, so the window that is reported is up to one slice longer.

    Attributes:
        success_ns: monotonic time of the latest success; 0: none yet.
    """

    def __init__(self, window_ns: int) -> None:
        self._slice_ns = window_ns // _SLICES_OF_WINDOW
        self._slices: deque[tuple[int, Counter[str]]] = deque(maxlen=_SLICES_OF_WINDOW + 1)  # number of the slice
        self.success_ns = 0

    def add(self, state: str, at_ns: int) -> None:
        """Counts a room that ended at monotonic `at_ns`."""
        number = at_ns // self._slice_ns
        if not self._slices or self._slices[-1][0] < number:
            self._slices.append((number, Counter()))
        self._slices[-1][1][state] += 1
        if state == RoomState.SUCCESS.label:
            self.success_ns = at_ns

    def counts(self, now_ns: int) -> dict[str, int]:
        """Returns the numbers at monotonic `now_ns`; states without a room are absent."""
        oldest = now_ns // self._slice_ns - _SLICES_OF_WINDOW
        total: dict[str, int] = {}
        for number, counts in self._slices:
            if number >= oldest:
                for state, count in counts.items():
                    total[state] = total.get(state, 0) + count
        return total
