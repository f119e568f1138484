"""Ranks in processes of their own with pools on a real GPU: checksums, and memory that goes and comes back."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl_agent.transport.nixl.binding import driver_cuda

pytestmark = pytest.mark.skipif(driver_cuda() is None, reason="no NVIDIA GPU here (run benchmarks/gpu.sh on one)")


@pytest.fixture
def no_leaks() -> None:
    """The ranks are processes of their own."""


def run(cluster: Any, rooms: range) -> dict[str, Any]:
    """Runs rooms; returns the answers of all ranks to `wait`."""
    numbers = [*rooms]
    cluster.receive(numbers)
    cluster.all("claim", "prefill", rooms=numbers)
    cluster.all("feed", "prefill", rooms=numbers)
    answers = cluster.all("wait", "prefill", rooms=numbers, timeout=60)
    for rank in cluster.of("decode"):
        mine = [room for room in numbers if cluster.target(room) == rank.name]
        answers[rank.name] = rank.ask("wait", rooms=mine, timeout=60)
    return answers


def check(cluster: Any, rooms: range) -> None:
    """Runs rooms, all of which succeed with the right bytes."""
    for name, answer in run(cluster, rooms).items():
        assert {room["state"] for room in answer["rooms"].values()} == {"SUCCESS"}, (name, answer)
    for rank in cluster.of("decode"):
        assert rank.ask("verify", rooms=[room for room in rooms if cluster.target(room) == rank.name]) == []


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_equal_checksums_and_one_changed_byte(make_cluster: Any, path: str) -> None:
    cluster = make_cluster("nixl", gpu=0, path=path, checksum=True).start()
    check(cluster, range(20))
    cluster.ranks["decode-1"].ask("corrupt")
    answers = run(cluster, range(20, 40))
    failed = {
        int(room): answer["error"]["code"]
        for room, answer in answers["decode-1"]["rooms"].items()
        if answer["state"] == "FAILED"
    }
    assert failed == dict.fromkeys(range(21, 40, 2), "KV_CHECKSUM_MISMATCH")
    assert {room["state"] for room in answers["decode-0"]["rooms"].values()} == {"SUCCESS"}
    assert cluster.ranks["decode-0"].ask("verify", rooms=[*range(20, 40, 2)]) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("path", "pool"), [("staged", "default"), ("direct", "default"), ("auto", "default"), ("staged", "vmm")]
)
def test_memory_goes_and_comes_back(make_cluster: Any, role: str, path: str, pool: str) -> None:
    """Made memory (pool vmm) comes back at its old addresses; other memory is freed and allocated again."""
    cluster = make_cluster("nixl", gpu=0, path=path, pool=pool).start()
    others = "decode" if role == "prefill" else "prefill"
    check(cluster, range(10))
    for turn in (1, 2):
        cluster.all("sleep", role, unmap=pool == "vmm")
        deadline = time.monotonic() + 60
        while any("ready" in peers.values() for peers in cluster.all("peers", others).values()):
            assert time.monotonic() < deadline, "its peers still hold it for ready"
        cluster.all("wake", role, unmapped=pool == "vmm")
        cluster.all("ready", timeout=60)
        check(cluster, range(10 * turn, 10 * turn + 10))
