"""Computes prompts for real, beside the pool: whatever a transfer takes from a GPU's compute, or waits for, shows.

All that a run does is to put work on a stream; the agent waits for its events. The tensor-parallel ranks of an instance
that share a GPU compete for it; stages of a pipeline do not wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from kvctl.lab.ranks.compute import Computed
from kvctl.lab.ranks.layer import LayerWork
from kvctl.lab.ranks.timeline import timeline_of
from kvctl.lab.ranks.torch_layer import TorchLayer, import_torch
from kvctl_agent.errors import DeadlineExceeded

# Forwards on the stream at once: the next one is there when the first ends, as engines do it.
_AHEAD = 2
# Lengths of prompts that are measured; what lies between is between.
_LENGTHS = 8
_ALONE_ROUNDS = 5
# At least: ranks that share a GPU measure at about the same time, so that what they do to each other is in it.
_ALONE_S = 0.5


class GpuEngine:
    """The engine of one prefill rank."""

    def __init__(self, work: LayerWork, device: str, layers: int, chunk_tokens: int, share: int = 1) -> None:
        """
        Args:
            work: of one layer.
            device: as torch names it.
            layers: of this rank.
            chunk_tokens: most tokens of a chunk.
            share: ranks among which every chunk's tokens are divided.
        """
        self._work = work
        self._device = device
        self._layers = layers
        self._chunk_tokens = chunk_tokens
        self._share = share
        self.timeline = timeline_of(import_torch(), device)
        self._layer = TorchLayer(work, device, self._part(chunk_tokens), chunk_tokens)
        self._under_way: deque[Any] = deque()
        self._alone: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        while self._under_way and self.timeline.passed(self._under_way[0]):
            self._under_way.popleft()
        return len(self._under_way) < _AHEAD

    def prepare(self, prompts: Iterable[int]) -> None:
        """Before a run, while nothing is sent: makes room for these prompts, and measures what they take alone."""
        lengths = sorted(set(prompts))
        if lengths and lengths[-1] > self._layer.prompt:
            self._layer = TorchLayer(self._work, self._device, self._part(self._chunk_tokens), lengths[-1])
        step = max(1, -(-len(lengths) // _LENGTHS))
        for tokens in {*lengths[::step], *lengths[-1:]} - self._alone.keys():
            self._forward(tokens)  # the first one loads kernels
            until = time.monotonic() + _ALONE_S
            took: list[int] = []
            while len(took) < _ALONE_ROUNDS or time.monotonic() < until:
                took.append(self._timed(tokens))
            self._alone[tokens] = round(median(took))
        self._under_way.clear()
        self.timeline.anchor()

    def alone_ns(self, tokens: int) -> int:
        """What a forward of so many tokens takes while nothing is sent: measured, or between two that were."""
        known = sorted(self._alone)
        below = max((each for each in known if each <= tokens), default=known[0])
        above = min((each for each in known if each >= tokens), default=known[-1])
        if above == below:
            return self._alone[below]
        part = (tokens - below) / (above - below)
        return round(self._alone[below] + part * (self._alone[above] - self._alone[below]))

    def begin(self, asked_ns: int, chunks: int, deadline_ns: int) -> GpuJob:
        return GpuJob(self, chunks * self._layers, deadline_ns)

    def put(self, tokens: int, before: int, layers: int) -> Any:
        """Puts layers of a chunk behind `before` tokens of its prompt on the stream; the mark behind them."""
        for _ in range(layers):
            self._layer.compute(self._part(tokens), before)
        return self.timeline.mark()

    def submitted(self, mark: Any) -> None:
        """A whole forward is on the stream, up to this mark."""
        self._under_way.append(mark)

    def _part(self, tokens: int) -> int:
        return -(-tokens // self._share)

    def _forward(self, tokens: int) -> tuple[Any, Any]:
        begin = end = self.timeline.mark()
        for before in range(0, tokens, self._chunk_tokens):
            end = self.put(min(self._chunk_tokens, tokens - before), before, self._layers)
        return begin, end

    def _timed(self, tokens: int) -> int:
        begin, end = self._forward(tokens)
        self.timeline.anchor()
        return self.timeline.at_ns(end) - self.timeline.at_ns(begin)


class GpuJob:
    """One room's forward."""

    def __init__(self, engine: GpuEngine, steps: int, deadline_ns: int) -> None:
        """`steps`: layers of all chunks together."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceeded("its forward was not begun at the run's deadline")
        self._engine = engine
        self._left = steps
        self._before = 0
        self._begun = self._end = engine.timeline.mark()
        self._chunk = 0
        self._tokens = 0

    def compute(self, chunk: int, tokens: int, first: int, end: int) -> Any:
        if chunk != self._chunk:
            self._before += self._tokens
        self._chunk, self._tokens = chunk, tokens
        self._end = self._engine.put(tokens, self._before, end - first)
        self._left -= end - first
        if not self._left:
            self._engine.submitted(self._end)
        return self._engine.timeline.event(self._end)

    def computed(self) -> Computed:
        timeline = self._engine.timeline
        started_ns, done_ns = timeline.at_ns(self._begun), timeline.at_ns(self._end)
        return Computed(started_ns, done_ns, done_ns - started_ns)
