"""Instances with unlike pools, pages and parallel sizes, over every transport; every byte is compared."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.layout_pairs import LayoutPair, random_pair, run_pair
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape
from tests.support.host_device import HostDevice

MODEL = ModelShape(2, 4, 8, 4, 2)


@pytest.mark.parametrize("seed", range(8))
def test_random_pairs(no_leaks: None, socket_dir: Path, seed: int) -> None:
    run_pair(random_pair(seed), "loopback", socket_dir)


@pytest.mark.parametrize("path", ["staged", "slice", "bulk", "direct", "auto"])
@pytest.mark.parametrize("seed", range(4))
def test_random_pairs_on_devices_with_checksums(no_leaks: None, socket_dir: Path, path: str, seed: int) -> None:
    """One side in host memory, or both on devices: both sides find the same checksums."""
    prefill, decode = (HostDevice() for _ in range(2))
    devices = (prefill if seed % 4 else None, decode if seed % 3 else None)
    if path == "direct":
        devices = prefill, decode
    run_pair(replace(random_pair(seed), path=path), "loopback", socket_dir, devices, checksum=True)
    assert all(device is None or device.summed for device in devices)


@pytest.fixture(scope="module")
def engines() -> None:
    """Both engines in use once: Mooncake keeps some descriptors open as long as the process lives."""
    for transport in ("nixl", "mooncake"):
        with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as directory:
            run_pair(random_pair(0, most_ranks=1), transport, Path(directory))


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
@pytest.mark.parametrize("seed", range(4))
def test_random_pairs_over_an_engine(
    engines: None, no_leaks: None, socket_dir: Path, transport: str, seed: int
) -> None:
    run_pair(random_pair(1000 + seed, most_ranks=2), transport, socket_dir)


@pytest.mark.parametrize(("cp", "interleave"), [(2, 1), (2, 16), (4, 4)])
@pytest.mark.parametrize("prefill", [ParallelConfig(tp=4), ParallelConfig(cp=2)])
def test_decode_context_parallelism(
    engines: None, no_leaks: None, socket_dir: Path, prefill: ParallelConfig, cp: int, interleave: int
) -> None:
    pair = LayoutPair(
        MODEL,
        prefill,
        ParallelConfig(cp=cp),
        (16, 16),
        ("nhd", "nhd"),
        interleave,
        "all",
        "staged",
        64,
        ((150, 0), (333, 1)),
    )
    run_pair(pair, "nixl" if cp == 2 else "loopback", socket_dir)
