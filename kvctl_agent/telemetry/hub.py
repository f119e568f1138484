"""Telemetry of one agent: records its parts and rooms, and computes transfer rates, latencies and stage times.

A stage of a part lasts from the end of the previous stage that this rank observed: a part that was never gated has no
gate time, and a writer does not observe arrival. The duration of `ready` is the time since the first
layer group of the same chunk was ready.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvctl_agent import gil
from kvctl_agent.contract.health import FINISHED_NS
from kvctl_agent.contract.snapshots import LatencySummary, LayerRow, LayerStage, RateWindow, Role
from kvctl_agent.contract.states import STAGES, RoomState
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Metrics, Sample, Series
from kvctl_agent.telemetry.room_records import RoomRecord, RoomRecords
from kvctl_agent.telemetry.transfer_times import TransferTimes

RATE_WINDOW_NS = 10_000_000_000
MAX_GROUPS = 1024
"""Limit of (layer group, path) pairs in `StageTimes`, far above the number that any grouping produces."""

INTERPRETER_WINDOW_NS = 10_000_000_000
"""Time spent in waits after which `InterpreterWaits` computes its figure anew."""

_MOST_NOTED = 64
_MIN_WAITS = 20
_SLICES_OF_WINDOW = 30
_SLICE_BITS = 4
_SLICES = 1 << _SLICE_BITS
_TOP_BIT = 40  # 2**40 ns are 18 minutes; longer durations count as 18 minutes
_BUCKETS = (_TOP_BIT - _SLICE_BITS + 1) * _SLICES

_Counts = defaultdict[Series, float]
"""What is added to counters."""

_Durations = defaultdict[Series, list[float]]
"""What is added to histograms, in seconds."""

_Span = tuple[int, int, float]
"""Start and end of an interval with at least one transfer in progress, and the bytes transferred in it."""


class Telemetry:
    """Telemetry of one agent; the agent's threads write it, the admin thread reads it.

    What a part, a room or a message adds to counters, histograms and rates is only noted at first. `count_pending`
    counts it later, that of several rooms together, mostly while the control loop has nothing else to do. Readers call
    it before they read, so they miss nothing.

    Attributes:
        copying_since_ns: decode, monotonic: start of the oldest running copy; 0: no copy runs.
        arrival_turn_ns: decode, monotonic: start of the control loop's latest turn; 0: none yet.
        drain_began_ns, drain_ended_ns: monotonic: time of the latest drain, and of the latest resume; 0: never.
        interpreter: waits of the agent's loop for the interpreter.
        transfers: prefill: times of the transfers of rooms.
        on_finish: called with the record of each finished room, on the control thread, so it must only enqueue.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        history: int,
        timeline_events: int,
        recorder_events: int,
        failed: int = 256,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.metrics = Metrics(before_reading=self.count_pending)
        self.recorder = FlightRecorder(self.clock, name, recorder_events)
        self.rooms = RoomRecords(self.clock, name, role, history, timeline_events, failed)
        self._stages = StageTimes(name)
        self._rate = SpanRate(RATE_WINDOW_NS)
        self._latencies = Latencies()
        self._recent_ends = RecentEnds(FINISHED_NS)
        self.interpreter = InterpreterWaits()
        self.transfers = TransferTimes()
        self.on_finish: Callable[[RoomRecord], None] | None = None
        self.copying_since_ns = self.arrival_turn_ns = 0
        self.drain_began_ns = self.drain_ended_ns = 0
        self._arrived_ns = 0  # decode: time at which the latest part was in its pages
        self._noted: deque[_PartNote | _EndNote | Sequence[Sample]] = deque()  # not counted yet
        self._counting = threading.Lock()

    @property
    def stages(self) -> StageTimes:
        """Stage times of the parts so far."""
        self.count_pending()
        return self._stages

    @property
    def rate(self) -> SpanRate:
        """Transfer rate and rooms of the last seconds."""
        self.count_pending()
        return self._rate

    @property
    def latencies(self) -> Latencies:
        """Latencies of the latest rooms."""
        self.count_pending()
        return self._latencies

    @property
    def counted_latencies(self) -> Latencies:
        """As `latencies`, but without rooms that another thread counts just now: for threads that must not wait."""
        self.count_pending(1)
        return self._latencies

    @property
    def recent_ends(self) -> RecentEnds:
        """Rooms that ended in the last five minutes."""
        self.count_pending()
        return self._recent_ends

    def count_pending(self, least: int = 0, most: int | None = None) -> None:
        """Counts what has been noted; any thread may call it.

        Args:
            least: for threads that must not wait: does nothing if fewer are noted, or if another thread counts them
                now. With 0, all that was noted before the call is counted on return.
            most: for threads that must not take long: how many to count at most, the oldest first.
        """
        if len(self._noted) < least or not self._counting.acquire(blocking=not least):
            return
        counts, durations = _Counts(int), _Durations(list)
        try:
            counted = 0
            while self._noted and counted != most:
                counted += 1
                note = self._noted.popleft()
                if isinstance(note, _PartNote):
                    self._count_part(note, counts, durations)
                elif isinstance(note, _EndNote):
                    self._count_end(note, counts, durations)
                else:
                    for name, value, labels in note:
                        counts[name, labels] += value
        finally:
            try:
                self.metrics.update(counts, durations)
            finally:
                self._counting.release()

    def count(self, samples: Sequence[Sample]) -> None:
        """Adds to counters, by values of at least 0, when what has been noted is counted."""
        self._note(samples)

    def drain(self, on: bool) -> None:
        """Records the time at which draining starts (`on`) or stops; does nothing if that has happened already."""
        draining, now = self.drain_began_ns > self.drain_ended_ns, time.monotonic_ns()
        if on and not draining:
            self.drain_began_ns = now
        elif draining and not on:
            self.drain_ended_ns = now

    def open(self, room: int, nonce: int) -> RoomRecord:
        """Counts a room that was opened and returns its new record; arguments and errors as for `RoomRecords.open`."""
        record = self.rooms.open(room, nonce)
        self.metrics.add("kvctl_rooms_opened_total", 1)
        return record

    def finish(self, record: RoomRecord, now_ns: int) -> None:
        """Records that a room ended at monotonic `now_ns`, counts it, and moves its record to the finished rooms."""
        latency, overlap = record.finish(now_ns)
        if latency is None:
            self.transfers.cancel(record.room, now_ns)
        elif record.sent is not None:
            path = max(record.paths, key=lambda path: record.paths[path], default="")
            self.transfers.end(record.room, record.peers, path, now_ns)
        self._note(_EndNote(record.state_now.label, latency, overlap, now_ns))
        self.rooms.close(record)
        if (on_finish := self.on_finish) is not None:  # another thread may reset it
            on_finish(record)

    def part(
        self,
        record: RoomRecord,
        key: tuple[int, int, tuple[int, int]],
        peer: str,
        path: str,
        nbytes: int,
        moments: Mapping[str, int],
        forward_done_ns: int | None = None,
    ) -> None:
        """Records a part that this rank has sent or received in its room, the metrics, the stage times and the rate.

        Args:
            record: record of the part's room.
            key: writer, chunk and layers [lo, hi).
            peer: agent name at the other end.
            path: transfer path.
            nbytes: KV bytes of the part.
            moments: monotonic end of each observed stage by name, in order of the stages.
            forward_done_ns: prefill: end of the forward, or the current time while it runs; None on a decode rank.
        """
        first_ready = record.part(path, nbytes, key, peer, moments, moved=forward_done_ns is not None)
        self._note(_PartNote(key[2], path, nbytes, moments, forward_done_ns, first_ready, record.opened_at))

    def _note(self, note: _PartNote | _EndNote | Sequence[Sample]) -> None:
        self._noted.append(note)
        if len(self._noted) >= _MOST_NOTED:
            self.count_pending(_MOST_NOTED)

    def _count_part(self, note: _PartNote, counts: _Counts, durations: _Durations) -> None:
        layers, path, nbytes, moments, forward_done_ns, first_ready, opened_at = note
        last = 0
        for stage, at in moments.items():
            if last:
                durations["kvctl_stage_seconds", (stage,)].append((at - last) / 1e9)
            last = at
        counts["kvctl_parts_total", (path,)] += 1
        counts["kvctl_part_bytes_total", (path,)] += nbytes
        self._stages.add(layers, path, nbytes, moments, forward_done_ns, first_ready)
        if forward_done_ns is not None:
            first = min(moments.values())
        else:
            # A decode rank does not see the start of a write, and of a write directly into the pages only its end.
            # The part's bytes are spread over the time since the previous part, or since the room was opened.
            first = max(opened_at, self._arrived_ns)
            self._arrived_ns = max(last, self._arrived_ns)
        self._rate.add(min(first, last), last, nbytes)

    def _count_end(self, note: _EndNote, counts: _Counts, durations: _Durations) -> None:
        state, latency, overlap, at_ns = note
        if latency is not None:
            self._latencies.add(latency)
            self._rate.room(at_ns)
            durations["kvctl_room_seconds", ()].append(latency / 1e9)
            if overlap is not None:
                hidden, exposed = overlap
                durations["kvctl_transfer_hidden_seconds", ()].append(hidden / 1e9)
                durations["kvctl_transfer_exposed_seconds", ()].append(exposed / 1e9)
        self._recent_ends.add(state, at_ns)
        counts["kvctl_rooms_finished_total", (state,)] += 1


