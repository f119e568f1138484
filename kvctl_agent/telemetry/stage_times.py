"""Where the time of a part goes, per layer group and path: the data behind `kvctl layers`.

A stage's duration is the distance from the end of the stage before it *that this rank saw*: a part that was never
gated has no gate time, and a writer knows nothing of arrival. `ready` counts from where the chunk's first layer group
was ready: how much later the compute of this one ended.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvctl_agent.contract.snapshots import LayerRow, LayerStage
from kvctl_agent.contract.states import STAGES
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.log_histogram import LogHistogram
from kvctl_agent.telemetry.room_records import RoomRecord

MAX_GROUPS = 1024
"""Most (layer group, path) pairs kept: far above what any grouping gives, so only a runaway meets it."""


class _Group:
    """Aggregate of one layer group on one path."""

    __slots__ = ("bytes", "compared", "exposed_ns", "histograms", "overlapped_ns", "parts")

    def __init__(self) -> None:
        self.parts = 0
        self.bytes = 0
        self.histograms: dict[str, LogHistogram] = {}
        self.compared = 0  # parts whose forward-done moment was known
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
                histogram = self.histograms.get(stage)
                if histogram is None:
                    histogram = self.histograms[stage] = LogHistogram()
                histogram.add(at - last)
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
    """Stage times of all parts so far, by (layer group, path).

    `exposed_ns` and `overlapped_ns` of a row are means per part: how much of the time from the part's first moment
    to its last lay after, or before, the end of the forward. They do not add up over parts that ran at once.

    Attributes:
        dropped: parts not counted because `MAX_GROUPS` different groups were known.
    """

    def __init__(self, agent_name: str) -> None:
        self._agent = agent_name
        self._writers = threading.Lock()  # transfer workers add; a reader takes no lock
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
        """Counts one part.

        Args:
            layers: [lo, hi).
            path: bulk, slice, staged, direct; on a decode rank staged, or in-place for all others.
            nbytes: KV bytes of the part.
            moments: stage name to the monotonic ns at which it *ended*; stages not seen are absent.
            forward_done_ns: when the compute that the part ran beside was done, where that is known.
            first_ready_ns: when the first layer group of its chunk was ready, where that is known.
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
        """One row per (layer group, path), by first layer."""
        groups = self._groups.copy()
        return [groups[key].row(self._agent, *key) for key in sorted(groups)]


def room_rows(records: list[RoomRecord], clock: Clock, agent_name: str) -> list[LayerRow]:
    """Stage times of one room, read from the timelines of its records, with the moments of each part.

    A part that is still under way shows the moments it has; its path is "" until an event named it. Moments are
    wall clock, None for a stage the part has not reached or does not have.
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
    """When a prefill rank's forward was done, now while it still runs; None on decode ranks, which do not know."""
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
