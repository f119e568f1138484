"""Memory of a GPU that is ours: plain, or made of parts that other hosts of an NVLink domain can map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.errors import DeviceError

_BLOCK = 2 << 20
"""What the driver cuts smaller allocations out of, and exports as a whole."""


class PlainMemory:
    """Of `cuMemAlloc`, which one process of this host can export to another."""

    def __init__(self, context: Context, nbytes: int, label: str) -> None:
        """
        Raises:
            DeviceError: there is not as much; says how much there is.
        """
        self.nbytes = nbytes
        self._context = context
        with context.visit():
            # In blocks of its own, so that who maps it maps nothing else.
            size = -(-nbytes // _BLOCK) * _BLOCK
            self.addr = int(checked(load().cuMemAlloc(size), f"{label}: cannot allocate {_in_words(nbytes)}"))

    def close(self) -> None:
        if self.addr:
            with self._context.visit():
                # Unchecked: on a lost device nothing can be given back, and events have said why.
                load().cuMemFree(self.addr)
            self.addr = 0


class ExportableMemory:
    """Of `cuMemCreate`; with a fabric handle where the GPU is in an NVLink domain."""

    def __init__(
        self, context: Context, nbytes: int, label: str, ordinal: int, peers: Sequence[int], fabric: bool
    ) -> None:
        """
        Args:
            ordinal: this GPU's number.
            peers: numbers of the GPUs that may reach it, from this process.
            fabric: whether handles for other hosts can be had.

        Raises:
            DeviceError: as `PlainMemory`.
        """
        driver = load()
        what = f"{label}: cannot make {_in_words(nbytes)}"
        kinds = driver.CUmemAllocationHandleType
        # A file descriptor is what engines can pass on within a host.
        kind = kinds.CU_MEM_HANDLE_TYPE_FABRIC if fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = _properties(ordinal, kind)
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.nbytes = nbytes
        self._context = context
        with context.visit():
            grain = checked(driver.cuMemGetAllocationGranularity(properties, recommended), what)
            self._size = -(-nbytes // grain) * grain
            self._handle = checked(driver.cuMemCreate(self._size, properties, 0), what)
            try:
                self.addr = mapped(self._handle, self._size, (ordinal, *peers), what)
            except DeviceError:
                driver.cuMemRelease(self._handle)
                raise

    def close(self) -> None:
        if self.addr:
            with self._context.visit():
                unmap(self.addr, self._size)
                # Kept until now: a fabric handle alone keeps nothing.
                load().cuMemRelease(self._handle)
            self.addr = 0


def mapped(handle: Any, size: int, ordinals: Sequence[int], what: str) -> int:
    """Where an allocation is, which GPUs `ordinals` may now read and write.

    Raises:
        DeviceError: it cannot be mapped; nothing is left of the attempt.
    """
    driver = load()
    addr = checked(driver.cuMemAddressReserve(size, 0, 0, 0), what)
    try:
        checked(driver.cuMemMap(addr, size, 0, handle, 0), what)
        rights = [_right(ordinal) for ordinal in ordinals]
        checked(driver.cuMemSetAccess(addr, size, rights, len(rights)), what)
    except DeviceError:
        unmap(int(addr), size)
        raise
    return int(addr)


def unmap(addr: int, size: int) -> None:
    """Undoes `mapped`, as far as it came."""
    driver = load()
    driver.cuMemUnmap(addr, size)
    driver.cuMemAddressFree(addr, size)


def fabric_refusal(context: Context, device: Any, ordinal: int) -> str:
    """Why other hosts cannot map memory of this GPU; empty where they can. Tried, since attributes alone promise more.

    Args:
        device: the driver's handle of it.
    """
    driver = load()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    if not checked(driver.cuDeviceGetAttribute(attribute, device), f"GPU {ordinal}"):
        return "the GPU is in no NVLink domain of several hosts"
    what = "the driver makes no fabric handle"
    fabric = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    properties = _properties(ordinal, fabric)
    try:
        with context.visit():
            handle = checked(driver.cuMemCreate(_BLOCK, properties, 0), what)
            try:
                checked(driver.cuMemExportToShareableHandle(handle, fabric, 0), what)
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
    # Network cards may read and write it, where they can at all.
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