class _PartNote(NamedTuple):
    """A part that is to be counted; fields as the arguments of `Telemetry.part`, and as in `RoomRecord`."""

    layers: tuple[int, int]
    path: str
    nbytes: int
    moments: Mapping[str, int]
    forward_done_ns: int | None
    first_ready_ns: int | None
    opened_at: int


class _EndNote(NamedTuple):
    """A room that ended and is to be counted: label of its state, latency and overlap as in `RoomRecord`, and time."""

    state: str
    latency_ns: int | None
    overlap: tuple[int, int] | None
    at_ns: int


class _Group:
    """Stage times and bytes of all parts of one layer group on one path."""

    __slots__ = ("bytes", "compared", "exposed_ns", "histograms", "overlapped_ns", "parts")

    def __init__(self) -> None:
        self.parts = 0
        self.bytes = 0
        self.histograms: dict[str, LogHistogram] = {}
        self.compared = 0  # parts for which the end of the forward is known
        self.exposed_ns = 0
        self.overlapped_ns = 0

    def add(
        self, nbytes: int, moments: Mapping[str, int], forward_done_ns: int | None, first_ready_ns: int | None
    ) -> None:
        self.parts += 1
        self.bytes += nbytes
        first: int | None = None
        last = first_ready_ns
        for stage in STAGES:
            at = moments.get(stage)
            if at is None:
                continue
            if first is None:
                first = at
            if last is not None:
                if stage not in self.histograms:
                    self.histograms[stage] = LogHistogram()
                self.histograms[stage].add(at - last)
            last = at
        if forward_done_ns is not None and first is not None and last is not None:
            self.compared += 1
            self.exposed_ns += max(0, last - max(first, forward_done_ns))
            self.overlapped_ns += max(0, min(last, forward_done_ns) - first)

    def row(self, agent: str, layers: tuple[int, int], path: str) -> LayerRow:
        histograms = self.histograms.copy()
        return {
            "agent": agent,
            "layers": list(layers),
            "path": path,
            "parts": self.parts,
            "bytes": self.bytes,
            "stages": {stage: _summary(histograms.get(stage)) for stage in STAGES},
            "exposed_ns": self.exposed_ns // self.compared if self.compared else None,
            "overlapped_ns": self.overlapped_ns // self.compared if self.compared else None,
        }


