"""Measures what a lane between two connected agents costs, for the cost model that chooses a path.

A write of n descriptors of s bytes takes `us_per_write + n * (us_per_descriptor + s * us_per_byte)`. On lanes
that copy with one system call per descriptor, the descriptor costs far more than its bytes when it is small; one
big write runs at `write_gb_per_s`. All that is measured on the live lane, since it depends on engine, kernel,
huge pages and where the peer is.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from kvctl_agent.errors import DeadlineExceeded, TransportError
from kvctl_agent.transport.base import Addresses, Region, Sizes, Transport

_BUDGET_S = 0.2
_WAIT_S = 2.0
_BIG_BYTES = 16 << 20
_SMALL_BYTES = 512
_LARGER_BYTES = 4096
_SMALL_COUNT = 512
_LEAST_BYTES = 16 * 2 * _LARGER_BYTES


class LaneCost(NamedTuple):
    """Costs of one lane.

    Attributes:
        write_gb_per_s: rate of one large contiguous write, 10⁹ bytes a second.
        us_per_write: post and completion of a write, before its first byte.
        us_per_descriptor: each descriptor, before its first byte.
        us_per_kib: each KiB of small (0.5 to 4 KiB) descriptors.
    """

    write_gb_per_s: float
    us_per_write: float
    us_per_descriptor: float
    us_per_kib: float

    def write_us(self, descriptors: int, nbytes: int) -> float:
        """Predicted time of a write of `nbytes` bytes in `descriptors` equal descriptors, in µs."""
        each_kib = nbytes / max(descriptors, 1) / 1024
        small_kib = min(each_kib, _LARGER_BYTES / 1024)
        large_us = (each_kib - small_kib) * 1024 / (self.write_gb_per_s * 1e3)
        return self.us_per_write + descriptors * (self.us_per_descriptor + small_kib * self.us_per_kib + large_us)


def measure_lane(transport: Transport, peer: str, local: Region, remote: Region) -> LaneCost:
    """Writes `local` over `remote` for at most 0.3 s (one write of the slowest kind more, on a slow lane).

    Sends no tags, so the peer notices nothing; `remote` is scratch memory.

    Args:
        transport: with `peer` connected.
        peer: its name.
        local: registered here, at least 128 KiB; touched before, or page faults are measured.
        remote: registered there, at least 128 KiB; 16 MiB on both sides give the best figures.

    Raises:
        DeadlineExceeded: a write was not complete after 2 s.
        PeerDisconnected, TransportError: from the transport.
    """
    usable = min(local.nbytes, remote.nbytes)
    if usable < _LEAST_BYTES:
        raise TransportError(f"measuring a lane needs {_LEAST_BYTES} bytes on both sides, not {usable}")

    def best_us(descriptors: int, each_bytes: int, budget_s: float) -> float:
        # Every second place is left out, so that no engine merges neighbours into one copy.
        offsets = np.arange(descriptors, dtype=np.uint64) * np.uint64(2 * each_bytes)
        sizes = np.full(descriptors, each_bytes, np.uint64)
        here, there = offsets + np.uint64(local.addr), offsets + np.uint64(remote.addr)
        best = _write_us(transport, peer, here, there, sizes)
        until = time.perf_counter() + budget_s - best / 1e6
        while time.perf_counter() < until:
            best = min(best, _write_us(transport, peer, here, there, sizes))
        return best

    share_s = _BUDGET_S / 4
    one_us = best_us(1, _LARGER_BYTES, share_s)
    count = min(_SMALL_COUNT, usable // (2 * _LARGER_BYTES))
    small_us = best_us(count, _SMALL_BYTES, share_s)
    larger_us = best_us(count, _LARGER_BYTES, share_s)
    big_bytes = min(_BIG_BYTES, usable)
    big_us = best_us(1, big_bytes, share_s)

    us_per_kib = max(0.0, (larger_us - small_us) / count / ((_LARGER_BYTES - _SMALL_BYTES) / 1024))
    # `one_us` holds one descriptor of the larger size, which `larger_us` holds `count` times.
    each_us = max(0.0, (larger_us - one_us) / (count - 1))
    us_per_write = max(0.0, one_us - each_us)
    us_per_descriptor = max(0.0, (small_us - us_per_write) / count - _SMALL_BYTES / 1024 * us_per_kib)
    write_gb_per_s = big_bytes / max(big_us - us_per_write, 0.001) / 1e3
    return LaneCost(write_gb_per_s, us_per_write, us_per_descriptor, us_per_kib)


def _write_us(transport: Transport, peer: str, here: Addresses, there: Addresses, sizes: Sizes) -> float:
    started = time.perf_counter()
    write = transport.write(peer, here, there, sizes, None)
    while not write.poll():
        if time.perf_counter() - started > _WAIT_S:
            write.release()
            raise DeadlineExceeded(f"measuring the lane to {peer!r}: a write was not complete after {_WAIT_S} s")
        time.sleep(0)
    return (time.perf_counter() - started) * 1e6
