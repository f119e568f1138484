"""Stage times of parts, by layer group and path: the data behind `layers`.

A stage of a part lasts from the end of the previous stage that this rank observed: a part that was never gated has no
gate time, and a writer does not observe arrival. The duration of `ready` is the time since the first
layer group of the same chunk was ready.
"""

from __future__ import annotations

from kvctl_agent.contract.snapshots import LayerRow
from kvctl_agent.contract.states import STAGES
from kvctl_agent.observer.room_records import Part
from kvctl_agent.telemetry.durations import LogHistogram

MAX_GROUPS = 1024
"""Limit of (layer group, path) pairs in `StageTimes`, far above the number that any grouping produces."""

_NO_TIMES = LogHistogram()


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

    def add(self, part: Part, first_ready_ns: int | None) -> None:
        forward_done_ns = part.forward_done_ns
        self.parts += 1
        self.bytes += part.nbytes
        first: int | None = None
        last = first_ready_ns
        for stage in STAGES:
            at = part.moments.get(stage)
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
        histograms = self.histograms
        return {
            "agent": agent,
            "layers": list(layers),
            "path": path,
            "parts": self.parts,
            "bytes": self.bytes,
            "stages": {stage: histograms.get(stage, _NO_TIMES).summary() for stage in STAGES},
            "exposed_ns": self.exposed_ns // self.compared if self.compared else None,
            "overlapped_ns": self.overlapped_ns // self.compared if self.compared else None,
        }


class StageTimes:
    """Stage times of all parts so far, by (layer group, path): the data behind `kvctl layers`.

    `exposed_ns` and `overlapped_ns` of a row are means per part: the time between the first and the last event of the
    part that lies after, or before, the end of the forward. Over concurrent parts they must not be added up.
    Parts beyond `MAX_GROUPS` groups are not counted.
    """

    def __init__(self, agent_name: str) -> None:
        self._agent = agent_name
        self._groups: dict[tuple[tuple[int, int], str], _Group] = {}

    def add(self, part: Part, first_ready_ns: int | None = None) -> None:
        """Adds the stage times of one part.

        Args:
            first_ready_ns: monotonic time at which the first layer group of the chunk was ready, if known.
        """
        key = part.key[2], part.path
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                return
            group = self._groups[key] = _Group()
        group.add(part, first_ready_ns)

    def rows(self) -> list[LayerRow]:
        """Returns one row per (layer group, path), ordered by first layer."""
        groups = self._groups
        return [groups[key].row(self._agent, *key) for key in sorted(groups)]
