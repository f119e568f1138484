"""GPU memory allocations, either from `cuMemAlloc` or exportable to other hosts of an NVLink domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.errors import DeviceError

_BLOCK = 2 << 20
"""Size of the driver's blocks: the driver places smaller allocations inside one block and exports whole blocks."""


class PlainMemory:
    """Memory from `cuMemAlloc`, which can be exported to other processes of this host."""

    def __init__(self, context: Context, nbytes: int, label: str) -> None:
        """Allocates `nbytes` bytes; `label` is the device's name in error texts.

        Raises:
            DeviceError: not enough memory is free; the text has the free size.
        """
        self.nbytes = nbytes
        self._context = context
        with context.visit():
            # Rounded up to whole blocks, so that a peer that maps it maps no other allocation.
            size = -(-nbytes // _BLOCK) * _BLOCK
            self.addr = int(checked(load().cuMemAlloc(size), f"{label}: cannot allocate {_in_words(nbytes)}"))

    def close(self) -> None:
        if self.addr:
            with self._context.visit():
                # Not checked: memory of a lost device cannot be freed, and events have reported the loss.
                load().cuMemFree(self.addr)
            self.addr = 0


class ExportableMemory:
    """Memory from `cuMemCreate`, with a fabric handle if the GPU is in an NVLink domain of several hosts."""

    def __init__(
        self, context: Context, nbytes: int, label: str, ordinal: int, peers: Sequence[int], fabric: bool
    ) -> None:
        """Allocates memory on GPU `ordinal` and maps it for that GPU and the GPUs `peers` of this process.

        Raises:
            DeviceError: as for `PlainMemory`.
        """
        driver = load()
        message = f"{label}: cannot make {_in_words(nbytes)}"
        kinds = driver.CUmemAllocationHandleType
        # Within a host, engines can pass on file descriptors.
        kind = kinds.CU_MEM_HANDLE_TYPE_FABRIC if fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = _properties(ordinal, kind)
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.nbytes = nbytes
        self._context = context
        with context.visit():
            grain = checked(driver.cuMemGetAllocationGranularity(properties, recommended), message)
            self._size = -(-nbytes // grain) * grain
            self._handle = checked(driver.cuMemCreate(self._size, properties, 0), message)
            try:
                self.addr = mapped(self._handle, self._size, (ordinal, *peers), message)
            except DeviceError:
                driver.cuMemRelease(self._handle)
                raise

    def close(self) -> None:
        if self.addr:
            with self._context.visit():
                unmap(self.addr, self._size)
                # Released only now, because a fabric handle alone does not keep the allocation alive.
                load().cuMemRelease(self._handle)
            self.addr = 0


def mapped(handle: Any, size: int, ordinals: Sequence[int], message: str) -> int:
    """Maps an allocation into the address space, lets the GPUs `ordinals` access it, and returns its address.

    Raises:
        DeviceError: the allocation cannot be mapped; a partial mapping has been undone.
    """
    driver = load()
    addr = checked(driver.cuMemAddressReserve(size, 0, 0, 0), message)
    try:
        checked(driver.cuMemMap(addr, size, 0, handle, 0), message)
        rights = [_right(ordinal) for ordinal in ordinals]
        checked(driver.cuMemSetAccess(addr, size, rights, len(rights)), message)
    except DeviceError:
        unmap(int(addr), size)
        raise
    return int(addr)


def unmap(addr: int, size: int) -> None:
    """Unmaps memory that `mapped` mapped completely or partly, and frees its address range."""
    driver = load()
    driver.cuMemUnmap(addr, size)
    driver.cuMemAddressFree(addr, size)


def fabric_refusal(context: Context, device: Any, ordinal: int) -> str:
    """Returns the reason why other hosts cannot map memory of this GPU; empty if they can.

    Makes a trial export, because the device attribute is also set where an export fails.
    """
    driver = load()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    if not checked(driver.cuDeviceGetAttribute(attribute, device), f"GPU {ordinal}"):
        return "the GPU is not in an NVLink domain of several hosts"
    message = "the driver cannot create a fabric handle"
    fabric = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    properties = _properties(ordinal, fabric)
    try:
        with context.visit():
            handle = checked(driver.cuMemCreate(_BLOCK, properties, 0), message)
            try:
                checked(driver.cuMemExportToShareableHandle(handle, fabric, 0), message)
            finally:
                driver.cuMemRelease(handle)
    except DeviceError as error:
        return str(error)
    return ""


def _properties(ordinal: int, kind: Any) -> Any:
    driver = load()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = kind
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    # Lets network cards read and write the memory if the GPU supports it.
    failed, capable = driver.cuDeviceGetAttribute(attribute, ordinal)
    properties.allocFlags.gpuDirectRDMACapable = int(not failed and bool(capable))
    return properties


def _right(ordinal: int) -> Any:
    driver = load()
    right = driver.CUmemAccessDesc()
    right.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    right.location.id = ordinal
    right.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return right


def _in_words(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"
