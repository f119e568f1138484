"""Memory sharing between processes: exports of local allocations, and mappings of a peer's allocations.

All connections of the process share the mappings of a device, which are reference-counted.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvctl_agent.device.base import Blocks, Export
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.memory import mapped, unmap
from kvctl_agent.errors import DeviceError

IPC, FABRIC = "ipc", "fabric"
HANDLE_BYTES = 64
"""Size of a handle of either kind."""


class MappingCache:
    """Reference-counted mappings of one device; opens each handle once, since the driver counts opens as well."""

    def __init__(self, context: Context, ordinal: int) -> None:
        self._context = context
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._at: dict[Export, int] = {}
        self._users: dict[Export, int] = {}

    def open(self, export: Export) -> int:
        """Maps an allocation and returns the local address of its first byte; each call requires a call of `close`.

        Raises:
            DeviceError: the export is malformed, or the driver cannot map it; the text has the reason.
        """
        if len(export.handle) != HANDLE_BYTES or export.nbytes <= 0 or export.kind not in (IPC, FABRIC):
            raise DeviceError(
                f"a peer exported {export.nbytes} bytes of {export.device} by a {export.kind!r} handle of "
                f"{len(export.handle)} bytes, which is unknown: both sides must run the same version"
            )
        with self._lock:
            if export not in self._at:
                # Opened with the writer's device current; with the memory's device current its kernels would fault.
                with self._context.visit():
                    self._at[export] = self._import(export) if export.kind == FABRIC else self._attach(export)
                self._users[export] = 0
            self._users[export] += 1
            return self._at[export]

    def close(self, export: Export) -> None:
        """Releases one reference to a mapping, and unmaps the memory if it was the last reference."""
        with self._lock:
            self._users[export] -= 1
            if self._users[export]:
                return
            del self._users[export]
            addr = self._at.pop(export)
            with self._context.visit():
                if export.kind == FABRIC:
                    unmap(addr, export.nbytes)
                else:
                    # Fails if the device is lost, and then nothing is mapped any more.
                    load().cuIpcCloseMemHandle(addr)

    def _attach(self, export: Export) -> int:
        driver = load()
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), export.handle, HANDLE_BYTES)
        lazily = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        addr = int(checked(driver.cuIpcOpenMemHandle(handle, lazily), self._refusal(export)))
        failed, base, size = driver.cuMemGetAddressRange(addr)
        # A wrong size from a peer would make a kernel fault, which loses the device for this process.
        if not failed and addr + export.nbytes > int(base) + size:
            driver.cuIpcCloseMemHandle(addr)
            raise DeviceError(f"{self._refusal(export)}: it is only {int(base) + size - addr} bytes long")
        return addr

    def _import(self, export: Export) -> int:
        driver = load()
        message = self._refusal(export)
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        handle = checked(driver.cuMemImportFromShareableHandle(export.handle, kind), message)
        try:
            return mapped(handle, export.nbytes, (self._ordinal,), message)
        finally:
            # The mapping keeps the allocation alive.
            driver.cuMemRelease(handle)

    def _refusal(self, export: Export) -> str:
        return f"GPU {self._ordinal} cannot map {export.nbytes} bytes of a peer's {export.device}"


_exported: set[Export] = set()
"""All exports that this process has made."""


def exported(context: Context, regions: Sequence[tuple[int, int]], device: str) -> list[Export]:
    """Exports the allocations that contain the regions (address, bytes), each once, ordered by address.

    `device` is the UUID of the device that has the memory.

    Raises:
        DeviceError: an allocation cannot be exported; the text has the reason.
    """
    found: dict[int, Export] = {}
    driver = load()
    with context.visit():
        for addr, nbytes in regions:
            at = addr
            # A region may span several allocations: an engine's expandable segment consists of `cuMemCreate` pieces.
            while at < addr + nbytes:
                message = f"{nbytes} bytes at {addr:#x} are no memory of {device}"
                base, size = map(int, checked(driver.cuMemGetAddressRange(at), message))
                if base not in found:
                    found[base] = Export(base, size, *_handle(base), device)
                at = base + size
    exports = [found[base] for base in sorted(found)]
    _exported.update(exports)
    return exports


def _handle(base: int) -> tuple[str, bytes]:
    """Returns the kind and bytes of a handle with which other processes can map the allocation at `base`.

    Raises:
        DeviceError: the allocation cannot be exported; the text has a remedy.
    """
    driver = load()
    message = "memory of a GPU cannot be exported to another process"
    attributes = driver.CUpointer_attribute
    legacy = attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    if checked(driver.cuPointerGetAttribute(legacy, base), message):
        handle = checked(driver.cuIpcGetMemHandle(base), message)
        return IPC, ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
    fabric = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    allowed = checked(driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, base), message)
    if int(allowed) & int(fabric):
        allocation = checked(driver.cuMemRetainAllocationHandle(base), message)
        try:
            handle = checked(driver.cuMemExportToShareableHandle(allocation, fabric, 0), message)
        finally:
            # Releases only the reference retained above; the allocation's owner has its own.
            driver.cuMemRelease(allocation)
        return FABRIC, bytes(handle.data)
    raise DeviceError(
        f"{message}: cuMemCreate made it without a fabric handle; set mem_pool=default, or for an engine's own pool "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )


class _SameProcess:
    """Stands in for `MappingCache` if the peer is in this process, whose allocations need no mapping."""

    def open(self, export: Export) -> int:
        # A peer that falsely claims to be in this process could otherwise make kernels write to any address.
        if export not in _exported:
            raise DeviceError(
                f"{export.nbytes} bytes at {export.addr:#x} of {export.device} are not an export of this process"
            )
        return export.addr

    def close(self, export: Export) -> None:
        """Does nothing, because `open` mapped nothing."""


class PeerMapping:
    """Implementation of `Mapping` for the exported allocations of one peer."""

    def __init__(self, cache: MappingCache | None, exports: Sequence[Export], lane: str) -> None:
        """Maps the allocations.

        Args:
            cache: mappings of the device; None if the peer is another agent of this process.

        Raises:
            DeviceError: an allocation cannot be mapped; those already mapped are unmapped again.
        """
        self.lane = lane
        self._opened = cache or _SameProcess()
        self._exports: list[Export] = []
        addrs = []
        try:
            for export in sorted(exports):
                addrs.append(self._opened.open(export))
                self._exports.append(export)
        except DeviceError:
            self.close()
            raise
        self._starts = [export.addr for export in self._exports]
        self._ends = [export.addr + export.nbytes for export in self._exports]
        self._shifts = [local - remote for local, remote in zip(addrs, self._starts, strict=True)]
        self._tables = [np.array(column, np.int64) for column in (self._starts, self._ends, self._shifts)]

    def translate(self, addr: int, nbytes: int = 1) -> int:
        index = bisect_right(self._starts, addr) - 1
        if index < 0 or addr + nbytes > self._ends[index]:
            raise self._unknown(addr)
        return addr + self._shifts[index]

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        starts, ends, shifts = self._tables
        index = np.searchsorted(starts, addrs, "right") - 1
        # Index -1 selects the last allocation; such addresses lie before the first one and are not inside.
        inside = (index >= 0) & (addrs + nbytes <= ends[index])
        if not inside.all():
            raise self._unknown(int(np.asarray(addrs)[~inside].flat[0]))
        local: Blocks = addrs + shifts[index]
        return local

    def close(self) -> None:
        while self._exports:
            self._opened.close(self._exports.pop())

    def _unknown(self, addr: Any) -> DeviceError:
        return DeviceError(f"{addr:#x} lies in none of the {len(self._starts)} allocations that the peer exported")
