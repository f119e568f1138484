"""Measures the cost of writes on a connection, for the cost model that chooses a path, and infers the interconnect.

A write has a fixed cost for post and completion, and a cost for each descriptor, which depends on the descriptor's
size. On connections that copy with one system call per descriptor, a small descriptor costs far more than its bytes,
and the curve bends between 4 and 64 KiB. Therefore a few sizes are measured on the live connection, and sizes between
are interpolated. An earlier model had two constants, and noise in one of them made thousands of descriptors look free.
"""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import DeadlineExceeded, TransportError
from kvctl_agent.gil import no_core_ns
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
_COUNTS = (256, 256, 512, 8)
_LEAST_BYTES = 2 * 262144
# Parts wait during a measurement: on a connection of 1 Gbit/s, five rounds of 35 MiB would stop them for 1.5 s.
_LONGEST_S = 0.5
# If the thread that posts a write copies the bytes: the least share of the duration, and a rate that no core reaches in
# memory larger than its caches: the CPU time of a write on a virtual machine was seen to be less than its copy takes.
_COPIED_SHARE = 0.8
_COPIED_AT_MOST_B_PER_S = 40e9


class ConnectionCost(NamedTuple):
    """Measured costs of writes over one peer connection.

    Attributes:
        write_gb_per_s: rate of one large contiguous write, 10⁹ bytes per second.
        us_per_write: fixed cost of posting and completing a write, µs.
        us_by_bytes: pairs of a descriptor size and its cost in µs, by ascending size.
        counts: number of descriptors in the measured write of each size in `us_by_bytes`.
        us_taken: duration in µs of each measured write: one per size in `us_by_bytes`, then the large write.
        moved_bytes: bytes of all writes of the measurement together.
    """

    write_gb_per_s: float
    us_per_write: float
    us_by_bytes: tuple[tuple[int, float], ...]
    counts: tuple[int, ...] = ()
    big_bytes: int = 0
    us_taken: tuple[float, ...] = ()
    moved_bytes: int = 0

    def descriptor_us(self, nbytes: float) -> float:
        """Predicts the cost in µs of one descriptor of `nbytes` bytes.

        Interpolates between the measured sizes. The cost is constant below the smallest size, and follows
        `write_gb_per_s` above the largest.
        """
        points = self.us_by_bytes
        if nbytes <= points[0][0]:
            return points[0][1]
        for (below, low_us), (above, high_us) in pairwise(points):
            if nbytes <= above:
                return low_us + (high_us - low_us) * (nbytes - below) / (above - below)
        largest, us = points[-1]
        return us + (nbytes - largest) / (self.write_gb_per_s * 1e3)

    def write_us(self, descriptors: int, nbytes: float) -> float:
        """Predicts the duration in µs of a write of `nbytes` bytes in `descriptors` descriptors of equal size."""
        return self.us_per_write + descriptors * self.descriptor_us(nbytes / max(descriptors, 1))


