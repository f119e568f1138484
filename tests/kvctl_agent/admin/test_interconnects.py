"""What is said of lanes between GPUs, and only of those."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_agent.admin.documents import kind_of, kinds_in_use
from kvctl_agent.contract.choices import HOST
from kvctl_agent.runtime.peer_connections import MeasuredCost
from kvctl_agent.transport.cost_probe import CUDA_IPC, THROUGH_HOST, ConnectionCost

LOCAL = SimpleNamespace(host="here")


def a_pool(device: int | None) -> Any:
    return SimpleNamespace(device=None if device is None else SimpleNamespace(index=device))


def a_peer(name: str, host: str = "here") -> Any:
    return SimpleNamespace(name=name, info=SimpleNamespace(host=host))


def measured(**rates: float) -> Any:
    return SimpleNamespace(
        measured={
            name: MeasuredCost(ConnectionCost(rate, 5.0, ((512, 7.0),)), time.monotonic_ns())
            for name, rate in rates.items()
        }
    )


@pytest.mark.parametrize("device", [None, HOST])
def test_host_memory_has_no_such_lanes(device: int | None) -> None:
    assert kind_of(measured(a=373.0), a_pool(device), LOCAL, a_peer("a")) is None


def test_a_lane_is_named_once_it_was_measured() -> None:
    lanes, peers = measured(a=373.0, b=360.0, c=0.58), [a_peer("a"), a_peer("b"), a_peer("c", "there"), a_peer("d")]
    assert [kind_of(lanes, a_pool(0), LOCAL, peer) for peer in peers] == [
        (CUDA_IPC, CUDA_IPC, "rate"),
        (CUDA_IPC, CUDA_IPC, "rate"),
        (THROUGH_HOST, THROUGH_HOST, "rate"),
        None,
    ]
    assert kinds_in_use(lanes, a_pool(0), LOCAL, peers) == [
        "cuda_ipc (inferred: 373 GB/s)",
        "tcp through the host (inferred: 0.58 GB/s)",
    ]
    assert kinds_in_use(lanes, a_pool(0), LOCAL, peers[:1], ("tcp", False)) == ["tcp through the host (373 GB/s)"]
