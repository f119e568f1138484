"""How fast a GPU copies by its driver's own means: what kernels and lanes on it are held against."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvctl_agent.device.base import Device
from kvctl_agent.paths.base import PeerConnection

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
        lane.mapping.take()
        try:
            return _best(device, lane.mapping.translate(lane.ring_base), source.addr, nbytes)
        finally:
            lane.mapping.give()
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