def measure_connection(
    transport: Transport,
    peer: str,
    local: Region,
    remote: Region,
    big_bytes: int | None = None,
    least_rounds: int = LEAST_ROUNDS,
) -> ConnectionCost:
    """Measures the cost of writes to a peer by writing `local` over `remote` for about 0.15 s.

    The measurement takes longer if `least_rounds` rounds do, but on slow connections writes are smaller and rounds
    fewer, so that it takes about half a second, or as long as a few writes of 512 KiB. Each round measures every kind
    of write (descriptor count and size) once, and the fastest round of each kind counts, so that other load on the
    machine affects all kinds alike. Descriptors have random places in the two regions, new in each round, as pages do:
    a descriptor whose memory is in no cache costs two to three times as much as one that is. No tags are sent, so the
    peer detects nothing.

    Args:
        transport: A transport with `peer` connected.
        local: Registered local memory, at least 512 KiB, faulted in before; only read.
        remote: Registered scratch memory of the peer, at least 512 KiB. Both regions should be larger than the caches,
            or the costs do not apply to pools.
        big_bytes: Size of the large write, at most that of the regions; `BIG_BYTES` if None, or `DEVICE_BIG_BYTES` from
            a GPU over a fast connection.

    Raises:
        DeadlineExceeded: a write was not complete after 2 s.
        PeerDisconnected, TransportError: the transport failed.
    """
    usable = min(local.nbytes, remote.nbytes)
    if usable < _LEAST_BYTES:
        raise TransportError(f"measuring a connection needs {_LEAST_BYTES} bytes on both sides, not {usable}")
    random = np.random.default_rng(0)
    # Not measured: the first write waits until the connection is established.
    write_once_us(transport, peer, local, remote, 64)
    moved = 64 + _LEAST_BYTES
    if big_bytes is None:
        big_bytes = BIG_BYTES
        moved += min(big_bytes, usable) if local.device != HOST else 0
        if local.device != HOST and write_once_us(transport, peer, local, remote, min(big_bytes, usable)) < _PAYS_US:
            big_bytes = DEVICE_BIG_BYTES
    big_bytes = min(big_bytes, usable)
    counts = [min(count, usable // (2 * size)) for count, size in zip(_COUNTS, _SIZES, strict=True)]
    round_bytes = big_bytes + sum(count * size for count, size in zip(counts, _SIZES, strict=True))
    started = time.perf_counter()
    least_us = write_once_us(transport, peer, local, remote, _LEAST_BYTES)
    share = _LONGEST_S * 1e6 / (least_rounds * round_bytes / _LEAST_BYTES * least_us)
    slow = share < 1 / 2
    if slow:
        big_bytes = max(_LEAST_BYTES, int(big_bytes * share))
        counts = [max(1, int(count * share)) for count in counts]
    kinds = [(1, 64), (1, big_bytes), *zip(counts, _SIZES, strict=True)]
    best = [float("inf")] * len(kinds)
    rounds = 0
    while (spent_s := time.perf_counter() - started) < _BUDGET_S or rounds < least_rounds:
        if slow and rounds and spent_s > _LONGEST_S:
            break
        rounds += 1
        for kind, (count, size) in enumerate(kinds):
            here, there = _scattered(random, local, count, size), _scattered(random, remote, count, size)
            best[kind] = min(best[kind], _write_us(transport, peer, here, there, np.full(count, size, np.uint64)))
    moved += rounds * sum(count * size for count, size in kinds)
    one_us, big_us, *many_us = best
    rate = big_bytes / max(_without(one_us, big_us), 0.001) / 1e3
    each_us = [_without(one_us, us) / count for (count, _), us in zip(kinds[2:], many_us, strict=True)]
    points = _consistent(list(zip(_SIZES, each_us, strict=True)), rate * 1e3)
    return ConnectionCost(rate, one_us, tuple(points), tuple(counts), big_bytes, (*many_us, big_us), moved)


def _consistent(points: list[tuple[int, float]], bytes_per_us: float) -> list[tuple[int, float]]:
    """Raises costs of descriptors that contradict those of other sizes.

    A larger descriptor never costs less, and the same bytes in more descriptors never cost less: small descriptors
    that were measured within a cache would otherwise look faster than one large write.

    Args:
        points: Size in bytes and cost in µs of a descriptor, by ascending size.
    """
    costs = list(accumulate((us for _, us in points), max))
    least_per_byte = 1 / bytes_per_us
    for index in reversed(range(len(points))):
        size = points[index][0]
        costs[index] = max(costs[index], size * least_per_byte)
        least_per_byte = costs[index] / size
    return [(size, us) for (size, _), us in zip(points, costs, strict=True)]


def _without(one_us: float, us: float) -> float:
    """Returns the duration of a write without its fixed cost; noise in that cost takes away half at most."""
    return max(us - one_us, us / 2)


def _scattered(random: np.random.Generator, region: Region, count: int, size: int) -> Addresses:
    """Returns random addresses in `region`, no two adjacent, because an engine would merge adjacent descriptors."""
    places = region.nbytes // (2 * size) or 1
    slots = random.choice(places, count, replace=False, shuffle=False) if count > 1 else random.integers(places, size=1)
    return slots.astype(np.uint64) * np.uint64(2 * size) + np.uint64(region.addr)


def write_once_us(
    transport: Transport, peer: str, local: Region, remote: Region, nbytes: int, wait_s: float = _WAIT_S
) -> float:
    """Writes the first bytes of `local` over those of `remote`; returns the duration in µs.

    Raises as `measure_connection`, if the write is not complete after `wait_s`.
    """
    here, there = np.array([local.addr], np.uint64), np.array([remote.addr], np.uint64)
    return _write_us(transport, peer, here, there, np.full(1, nbytes, np.uint64), wait_s)


def _write_us(
    transport: Transport, peer: str, here: Addresses, there: Addresses, sizes: Sizes, wait_s: float = _WAIT_S
) -> float:
    """Returns the duration of a write in µs.

    If the call that posts copied the bytes, the time in which this thread had no core is left out: ranks that start
    together on a few cores measure at the same time, and interrupt every large write but few of the short row copies
    with which the cost of a write is compared.
    """
    started, used_s, waited_ns = time.perf_counter(), time.thread_time(), no_core_ns()
    write = transport.write(peer, here, there, sizes, None)
    used_s = time.thread_time() - used_s
    while not write.poll():
        if time.perf_counter() - started > wait_s:
            write.release()
            raise DeadlineExceeded(f"a write of {sizes.sum()} bytes to {peer!r} was not complete after {wait_s:g} s")
        time.sleep(0)
    took_s = time.perf_counter() - started
    # The kernel may count more time without a core than has passed. A network card may write meanwhile, too.
    alone_s = max(used_s, took_s - (no_core_ns() - waited_ns) / 1e9)
    copied = used_s >= max(_COPIED_SHARE * alone_s, int(sizes.sum()) / _COPIED_AT_MOST_B_PER_S)
    return (alone_s if copied else took_s) * 1e6


CUDA_IPC = "cuda_ipc"
RDMA = "rdma"
THROUGH_HOST = "tcp through the host"
_OF_PROTOCOL = {"tcp": THROUGH_HOST, "rdma": RDMA, "efa": RDMA, "nvlink": CUDA_IPC, "nvlink_intra": CUDA_IPC}

_IPC_GB_PER_S = 12.0  # cuda_ipc over PCIe reaches 20 to 50
_RDMA_GB_PER_S = 4.0  # GPUDirect on 100 Gbit/s reaches 11; a copy through the host 2
_MORE_THAN_NETWORKS_GB_PER_S = 120.0  # UCX uses at most two network cards for a write


class Interconnect(NamedTuple):
    """The interconnect between two GPUs, as the engine tells, or inferred from the rate of a large write.

    Mooncake's engine tells its one protocol. UCX selects a lane for every kind of memory, and may select a slow lane
    without a warning. The lane cannot be queried later: UCX's protocol table is only logged, and NIXL's telemetry
    contains only times. But the rates of the lanes differ so much that the rate of one large write identifies the lane:
    on an H200, cuda_ipc reaches 373 GB/s over NVLink and 1,400 GB/s within a GPU, and a copy through the host 0.6 (UCX)
    to 2.2 GB/s (Mooncake).

    Attributes:
        name: The interconnect: CUDA_IPC, RDMA or THROUGH_HOST.
        expected: The best interconnect on this hardware.
        source: Origin of `name`: "engine" or "rate".
    """

    name: str
    expected: str
    source: str


def interconnect_of(gb_per_s: float, same_host: bool, network: bool, protocol: str = "") -> Interconnect:
    """Returns the interconnect between two GPUs, inferred from the rate of a large write if the engine does not tell.

    Args:
        gb_per_s: Rate in 10⁹ bytes per second.
        same_host: Whether both ends are on one host and in one PID namespace.
        network: Whether this host has an RDMA device.
        protocol: Protocol that the engine tells; "" for none.
    """
    rate, told = _of_rate(gb_per_s, same_host, network), _OF_PROTOCOL.get(protocol)
    if told is None:
        return rate
    # An engine with one protocol has no better one within a host than RDMA, if its peers are on other hosts, too.
    return Interconnect(told, RDMA if told == RDMA else rate.expected, "engine")


def _of_rate(gb_per_s: float, same_host: bool, network: bool) -> Interconnect:
    if gb_per_s >= (_IPC_GB_PER_S if same_host else _MORE_THAN_NETWORKS_GB_PER_S):
        return Interconnect(CUDA_IPC, CUDA_IPC, "rate")
    if same_host:
        return Interconnect(THROUGH_HOST, CUDA_IPC, "rate")
    if not network:
        return Interconnect(THROUGH_HOST, THROUGH_HOST, "rate")
    return Interconnect(RDMA if gb_per_s >= _RDMA_GB_PER_S else THROUGH_HOST, RDMA, "rate")
