"""Measures a rank process: agent counters, stage times, ring samples, CPU time, memory and GPU copy rates."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from statistics import median_low

from kvctl.lab.ranks.messages import Gpu
from kvctl_agent.contract.snapshots import MetricFamily
from kvctl_agent.contract.states import STAGES
from kvctl_agent.device.base import Device
from kvctl_agent.observer.room_records import FoldedRoom
from kvctl_agent.paths.peer_connection import PeerConnection

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
MAX_SAMPLED_ROOMS = 64
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Counters = dict[str, dict[str, float]]
"""Counter values: metric name → label values joined by commas ("" without labels) → value."""


def counters(families: Iterable[MetricFamily]) -> Counters:
    """Returns the values of all counters in a `metrics` snapshot."""
    return {
        family["name"]: {
            ",".join(sample["labels"].values()): float(sample["value"] or 0) for sample in family["samples"]
        }
        for family in families
        if family["kind"] == "counter"
    }


def growth(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> Counters:
    """Returns how much each counter grew between two snapshots; omits counters that did not grow."""
    grown: Counters = {}
    for name, values in after.items():
        for label, value in values.items():
            more = value - before.get(name, {}).get(label, 0.0)
            if more:
                grown.setdefault(name, {})[label] = more
    return grown


def stages(find: Callable[[int], Sequence[FoldedRoom]], rooms: Sequence[int]) -> dict[str, list[int]]:
    """Samples the time that parts spend in each stage, since the end of the stage before.

    Args:
        find: returns the agent's records of a room number; none of a room that the agent has discarded.
        rooms: numbers of successful rooms in order; the last `MAX_SAMPLED_ROOMS` are sampled, because agents keep only
            a few hundred rooms.

    Returns:
        For each stage, the median in nanoseconds of the parts of each sampled room.
    """
    samples: dict[str, list[int]] = {}
    for room in rooms[-MAX_SAMPLED_ROOMS:]:
        took: dict[str, list[int]] = {}
        for record in find(room):
            parts: dict[tuple[object, ...], dict[str, int]] = {}
            for event in record.events:
                if event.layers is not None and event.stage in STAGES:
                    key = event.chunk, event.writer, event.peer, event.layers
                    parts.setdefault(key, {})[event.stage] = event.at_ns
            for (chunk, *_), moments in parts.items():
                last = record.chunks_ready.get(chunk)  # type: ignore[call-overload]
                for stage in (stage for stage in STAGES if stage in moments):
                    if last is not None:
                        took.setdefault(stage, []).append(max(0, moments[stage] - last))
                    last = moments[stage]
        for stage, each in took.items():
            samples.setdefault(stage, []).append(median_low(each))
    return samples


def hidden(find: Callable[[int], Sequence[FoldedRoom]], rooms: Mapping[int, int]) -> list[list[int]]:
    """Returns how much of each room's transfer overlapped with its computation, on a prefill rank.

    Args:
        rooms: room index by room number of the successful rooms, in order; only the last `MAX_SAMPLED_ROOMS` are used.

    Returns:
        One row [room index, ns of transfer before the forward was done, ns after it] per room.
    """
    rows = []
    for number, index in list(rooms.items())[-MAX_SAMPLED_ROOMS:]:
        for record in find(number)[:1]:
            overlap = record.overlap(record.finished_at or 0)
            if overlap is not None:
                rows.append([index, *overlap])
    return rows


def layer_groups(records: Iterable[FoldedRoom], layers: int) -> int:
    """Returns in how many layer groups a room was sent, the largest number of all chunks and peers; 0 if none is known.

    Args:
        layers: number of the model's layers; those of a draft model have higher numbers and are not counted.
    """
    groups: dict[tuple[int, str | None], set[tuple[int, int]]] = {}
    for event in (event for record in records for event in record.events):
        if event.layers is not None and event.stage in STAGES and event.chunk is not None and event.layers[0] < layers:
            groups.setdefault((event.chunk, event.peer), set()).add(event.layers)
    return max(map(len, groups.values()), default=0)


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


def rss_bytes() -> int:
    """Returns the current resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def forget_peak_rss() -> None:
    """Resets the value of `peak_rss_bytes`, so that the buffers of a machine measurement do not count as the rank's."""
    # Kernels without CONFIG_PROC_PAGE_MONITOR lack this file; the peak then includes the measurement.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def gpu(device: Device) -> Gpu:
    """Returns the name, driver and CUDA version of a GPU, for the bench's results."""
    described = device.describe()
    version = None
    with suppress(OSError):
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER_VERSION.read_text())
    return Gpu(
        name=str(described["name"]), driver=version[0] if version else "", cuda=str(described.get("driver_cuda", ""))
    )


_DEVICE_BYTES = 256 << 20  # larger than a GPU's caches
# A decode rank's ring and the scratch memory behind it have at least this size together.
_PEER_BYTES = 64 << 20
_COPIES = 24  # in a row, so that submitting and awaiting them is negligible
_ROUNDS = 4


def device_gb_per_s(device: Device, nbytes: int = _DEVICE_BYTES) -> float:
    """Measures copies within a device; returns the rate in GB/s (1e9 bytes per second, each byte counted once).

    Raises:
        DeviceError: the device has too little free memory.
    """
    with closing(device.allocate(nbytes)) as source, closing(device.allocate(nbytes)) as target:
        return _best(device, target.addr, source.addr, nbytes)


def peer_gb_per_s(device: Device, connection: PeerConnection | None, nbytes: int = _PEER_BYTES) -> float | None:
    """Measures copies into a peer's mapped staging ring; returns the rate in GB/s, None if the ring is not mapped.

    Overwrites the peer's ring: no room may be in flight.

    Raises:
        DeviceError: the device has too little free memory.
        PeerDisconnected: the connection has just been closed.
    """
    if connection is None or connection.mapping is None or not connection.ring_base:
        return None
    with closing(device.allocate(nbytes)) as source:
        connection.mapping.acquire()
        try:
            return _best(device, connection.mapping.translate(connection.ring_base), source.addr, nbytes)
        finally:
            connection.mapping.release()


def _best(device: Device, target: int, source: int, nbytes: int) -> float:
    device.copy(target, source, nbytes)  # the first copy is slow; waiting for the next one waits for it as well
    _wait(device.copy(target, source, nbytes).done)
    durations = []
    for _ in range(_ROUNDS):
        since = time.perf_counter_ns()
        copies = [device.copy(target, source, nbytes) for _ in range(_COPIES)]
        _wait(copies[-1].done)
        durations.append(time.perf_counter_ns() - since)
    return _COPIES * nbytes / max(1, min(durations))


def _wait(done: Callable[[], bool]) -> None:
    while not done():
        pass
