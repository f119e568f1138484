"""Durations of the stages of parts, by layer group and path: the data behind `kvctl layers`.

The duration of a stage is the time since the end of the previous stage that this rank observed: a part that was never
gated has no gate time, and a writer does not observe arrival. The duration of `ready` is the time since the first
layer group of the same chunk was ready.
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
"""Limit of (layer group, path) pairs, far above the number that any grouping produces."""


class _Group:
    """Aggregate of one layer group on one path."""

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

    `exposed_ns` and `overlapped_ns` of a row are means per part: the time between the first and the last event of the
    part that lies after, or before, the end of the forward. Over concurrent parts they must not be added up.

    Attributes:
        dropped: parts not counted because there were `MAX_GROUPS` groups already.
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
            moments: monotonic end of each stage by name; stages not observed are absent.
            forward_done_ns: end of the forward, if known.
            first_ready_ns: time at which the first layer group of the chunk was ready, if known.
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
    """Returns the stage times of one room, computed from the timelines of its records, with the times of each part.

    `moments` are wall clock; None for a stage that the part has not reached or does not have. The path of a part is ""
    until an event contains it.
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
    """Returns the end of a prefill rank's forward, or the current time while it runs; None on a decode rank."""
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
