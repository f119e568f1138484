"""Pretends to compute: when one pipeline stage of a prefill instance would be done with which layers of which chunk.

A rank computes one chunk at a time, layer by layer. A later stage takes a chunk up when the stage before it is done
with it and it is done itself with the chunk before. Each rank reckons all stages up to its own from what it sees, so
that no two ranks have to talk about it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence


class Compute:
    """The simulated engine of one prefill rank.

    Attributes:
        layer_ns: time that one layer takes for one chunk; 0: no time at all.
    """

    def __init__(self, stage_layers: Sequence[int], stage: int, layer_ns: int) -> None:
        """`stage_layers` of every stage of the instance; this rank is of number `stage`."""
        self._layers = stage_layers[: stage + 1]
        self._free_ns = [0] * (stage + 1)
        self.layer_ns = layer_ns

    def forward(self, asked_ns: int, chunks: int) -> list[int]:
        """When this stage begins with each chunk of a prompt that was asked for at `asked_ns`; takes them up."""
        begins = []
        for _ in range(chunks):
            at = asked_ns
            for stage, layers in enumerate(self._layers):
                at = begin = max(at, self._free_ns[stage])
                at += layers * self.layer_ns
                self._free_ns[stage] = at
            begins.append(begin)
        return begins

    def after(self, begin_ns: int, layers: int) -> int:
        """When so many layers of a chunk that was begun at `begin_ns` are computed."""
        return begin_ns + layers * self.layer_ns


def sleep_until(at_ns: int) -> None:
    """Wait for a moment of the monotonic clock, as a processor that hands its work to a GPU does."""
    left_ns = at_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
