"""Reference-counted mappings of peers' allocations, opened once per device for all connections of the process."""

from __future__ import annotations

import ctypes
import threading

from kvctl_agent.device.base import Export
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.memory import mapped, unmap
from kvctl_agent.errors import DeviceError

IPC, FABRIC = "ipc", "fabric"
HANDLE_BYTES = 64
"""Size of a handle of either kind."""


class MappingCache:
    """The mappings of one device. Each handle is opened once, because the driver counts opens of the same handle."""

    def __init__(self, context: Context, ordinal: int) -> None:
        self._context = context
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._at: dict[Export, int] = {}
        self._users: dict[Export, int] = {}

    def open(self, export: Export) -> int:
        """Map an allocation and return the local address of its first byte. Each call needs one call of `close`.

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
        """Release one use of a mapping; the last one unmaps it."""
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
        what = self._refusal(export)
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        handle = checked(driver.cuMemImportFromShareableHandle(export.handle, kind), what)
        try:
            return mapped(handle, export.nbytes, (self._ordinal,), what)
        finally:
            # The mapping keeps the allocation alive.
            driver.cuMemRelease(handle)

    def _refusal(self, export: Export) -> str:
        return f"GPU {self._ordinal} cannot map {export.nbytes} bytes of a peer's {export.device}"
