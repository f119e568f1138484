"""Moments of a stream, with a stand-in for torch whose GPU has a clock of its own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from kvctl.lab.ranks.gpu_engine import CudaTimeline, Timeline, timeline_of


class Cuda:
    """Its clock is 5 s behind ours, and it is done with everything at once."""

    def __init__(self) -> None:
        self.now_ns = lambda: time.monotonic_ns() - 5_000_000_000
        self.device = ""
        self.current: Any = None

    def set_device(self, device: str) -> None:
        self.device = device

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def Stream(self, device: str) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_ns=0, query=lambda: True, synchronize=lambda: None)
        event.record = lambda stream: setattr(event, "at_ns", self.now_ns())
        event.elapsed_time = lambda other: (other.at_ns - event.at_ns) / 1e6
        return event


def test_a_gpu_s_moments_are_on_our_clock():
    cuda = Cuda()
    timeline = timeline_of(SimpleNamespace(cuda=cuda), "cuda:1")
    assert isinstance(timeline, CudaTimeline)
    assert (cuda.device, cuda.current is not None) == ("cuda:1", True)
    for _ in range(2):
        before = time.monotonic_ns()
        mark = timeline.mark()
        after = time.monotonic_ns()
        assert timeline.event(mark) is mark
        assert timeline.passed(mark)
        assert before - 5_000_000 <= timeline.at_ns(mark) <= after + 5_000_000
        timeline.anchor()


def test_a_processor_s_moments_come_at_once():
    timeline = timeline_of(None, "cpu")
    assert isinstance(timeline, Timeline)
    before = time.monotonic_ns()
    mark = timeline.mark()
    timeline.anchor()
    assert timeline.event(mark) is None
    assert timeline.passed(mark)
    assert before <= timeline.at_ns(mark) <= time.monotonic_ns()
