"""Infers the interconnect between two GPUs from the rate of a large write.

UCX chooses a lane for every kind of memory, and takes a slow one without a word. Nothing can be asked afterwards: its
protocol table goes to a log, and NIXL's telemetry has times only. But the lanes are so far apart that the rate of one
large write tells them: on H200, cuda_ipc runs at 373 GB/s over NVLink and 1,400 within a GPU, a copy through the host
at 0.6 (UCX) to 2.2 (Mooncake).
"""

from __future__ import annotations

from typing import NamedTuple

CUDA_IPC = "cuda_ipc"
RDMA = "rdma"
THROUGH_HOST = "tcp through the host"

_IPC_GB_PER_S = 12.0  # cuda_ipc over PCIe has 20 to 50
_RDMA_GB_PER_S = 4.0  # GPUDirect on 100 Gbit/s has 11; a bounce through the host 2
_MORE_THAN_NETWORKS_GB_PER_S = 120.0  # UCX uses two network cards at most for a write


class Interconnect(NamedTuple):
    """The interconnect between two GPUs.

    Attributes:
        name: The inferred interconnect: CUDA_IPC, RDMA or THROUGH_HOST.
        expected: The best interconnect on this hardware.
    """

    name: str
    expected: str


def interconnect_of(gb_per_s: float, same_host: bool, network: bool) -> Interconnect:
    """Return the interconnect between two GPUs by the rate of a large write.

    Args:
        gb_per_s: Rate in 10⁹ bytes per second.
        same_host: Whether both ends are on one host and see each other's processes.
        network: Whether this host has an RDMA device.
    """
    if gb_per_s >= (_IPC_GB_PER_S if same_host else _MORE_THAN_NETWORKS_GB_PER_S):
        return Interconnect(CUDA_IPC, CUDA_IPC)
    if same_host:
        return Interconnect(THROUGH_HOST, CUDA_IPC)
    if not network:
        return Interconnect(THROUGH_HOST, THROUGH_HOST)
    return Interconnect(RDMA if gb_per_s >= _RDMA_GB_PER_S else THROUGH_HOST, RDMA)
