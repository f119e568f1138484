"""What a run cost this process: growth of the agent's counters, processor time, resident memory."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvctl.lab.ranks.messages import Gpu, ShownPart
from kvctl_agent.contract.snapshots import LayerRow, MetricFamily
from kvctl_agent.contract.states import STAGES
from kvctl_agent.device.base import Device
from kvctl_agent.errors import RequestRefused
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.telemetry.room_records import RoomRecord

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
MAX_SAMPLED_ROOMS = 64
MAX_SHOWN_PARTS = 512

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
        try:
            rows = layers(room)
        except RequestRefused:
            continue  # forgotten since it was looked up: others of the run are still coming to their end
        for row in rows:
            for stage, summary in row["stages"].items():
                if summary["p50_ns"] is not None:
                    samples.setdefault(stage, []).append(summary["p50_ns"])
    return samples


def hidden(find: Callable[[int], Sequence[RoomRecord]], rooms: Mapping[int, int]) -> list[list[int]]:
    """[index, hidden ns, exposed ns] of the transfers of a prefill rank, over the last rooms as in `stages`.

    Args:
        find: the agent's records of a room.
        rooms: index by number of rooms that succeeded, in order.
    """
    rows = []
    for number, index in list(rooms.items())[-MAX_SAMPLED_ROOMS:]:
        for record in find(number)[:1]:
            overlap = record.overlap(record.finished_at or 0)
            if overlap is not None:
                rows.append([index, *overlap])
    return rows


def shown_parts(records: Iterable[RoomRecord]) -> list[ShownPart]:
    """The parts of a room with their moments, in the order in which they were ready or heard of."""
    parts: dict[tuple[int | None, int | None, str | None, tuple[int, int]], ShownPart] = {}
    for event in (event for record in records for event in record.events):
        if event.layers is None or event.stage not in STAGES:
            continue
        key = (event.writer, event.chunk, event.peer, event.layers)
        part = parts.setdefault(
            key,
            ShownPart(
                writer=event.writer,
                peer=event.peer or "",
                chunk=event.chunk,
                layers=list(event.layers),
                path="",
                bytes=0,
                moments={},
            ),
        )
        part["moments"][event.stage] = event.at_ns
        part["path"] = event.path or part["path"]
        part["bytes"] = event.nbytes or part["bytes"]
    return list(parts.values())[:MAX_SHOWN_PARTS]


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


def gpu(device: Device) -> Gpu:
    """What a result says of the GPU it was measured on."""
    said = device.describe()
    version = None
    with contextlib.suppress(OSError):
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER_VERSION.read_text())
    return Gpu(name=str(said["name"]), driver=version[0] if version else "", cuda=str(said.get("driver_cuda", "")))


_LEAST_NS = 5_000_000  # between two looks when something happens anyway
_IDLE_NS = 20_000_000  # between two looks when nothing does
_MOST = 1024


class Samples:
    """`taken` holds [monotonic ns, figure], at most `_MOST` of them."""

    def __init__(self, read: Callable[[], int] | None) -> None:
        """None: there is nothing to look at."""
        self._read = read
        self._every = 1
        self._last_ns: int | None = None
        self.taken: list[list[int]] = []

    @property
    def next_ns(self) -> int | None:
        """When to look if nothing happens before."""
        return None if self._read is None or self._last_ns is None else self._last_ns + self._every * _IDLE_NS

    def look(self, now_ns: int) -> None:
        """Take a sample, unless the last one was just before."""
        if self._read is None or (self._last_ns is not None and now_ns < self._last_ns + self._every * _LEAST_NS):
            return
        self._last_ns = now_ns
        self.taken.append([now_ns, self._read()])
        if len(self.taken) >= _MOST:
            del self.taken[1::2]
            self._every *= 2


_DEVICE_BYTES = 256 << 20  # larger than its caches
# A decode rank's ring and the scratch memory behind it have at least so much together.
_PEER_BYTES = 64 << 20
_COPIES = 24  # at once, so that neither beginning nor awaiting them counts
_ROUNDS = 4


def device_gb_per_s(device: Device, nbytes: int = _DEVICE_BYTES) -> float:
    """Copies within the device: GB/s (1e9 bytes copied per second; each is read and written).

    Raises:
        DeviceError: there is no memory for it.
    """
    source = device.allocate(nbytes)
    try:
        target = device.allocate(nbytes)
        try:
            return _best(device, target.addr, source.addr, nbytes)
        finally:
            target.close()
    finally:
        source.close()


def peer_gb_per_s(device: Device, lane: PeerConnection | None, nbytes: int = _PEER_BYTES) -> float | None:
    """Copies into the ring of a peer whose memory is mapped here: GB/s; None where it is not.

    Overwrites the peer's ring: no room may be in flight.

    Raises:
        DeviceError: there is no memory for it.
        PeerDisconnected: the lane has just gone.
    """
    if lane is None or lane.mapping is None or not lane.ring_base:
        return None
    source = device.allocate(nbytes)
    try:
        lane.mapping.acquire()
        try:
            return _best(device, lane.mapping.translate(lane.ring_base), source.addr, nbytes)
        finally:
            lane.mapping.release()
    finally:
        source.close()


def _best(device: Device, target: int, source: int, nbytes: int) -> float:
    device.copy(target, source, nbytes)  # the first one is slow, and awaited with those behind it
    _wait(device.copy(target, source, nbytes).done)
    took = []
    for _ in range(_ROUNDS):
        since = time.perf_counter_ns()
        copies = [device.copy(target, source, nbytes) for _ in range(_COPIES)]
        _wait(copies[-1].done)
        took.append(time.perf_counter_ns() - since)
    return _COPIES * nbytes / max(1, min(took))


def _wait(done: Callable[[], bool]) -> None:
    while not done():
        pass
