"""Lanes between GPUs are named by their rates, as they were measured on H200."""

from __future__ import annotations

import pytest

from kvctl_agent.transport.cost_probe import CUDA_IPC, RDMA, THROUGH_HOST, interconnect_of


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
    assert interconnect_of(gb_per_s, same_host, network) == (name, expected)