class StageTimes:
    """Stage times of all parts so far, by (layer group, path): the data behind `kvctl layers`.

    `exposed_ns` and `overlapped_ns` of a row are means per part: the time between the first and the last event of the
    part that lies after, or before, the end of the forward. Over concurrent parts they must not be added up.

    Attributes:
        dropped: parts not counted because there were `MAX_GROUPS` groups already.
    """

    def __init__(self, agent_name: str) -> None:
        self._agent = agent_name
        self._writers = threading.Lock()  # several threads add; a reader takes no lock
        self._groups: dict[tuple[tuple[int, int], str], _Group] = {}
        self.dropped = 0

    def add(
        self,
        layers: tuple[int, int],
        path: str,
        nbytes: int,
        moments: Mapping[str, int],
        forward_done_ns: int | None = None,
        first_ready_ns: int | None = None,
    ) -> None:
        """Adds the stage times of one part.

        Args:
            layers: layers [lo, hi) of the part.
            path: bulk, slice, staged, direct; on a decode rank staged, or in-place for all others.
            nbytes: KV bytes of the part.
            moments: monotonic end of each stage by name; stages not observed are absent.
            forward_done_ns: monotonic end of the forward, if known.
            first_ready_ns: monotonic time at which the first layer group of the chunk was ready, if known.
        """
        with self._writers:
            group = self._groups.get((layers, path))
            if group is None:
                if len(self._groups) >= MAX_GROUPS:
                    self.dropped += 1
                    return
                group = self._groups[layers, path] = _Group()
            group.add(nbytes, moments, forward_done_ns, first_ready_ns)

    def rows(self) -> list[LayerRow]:
        """Returns one row per (layer group, path), ordered by first layer."""
        groups = self._groups.copy()
        return [groups[key].row(self._agent, *key) for key in sorted(groups)]


