"""Measures the cost of writes on the connection of two agents, for the cost model that chooses a path.

A write has a cost for its post and completion, and one for each descriptor, which depends on its size. On connections
that copy with one system call per descriptor, a small descriptor costs far more than its bytes, and the curve bends
between 4 and 64 KiB. Therefore a few sizes are measured on the live connection, and sizes between are interpolated. An
earlier model had two constants, and noise in one of them made thousands of descriptors look free.
"""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.connection_cost import ConnectionCost
from kvctl_agent.errors import DeadlineExceeded, TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import Addresses, Sizes, Transport

_BUDGET_S = 0.15
LEAST_ROUNDS = 5
_WAIT_S = 2.0
BIG_BYTES = 16 << 20
DEVICE_BIG_BYTES = 256 << 20
"""Size of the large write between GPUs; with 16 MiB NVLink reaches half its rate."""
_PAYS_US = 4000.0
_SIZES = (512, 4096, 32768, 262144)
_COUNTS = (256, 256, 64, 8)
_LEAST_BYTES = 2 * 262144


def measure_connection(
    transport: Transport,
    peer: str,
    local: Region,
    remote: Region,
    big_bytes: int | None = None,
    least_rounds: int = LEAST_ROUNDS,
) -> ConnectionCost:
    """Writes `local` over `remote` for about 0.15 s, or as long as `least_rounds` writes of each kind take.

    All kinds are measured in turn, round after round, and each one's best counts: whatever else the machine is doing
    hits them alike. Descriptors lie anywhere in the two regions, new in each round, because pages do too: a
    descriptor whose memory no cache holds costs two to three times as much as one in a hot corner. Sends no tags, so
    the peer notices nothing; `remote` is scratch memory.

    Args:
        transport: with `peer` connected.
        peer: its name.
        local: registered here, at least 512 KiB; touched before, or page faults are measured. Only read.
        remote: registered there, at least 512 KiB; both larger than the caches give figures that hold for pools.
        big_bytes: size of the large write; less where the regions are smaller. None: `BIG_BYTES`, or
            `DEVICE_BIG_BYTES` from a GPU if the lane is fast.

    Raises:
        DeadlineExceeded: a write was not complete after 2 s.
        PeerDisconnected, TransportError: from the transport.
    """
    usable = min(local.nbytes, remote.nbytes)
    if usable < _LEAST_BYTES:
        raise TransportError(f"measuring a connection needs {_LEAST_BYTES} bytes on both sides, not {usable}")
    random = np.random.default_rng(0)
    # The first write of a connection waits until both ends are wired up, which says nothing about the next.
    _once_us(transport, peer, local, remote, 64)
    if big_bytes is None:
        big_bytes = BIG_BYTES
        if local.device != HOST and _once_us(transport, peer, local, remote, min(big_bytes, usable)) < _PAYS_US:
            big_bytes = DEVICE_BIG_BYTES
    big_bytes = min(big_bytes, usable)
    kinds = [(1, 64), (1, big_bytes)]
    kinds += [(min(count, usable // (2 * size)), size) for count, size in zip(_COUNTS, _SIZES, strict=True)]
    best = [float("inf")] * len(kinds)
    until = time.perf_counter() + _BUDGET_S
    rounds = 0
    while time.perf_counter() < until or rounds < least_rounds:
        rounds += 1
        for kind, (count, size) in enumerate(kinds):
            here, there = _scattered(random, local, count, size), _scattered(random, remote, count, size)
            best[kind] = min(best[kind], _write_us(transport, peer, here, there, np.full(count, size, np.uint64)))
    one_us, big_us, *many_us = best
    points: list[tuple[int, float]] = []
    for (count, size), us in zip(kinds[2:], many_us, strict=True):
        each = max(us - one_us, us / 2) / count  # the half: where a write of one was never measured in peace
        points.append((size, max(each, points[-1][1] if points else 0.0)))  # more bytes never cost less
    rate = big_bytes / max(big_us - one_us, 0.001) / 1e3
    counts = tuple(count for count, _ in kinds[2:])
    return ConnectionCost(rate, one_us, tuple(points), counts, big_bytes, (*many_us, big_us))


def _scattered(random: np.random.Generator, region: Region, count: int, size: int) -> Addresses:
    """`count` addresses in `region`, no two of them neighbours: an engine would merge those into one copy."""
    places = region.nbytes // (2 * size) or 1
    slots = random.choice(places, count, replace=False, shuffle=False) if count > 1 else random.integers(places, size=1)
    return slots.astype(np.uint64) * np.uint64(2 * size) + np.uint64(region.addr)


def _once_us(transport: Transport, peer: str, local: Region, remote: Region, nbytes: int) -> float:
    here, there = np.array([local.addr], np.uint64), np.array([remote.addr], np.uint64)
    return _write_us(transport, peer, here, there, np.full(1, nbytes, np.uint64))


def _write_us(transport: Transport, peer: str, here: Addresses, there: Addresses, sizes: Sizes) -> float:
    started = time.perf_counter()
    write = transport.write(peer, here, there, sizes, None)
    while not write.poll():
        if time.perf_counter() - started > _WAIT_S:
            write.release()
            raise DeadlineExceeded(f"measuring the connection to {peer!r}: a write was not complete after {_WAIT_S} s")
        time.sleep(0)
    return (time.perf_counter() - started) * 1e6
