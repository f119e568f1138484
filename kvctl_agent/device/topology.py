"""Interconnects between the GPUs of this process: NVLink, PCIe, or none."""

from __future__ import annotations

import uuid
from typing import Any

from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.errors import DeviceError

SAME, NVLINK, PCIE, FABRIC = "same device", "nvlink", "pcie", "fabric"


def uuid_of(device: Any) -> str:
    """Returns a device's UUID as nvidia-smi -L shows it."""
    return f"GPU-{uuid.UUID(bytes=bytes(checked(load().cuDeviceGetUuid(device), 'no UUID').bytes))}"


def ordinals() -> dict[str, int]:
    """Returns the number of each GPU that is visible to this process, by UUID."""
    driver = load()
    count = checked(driver.cuDeviceGetCount(), "cannot count GPUs")
    return {uuid_of(checked(driver.cuDeviceGet(number), f"GPU {number}")): number for number in range(count)}


def interconnect(own: int, other: int) -> str:
    """Returns the interconnect from GPU `own` to the memory of GPU `other`; empty if there is no peer access.

    NVLink is recognised by native atomics, which PCIe lacks.
    """
    if own == other:
        return SAME
    driver = load()
    pair = f"GPU {own} to GPU {other}"
    if not checked(driver.cuDeviceCanAccessPeer(own, other), pair):
        return ""
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return NVLINK if checked(driver.cuDeviceGetP2PAttribute(atomics, own, other), pair) else PCIE


def interconnects(own: int) -> dict[int, str]:
    """Returns the interconnect to each GPU of this process that GPU `own` can access, by number."""
    found = {number: interconnect(own, number) for number in ordinals().values() if number != own}
    return {number: name for number, name in found.items() if name}


def interconnect_to(own: int, name: str) -> str:
    """Returns the interconnect from GPU `own` to the GPU with UUID `name`.

    Raises:
        DeviceError: there is no peer access; the text has the reason.
    """
    other = ordinals().get(name)
    if other is None:
        raise DeviceError(
            f"GPU {own} cannot map memory of {name}, which is not visible to this process: add it to "
            "CUDA_VISIBLE_DEVICES"
        )
    found = interconnect(own, other)
    if not found:
        raise DeviceError(
            f"GPU {own} cannot reach the memory of GPU {other} ({name}): no peer access, see nvidia-smi topo"
        )
    return found


def enable_peer_access(context: Context, own: int, other: int) -> None:
    """Lets kernels of GPU `own` access memory that this process has allocated with `cuMemAlloc` on GPU `other`.

    Raises:
        DeviceError: the driver refuses.
    """
    driver = load()
    message = f"GPU {own} cannot reach GPU {other}"
    peer = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(other), message)), message)
    with context.visit():
        status = driver.cuCtxEnablePeerAccess(peer, 0)
        if status[0] != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            checked(status, message)