def room_rows(records: list[RoomRecord], clock: Clock, agent_name: str) -> list[LayerRow]:
    """Returns the stage times of one room, from the timelines of its records: one row per layer group and path.

    `moments` of a row has, for each part, the wall clock time of each stage, or None if the part has not reached the
    stage or does not have it. The path of a part is "" until an event contains the path.
    """
    parts: dict[tuple[int, int | None, int | None, str | None, tuple[int, int]], dict[str, int]] = {}
    moved: dict[tuple[int, int | None, int | None, str | None, tuple[int, int]], tuple[str, int]] = {}
    done: dict[int, int | None] = {}
    for record in records:
        done[record.nonce] = _forward_done(record, clock)
        for event in record.events:
            if event.layers is None or event.stage not in STAGES:
                continue
            key = (record.nonce, event.writer, event.chunk, event.peer, event.layers)
            parts.setdefault(key, {})[event.stage] = event.at_ns
            if event.path:
                moved[key] = (event.path, event.nbytes or moved.get(key, ("", 0))[1])
    first_ready: dict[tuple[int, int | None], int] = {}
    for (nonce, _, chunk, _, _), moments in parts.items():
        if (ready := moments.get("ready")) is not None:
            first_ready[nonce, chunk] = min(ready, first_ready.get((nonce, chunk), ready))
    groups: dict[tuple[tuple[int, int], str], tuple[_Group, list[dict[str, int | None]]]] = {}
    for key, moments in parts.items():
        path, nbytes = moved.get(key, ("", 0))
        group, shown = groups.setdefault((key[-1], path), (_Group(), []))
        group.add(nbytes, moments, done[key[0]], first_ready.get((key[0], key[2])))
        shown.append({stage: clock.wall_ns(moments[stage]) if stage in moments else None for stage in STAGES})
    rows: list[LayerRow] = []
    for layers, path in sorted(groups):
        group, shown = groups[layers, path]
        row = group.row(agent_name, layers, path)
        row["moments"] = shown
        rows.append(row)
    return rows


def _forward_done(record: RoomRecord, clock: Clock) -> int | None:
    """Returns the monotonic time at which the forward ended on a prefill rank; None on a decode rank.

    If the engine has not reported the end, returns the end of the room, or the current time while the room is active.
    """
    if record.sent is None:
        return None
    if record.forward_done_at is not None:
        return record.forward_done_at
    return clock.now_ns() if record.finished_at is None else record.finished_at


