"""NVTX ranges, which NVIDIA's Nsight Systems shows beside kernels and copies: rooms, parts and scatters of an agent."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvctl_agent.errors import ConfigError


class NvtxRanges:
    """Marks spans of time that may begin and end on different threads. While no profiler listens, one costs 1.5 µs.

    Raises:
        ConfigError: neither torch nor the package `nvtx` can mark ranges.
    """

    def __init__(self) -> None:
        self._start, self._end = _functions()
        self._open: dict[int, Any] = {}

    def begin(self, owner: object, text: str) -> None:
        """Begins a range that Nsight Systems shows with this text; `owner` must exist until `end`."""
        self._open[id(owner)] = self._start(text)

    def end(self, owner: object) -> None:
        """Ends the range of an owner; does nothing if it has none."""
        if id(owner) in self._open:
            self._end(self._open.pop(id(owner)))


def _functions() -> tuple[Callable[[str], Any], Callable[[Any], Any]]:
    """Returns the functions that start and end a range, of torch or of the package `nvtx`."""
    for module, start, end in (("torch.cuda.nvtx", "range_start", "range_end"), ("nvtx", "start_range", "end_range")):
        try:
            found = importlib.import_module(module)
            functions = getattr(found, start), getattr(found, end)
            functions[1](functions[0]("kvctl"))
        except Exception:  # torch without CUDA raises errors of several types
            continue
        return functions
    raise ConfigError("nvtx = true needs torch with CUDA, or the package nvtx: pip install nvtx")
