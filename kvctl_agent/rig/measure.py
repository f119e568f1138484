"""What a run cost this process: growth of the agent's counters, processor time, resident memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvctl_agent.contract.snapshots import LayerRow, MetricFamily

MAX_SAMPLED_ROOMS = 64

Counters = dict[str, dict[str, float]]
"""Metric name → values of its labels joined by commas ("" without labels) → value."""


def counters(families: Iterable[MetricFamily]) -> Counters:
    """All counters of a `metrics` snapshot."""
    return {
        family["name"]: {
            ",".join(sample["labels"].values()): float(sample["value"] or 0) for sample in family["samples"]
        }
        for family in families
        if family["kind"] == "counter"
    }


def growth(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> Counters:
    """What grew between two snapshots; what did not is left out."""
    grown: Counters = {}
    for name, values in after.items():
        for label, value in values.items():
            more = value - before.get(name, {}).get(label, 0.0)
            if more:
                grown.setdefault(name, {})[label] = more
    return grown


def stages(layers: Callable[[int], Sequence[LayerRow]], rooms: Sequence[int]) -> dict[str, list[int]]:
    """Median time of each room's parts in each stage, over the last `MAX_SAMPLED_ROOMS` of the rooms.

    Args:
        layers: the agent's `layers` command for one room.
        rooms: numbers of rooms that succeeded, in order; agents keep a few hundred.
    """
    samples: dict[str, list[int]] = {}
    for room in rooms[-MAX_SAMPLED_ROOMS:]:
        for row in layers(room):
            for stage, summary in row["stages"].items():
                if summary["p50_ns"] is not None:
                    samples.setdefault(stage, []).append(summary["p50_ns"])
    return samples


def cpu_ns() -> int:
    """Processor time of all threads of this process so far."""
    return time.process_time_ns()


def peak_rss_bytes() -> int:
    """Most resident memory this process ever had (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


def forget_peak_rss() -> None:
    """Start `peak_rss_bytes` anew: what a measurement of the machine took is no cost of the rank."""
    # Kernels without CONFIG_PROC_PAGE_MONITOR have no such file; the peak then includes the measurement.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