def _summary(histogram: LogHistogram | None) -> LayerStage:
    if histogram is None:
        return {"p50_ns": None, "p90_ns": None, "p99_ns": None, "count": 0}
    p50, p90, p99 = histogram.quantiles(0.50, 0.90, 0.99)
    return {"p50_ns": p50, "p90_ns": p90, "p99_ns": p99, "count": histogram.count}


class LogHistogram:
    """Histogram of durations in ns whose quantiles are accurate to 3 %; 5 KB, and one array increment per value.

    The buckets are log-linear: each power of two is divided into 16 equal slices, so the leading bits of a value are
    the index of its bucket. Storing all samples would be exact but needs too much memory per (layer group, path,
    stage). One thread at a time may call `add`; any thread may call `quantiles`.
    """

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.count = 0

    def add(self, duration_ns: int) -> None:
        """Counts one duration; a negative duration counts as zero."""
        if duration_ns < _SLICES:
            bucket = max(duration_ns, 0)
        else:
            shift = duration_ns.bit_length() - 1 - _SLICE_BITS
            # The leading bit is implied by the power of two, so only the slice bits remain.
            bucket = min((shift << _SLICE_BITS) + (duration_ns >> shift), _BUCKETS - 1)
        self._counts[bucket] += 1
        self.count += 1

    def quantiles(self, *wanted: float) -> list[int | None]:
        """Returns the duration in ns at each quantile (0 to 1, ascending), accurate to 1/32; None if empty."""
        counts = self._counts[:]
        total = sum(counts)
        if not total:
            return [None] * len(wanted)
        durations: list[int | None] = []
        cumulative, bucket = 0, -1
        for quantile in wanted:
            rank = max(1, -int(-quantile * total // 1))
            while cumulative < rank:
                bucket += 1
                cumulative += counts[bucket]
            durations.append(_middle(bucket))
        return durations


def _middle(bucket: int) -> int:
    """Returns the midpoint, in ns, of the range of bucket number `bucket`."""
    if bucket < 2 * _SLICES:
        return bucket
    shift = (bucket >> _SLICE_BITS) - 1
    low = (bucket - (shift << _SLICE_BITS)) << shift
    return low + (1 << shift) // 2


class InterpreterWaits:
    """Measures how long the agent's loop waits for the Python interpreter (the GIL) after each timed wait.

    A timed wait ends late if the kernel has no core for the thread, or if another thread runs Python: it gives the
    interpreter up after `sys.getswitchinterval()`, by default 5 ms. The kernel counts the time without a core; the rest
    is the interpreter. One thread alone calls `note`; any thread reads `wait_ns`.

    Attributes:
        wait_ns: mean of the latest complete window; None if too few of its waits reached their time limit.
    """

    def __init__(self) -> None:
        self.wait_ns: float | None = None
        self._late = LogHistogram()
        self._late_ns = self._waited_ns = 0
        self._noted: list[tuple[int, int]] = []  # waits that are not counted yet: time limit and duration
        self._no_core_ns: int | None = None

    def note(self, asked_ns: int, took_ns: int) -> None:
        """Notes a wait with a time limit of `asked_ns` that took `took_ns`; one that ended early shows nothing."""
        if self._no_core_ns is None:
            self._no_core_ns = gil.no_core_ns()
        self._waited_ns += min(asked_ns, took_ns)  # a stop of the whole process does not end the window
        self._noted.append((asked_ns, took_ns))
        ended = self._waited_ns >= INTERPRETER_WINDOW_NS
        if ended or len(self._noted) >= _MOST_NOTED:
            self._count()
        if ended:
            self._end_window(self._no_core_ns)

    def _count(self) -> None:
        for asked_ns, took_ns in self._noted:
            if took_ns >= asked_ns > 0:
                self._late.add(took_ns - asked_ns)
                self._late_ns += took_ns - asked_ns
        self._noted.clear()

    def _end_window(self, no_core_before_ns: int) -> None:
        self._no_core_ns = gil.no_core_ns()
        if self._late.count < _MIN_WAITS:
            self.wait_ns = None
        else:
            late_ns = max(0, self._late_ns - (self._no_core_ns - no_core_before_ns))
            # A single long stop of the whole process raises the mean, but not the quantile.
            self.wait_ns = min(late_ns / self._late.count, self._late.quantiles(0.9)[0] or 0)
        self._late, self._late_ns, self._waited_ns = LogHistogram(), 0, 0


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
        self._writers = threading.Lock()
        self._version = 0  # odd while a writer changes the spans; a reader that notices it retries
        self._spans: deque[_Span] = deque()
        self._busy_ns = 0  # total length of the spans
        self._bytes = 0.0
        self._rooms: deque[int] = deque()
        self._latest = 0

    def add(self, start: int, end: int, nbytes: int) -> None:
        """Adds a transfer of `nbytes` bytes from monotonic `start` to `end`; any thread may call it, in any order."""
        end = max(end, start + 1)
        with self._writers:
            self._version += 1
            self._merge(start, end, float(nbytes))
            self._prune(end)
            self._version += 1

    def room(self, at: int) -> None:
        """Counts a room that finished at monotonic `at`, which is not before that of the previous call."""
        with self._writers:
            self._version += 1
            self._rooms.append(at)
            self._prune(at)
            self._version += 1

    def window(self, now: int) -> RateWindow:
        """Returns the rate over the window that ends at monotonic `now`."""
        while True:
            version = self._version
            if version % 2 == 0:
                try:
                    window = self._window_at(now)
                except RuntimeError:  # changed during the iteration
                    continue
                if version == self._version:
                    return window
            time.sleep(0)  # let the writer finish

    def _window_at(self, now: int) -> RateWindow:
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


class Latencies:
    """Exact quantiles of the last `keep` room latencies; the reported count includes all earlier latencies."""

    def __init__(self, keep: int = 1024) -> None:
        self._keep = keep
        self._latest: deque[tuple[int, int]] = deque()  # number from 1, latency
        self._ascending: list[int] = []
        self._count = 0

    def add(self, latency_ns: int) -> None:
        """Adds one latency; one thread at a time may call this method."""
        # Kept in order, so that a query does not sort: it copies, while a room costs two binary searches.
        ascending = self._ascending
        if len(self._latest) == self._keep:
            del ascending[bisect_left(ascending, self._latest.popleft()[1])]
        self._count += 1
        self._latest.append((self._count, latency_ns))
        insort(ascending, latency_ns)

    def after(self, number: int) -> tuple[list[int], int]:
        """Returns the latencies in ns that were added after the first `number`, and the number of the last one."""
        if self._count == number:
            return [], number
        later = [each for each in tuple(self._latest) if each[0] > number]
        return [latency for _, latency in later], later[-1][0] if later else number

    def summary(self) -> LatencySummary:
        """Returns the quantiles in ns, by nearest rank (None before the first latency), and the number of latencies."""
        kept = self._ascending.copy()
        return {
            "p50_ns": nearest_rank(kept, 0.50),
            "p90_ns": nearest_rank(kept, 0.90),
            "p99_ns": nearest_rank(kept, 0.99),
            "count": self._count,
        }


class RecentEnds:
    """Numbers of rooms that ended in the last `window_ns`, by state label.

    They are kept for slices of 1/30 of the window, so the window that is reported is up to one slice longer. One
    thread at a time calls `add`; any thread may call `counts`.

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
        total: Counter[str] = Counter()
        for number, counts in self._slices.copy():
            if number >= oldest:
                total.update(counts.copy())
        return dict(total)


def nearest_rank(ascending: list[int], quantile: float) -> int | None:
    """Returns the quantile (0 to 1) of values in ascending order, by nearest rank; None if there are no values."""
    if not ascending:
        return None
    rank = -int(-quantile * len(ascending) // 1)  # ceiling
    return ascending[max(0, rank - 1)]
