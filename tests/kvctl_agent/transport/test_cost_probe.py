from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import TransportError
from kvctl_agent.transport import Region, cost_probe
from kvctl_agent.transport.cost_probe import (
    CUDA_IPC,
    RDMA,
    THROUGH_HOST,
    ConnectionCost,
    interconnect_of,
    measure_connection,
)


def test_measuring_is_short_silent_and_predicts(crew: Any, engine: str, at_best: Any) -> None:
    one, two = crew.agent(engine), crew.peer(engine)  # which looks every 5 ms
    one.transport.connect("two", two.metadata)
    here, there = Region(one.addr, one.pool.nbytes), Region(two.addr, one.pool.nbytes)
    measure_connection(one.transport, "two", here, there)  # wires up, touches pages
    offsets = np.arange(256, dtype=np.uint64) * np.uint64(4096)
    costs: list[ConnectionCost] = []

    def wrong_by() -> float:
        """The ratio of prediction and truth, at least 1; real measurements on a busy machine would be noisy."""
        costs.append(measure_connection(one.transport, "two", here, there))
        best = 1e9
        for _ in range(10):
            posted = time.perf_counter()
            one.finish(
                one.transport.write(
                    "two", one.at(0) + offsets, two.at(0) + offsets, np.full(256, 2048, np.uint64), None
                )
            )
            best = min(best, (time.perf_counter() - posted) * 1e6)
        predicted = costs[-1].write_us(256, 256 * 2048)
        return max(predicted / best, best / predicted)

    at_best(wrong_by, 4)
    assert max(cost.write_gb_per_s for cost in costs) > 0.05  # ten times less than two busy cores give
    assert all(0 < cost.descriptor_us(512) <= cost.descriptor_us(4096) for cost in costs)
    assert min(cost.descriptor_us(4096) for cost in costs) < 1000

    def took_s() -> float:
        started = time.monotonic()
        measure_connection(one.transport, "two", here, there)
        return time.monotonic() - started

    at_best(took_s, 0.6)  # 0.3 s on a machine of its own
    assert two.collect(1, timeout_s=0.05) == []


class Clock:
    """Clocks that only the test advances, except for 1 µs per reading of `perf_counter`."""

    def __init__(self) -> None:
        self.now_s = self.used_s = self.no_core_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def thread_time(self) -> float:
        return self.used_s

    def no_core_ns(self) -> int:
        return round(self.no_core_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cost_probe, "time", clock)
    monkeypatch.setattr(cost_probe, "no_core_ns", clock.no_core_ns)
    return clock


class Recorder:
    """A transport whose writes take the time of their bytes at a fixed rate."""

    def __init__(self, gb_per_s: float, clock: Clock) -> None:
        self._gb_per_s = gb_per_s
        self._clock = clock
        self.largest = self.moved = 0

    def write(self, peer: str, here: np.ndarray, there: np.ndarray, sizes: np.ndarray, tag: bytes | None) -> Any:
        nbytes = int(sizes.sum())
        self.largest = max(self.largest, nbytes)
        self.moved += nbytes
        self._clock.sleep(nbytes / self._gb_per_s / 1e9)
        return SimpleNamespace(poll=lambda: True, release=lambda: True)


@pytest.mark.parametrize(
    ("device", "gb_per_s", "largest"), [(0, 300.0, 256 << 20), (0, 1.0, 16 << 20), (HOST, 300.0, 16 << 20)]
)
def test_between_gpus_the_large_write_is_larger_where_the_connection_is_fast(
    clock: Clock, device: int, gb_per_s: float, largest: int
) -> None:
    recorder = Recorder(gb_per_s, clock)
    cost = measure_connection(recorder, "two", Region(1 << 40, 1 << 30, device), Region(1 << 41, 1 << 30), None, 1)
    assert (recorder.largest, cost.big_bytes) == (largest, largest)
    assert recorder.moved == cost.moved_bytes
    assert cost.write_gb_per_s == pytest.approx(gb_per_s, rel=0.01)


@pytest.mark.parametrize("gb_per_s", [0.12, 0.02, 0.00125])  # 1 Gbit/s, what two busy cores carry, 10 Mbit/s
def test_a_slow_connection_is_measured_shortly(clock: Clock, gb_per_s: float) -> None:
    recorder = Recorder(gb_per_s, clock)
    cost = measure_connection(recorder, "two", Region(1 << 40, 1 << 26), Region(1 << 41, 1 << 26))
    assert clock.now_s < max(1.5, 3e-9 * (512 << 10) / gb_per_s)
    assert recorder.moved == cost.moved_bytes
    assert cost.write_gb_per_s == pytest.approx(gb_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("used", "no_core", "gb_per_s"),
    [
        pytest.param(1.0, 1.0, 8.0, id="copied"),
        pytest.param(1.0, 2.5, 8.0, id="copied, and more waiting counted than has passed"),
        pytest.param(0.0, 1.0, 4.0, id="written by a card"),
        pytest.param(0.02, 1.99, 4.0, id="written by a card nearly all the time without a core"),
        pytest.param(0.15, 1.85, 4.0, id="copied, and less CPU time counted than a copy takes"),
    ],
)
def test_an_interrupted_write_counts_without_the_interruption_if_the_post_copied(
    clock: Clock, used: float, no_core: float, gb_per_s: float
) -> None:
    class Interrupted(Recorder):
        def write(self, *args: Any) -> Any:
            before_s = clock.now_s
            write = super().write(*args)
            took_s = clock.now_s - before_s
            clock.used_s += used * took_s
            clock.sleep(took_s)  # another rank has the core for as long
            clock.no_core_s += no_core * took_s
            return write

    cost = measure_connection(Interrupted(8.0, clock), "two", Region(1 << 40, 1 << 26), Region(1 << 41, 1 << 26))
    assert cost.write_gb_per_s == pytest.approx(gb_per_s, rel=0.01)


