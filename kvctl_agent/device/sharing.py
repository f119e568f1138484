"""Memory of one process in another's address space: what we export, and where a peer's addresses are here."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvctl_agent.device.base import Blocks, Export
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.mapping_cache import FABRIC, HANDLE_BYTES, IPC, MappingCache
from kvctl_agent.errors import DeviceError

_given: set[Export] = set()
"""What this process has exported."""


def exported(context: Context, regions: Sequence[tuple[int, int]], device: str) -> list[Export]:
    """The allocations that regions (address, bytes) lie in, each once, in order of address.

    Args:
        device: UUID of the device that they are on.

    Raises:
        DeviceError: one of them cannot be exported; says why.
    """
    found: dict[int, Export] = {}
    driver = load()
    with context.visit():
        for addr, nbytes in regions:
            at = addr
            # A region of several allocations: an engine's growing segment, made of `cuMemCreate` pieces.
            while at < addr + nbytes:
                what = f"{nbytes} bytes at {addr:#x} are no memory of {device}"
                base, size = map(int, checked(driver.cuMemGetAddressRange(at), what))
                if base not in found:
                    found[base] = Export(base, size, *_handle(base), device)
                at = base + size
    exports = [found[base] for base in sorted(found)]
    _given.update(exports)
    return exports


def _handle(base: int) -> tuple[str, bytes]:
    """Kind and bytes of what names an allocation to other processes."""
    driver = load()
    what = "memory of a GPU cannot be exported to another process"
    attributes = driver.CUpointer_attribute
    legacy = attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    if checked(driver.cuPointerGetAttribute(legacy, base), what):
        handle = checked(driver.cuIpcGetMemHandle(base), what)
        return IPC, ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
    fabric = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    allowed = checked(driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, base), what)
    if int(allowed) & int(fabric):
        allocation = checked(driver.cuMemRetainAllocationHandle(base), what)
        try:
            handle = checked(driver.cuMemExportToShareableHandle(allocation, fabric, 0), what)
        finally:
            # Ours alone: the allocation's owner keeps its own.
            driver.cuMemRelease(allocation)
        return FABRIC, bytes(handle.data)
    raise DeviceError(
        f"{what}: it was made by cuMemCreate without a fabric handle; set mem_pool=default, for an engine's own pool "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )


class _Ours:
    """In place of `MappingCache`, for allocations of this process: their addresses are ours."""

    def open(self, export: Export) -> int:
        # Who merely says that it is of this process would have kernels write anywhere in it.
        if export not in _given:
            raise DeviceError(
                f"{export.nbytes} bytes at {export.addr:#x} of {export.device} are no export of this process"
            )
        return export.addr

    def close(self, export: Export) -> None:
        """Nothing was mapped."""


class PeerMapping:
    """A peer's allocations, opened here."""

    def __init__(self, opened: MappingCache | None, exports: Sequence[Export], lane: str) -> None:
        """
        Args:
            opened: None: the peer is another agent of this process.

        Raises:
            DeviceError: one of them cannot be mapped; nothing of the others is left.
        """
        self.lane = lane
        self._opened = opened or _Ours()
        self._exports: list[Export] = []
        addrs = []
        try:
            for export in sorted(exports):
                addrs.append(self._opened.open(export))
                self._exports.append(export)
        except DeviceError:
            self.close()
            raise
        theirs = [export.addr for export in self._exports]
        self._theirs = theirs
        self._ends = [export.addr + export.nbytes for export in self._exports]
        self._shifts = [here - there for here, there in zip(addrs, theirs, strict=True)]
        self._tables = [np.array(column, np.int64) for column in (theirs, self._ends, self._shifts)]

    def translate(self, addr: int, nbytes: int = 1) -> int:
        place = bisect_right(self._theirs, addr) - 1
        if place < 0 or addr + nbytes > self._ends[place]:
            raise self._unknown(addr)
        return addr + self._shifts[place]

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        theirs, ends, shifts = self._tables
        place = np.searchsorted(theirs, addrs, "right") - 1
        # A place of -1 is the last allocation, in which no address before the first one lies.
        inside = (place >= 0) & (addrs + nbytes <= ends[place])
        if not inside.all():
            raise self._unknown(int(np.asarray(addrs)[~inside].flat[0]))
        moved: Blocks = addrs + shifts[place]
        return moved

    def close(self) -> None:
        while self._exports:
            self._opened.close(self._exports.pop())

    def _unknown(self, addr: Any) -> DeviceError:
        return DeviceError(f"{addr:#x} lies in none of the {len(self._theirs)} allocations that the peer exported")
