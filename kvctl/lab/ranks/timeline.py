"""Moments of the stream that a rank computes on: events of a GPU for the agent, and times on the monotonic clock."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any


class Timeline(ABC):
    """A stream."""

    @abstractmethod
    def mark(self) -> Any:
        """The moment behind everything that was put on it so far."""

    @abstractmethod
    def event(self, mark: Any) -> Any:
        """What the agent is given for it; None where the moment has come when it is marked."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """Whether the stream has come so far; never waits."""

    @abstractmethod
    def at_ns(self, mark: Any) -> int:
        """When that was, of a passed mark."""

    @abstractmethod
    def anchor(self) -> None:
        """Waits until all is done, and compares the clocks anew: once before a run."""


class HostTimeline(Timeline):
    """Computes at once."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def event(self, mark: Any) -> None:
        return None

    def passed(self, mark: Any) -> bool:
        return True

    def at_ns(self, mark: Any) -> int:
        return int(mark)

    def anchor(self) -> None:
        """There is one clock."""


class CudaTimeline(Timeline):
    """A stream of a GPU, which is the current one of this thread from now on."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self._stream)
        self.anchor()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def event(self, mark: Any) -> Any:
        return mark

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def at_ns(self, mark: Any) -> int:
        # A float of milliseconds: to a microsecond in the first seconds, to 30 µs after minutes.
        return self._anchor_ns + round(float(self._anchor.elapsed_time(mark)) * 1e6)

    def anchor(self) -> None:
        self._stream.synchronize()
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()


def timeline_of(torch: Any, device: str) -> Timeline:
    """Of a device by torch's name for it."""
    return CudaTimeline(torch, device) if device.startswith("cuda") else HostTimeline()