def test_a_slow_smallest_write_makes_the_large_one_twice_as_fast_at_most(clock: Clock) -> None:
    class Late(Recorder):
        def write(self, peer: str, here: np.ndarray, there: np.ndarray, sizes: np.ndarray, tag: bytes | None) -> Any:
            if sizes.sum() == 64:
                clock.sleep((16 << 20) / 8e9)  # what the large write takes
            return super().write(peer, here, there, sizes, tag)

    cost = measure_connection(Late(8.0, clock), "two", Region(1 << 40, 1 << 26), Region(1 << 41, 1 << 26))
    assert cost.write_gb_per_s == pytest.approx(16.0, rel=0.01)


@pytest.mark.parametrize("fast", [512, 4096, 262144])
def test_the_same_bytes_in_more_descriptors_never_cost_less(clock: Clock, fast: int) -> None:
    """Descriptors whose bytes are in a cache were measured at several times the rate of one large write."""

    class Cached(Recorder):
        def write(self, peer: str, here: np.ndarray, there: np.ndarray, sizes: np.ndarray, tag: bytes | None) -> Any:
            before_s = clock.now_s
            write = super().write(peer, here, there, sizes, tag)
            if len(sizes) > 1 and sizes[0] <= fast:
                clock.now_s = before_s + (clock.now_s - before_s) / 8
            return write

    cost = measure_connection(Cached(8.0, clock), "two", Region(1 << 40, 1 << 26), Region(1 << 41, 1 << 26))
    whole = cost.write_us(1, 1 << 20)
    for count in (2, 5, 30, 250, 1000, 5000):
        assert cost.write_us(count, 1 << 20) >= whole * (1 - 1e-9), count


def test_too_little_memory_is_refused(crew: Any) -> None:
    one, two = crew.agent("loopback"), crew.agent("loopback")
    one.transport.connect("two", two.transport.metadata())
    with pytest.raises(TransportError, match="524288 bytes on both sides, not 4096"):
        measure_connection(one.transport, "two", Region(one.addr, 4096), Region(two.addr, 1 << 20))


def test_the_cost_of_a_write_adds_up() -> None:
    cost = ConnectionCost(write_gb_per_s=10.0, us_per_write=5.0, us_by_bytes=((512, 2.0), (4096, 3.0)))
    assert cost.write_us(100, 100 * 512) == pytest.approx(5 + 100 * 2)
    assert cost.write_us(100, 100 * 2304) == pytest.approx(5 + 100 * 2.5)  # half way between the two
    assert cost.write_us(100, 100 * 8) == pytest.approx(5 + 100 * 2)  # a descriptor has a price whatever it holds
    # beyond the largest size measured, bytes move at the rate of a large write
    assert cost.write_us(1, 4096 + 1_000_000) == pytest.approx(5 + 3 + 100)


@pytest.mark.parametrize(
    ("gb_per_s", "same_host", "network", "name", "expected"),
    [
        (373.0, True, False, CUDA_IPC, CUDA_IPC),  # NVLink
        (1364.0, True, True, CUDA_IPC, CUDA_IPC),  # one GPU
        (22.0, True, False, CUDA_IPC, CUDA_IPC),  # PCIe
        (0.58, True, True, THROUGH_HOST, CUDA_IPC),  # UCX without cuda_ipc
        (2.2, True, False, THROUGH_HOST, CUDA_IPC),  # Mooncake by TCP
        (0.58, False, False, THROUGH_HOST, THROUGH_HOST),
        (2.2, False, True, THROUGH_HOST, RDMA),
        (46.0, False, True, RDMA, RDMA),
        (340.0, False, True, CUDA_IPC, CUDA_IPC),  # an NVLink domain of several hosts
    ],
)
def test_the_rate_tells(gb_per_s: float, same_host: bool, network: bool, name: str, expected: str) -> None:
    assert interconnect_of(gb_per_s, same_host, network) == (name, expected, "rate")


@pytest.mark.parametrize(
    ("protocol", "same_host", "name", "expected"),
    [
        ("tcp", True, THROUGH_HOST, CUDA_IPC),
        ("tcp", False, THROUGH_HOST, RDMA),
        ("rdma", False, RDMA, RDMA),
        ("rdma", True, RDMA, RDMA),  # it has no other protocol
        ("nvlink_intra", True, CUDA_IPC, CUDA_IPC),
    ],
)
def test_an_engine_that_tells_its_protocol_is_believed(
    protocol: str, same_host: bool, name: str, expected: str
) -> None:
    assert interconnect_of(2.2, same_host, True, protocol) == (name, expected, "engine")
