"""A stand-in for `cuda.bindings.driver`: its functions on host memory, with the real enums and structures.

Bytes are copied at once; events complete late, at their `patience + 1`-th query.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as real
import numpy as np

R = real.CUresult
OK = (R.CUDA_SUCCESS,)


class FakeDriver:
    """GPUs 0 to `devices - 1`.

    Attributes:
        calls: number of calls of each function.
        failing: results returned instead, by function name; removed by the test.
        allocated: sizes of live allocations by address.
        opened: live mappings of other processes' memory, by address.
        unreachable: pairs of devices without peer access.
        fabric: whether fabric handles are supported.
        patience: queries of an event that return not ready.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, Any] = {}
        self.allocated: dict[int, int] = {}
        self.made: set[int] = set()
        self.opened: dict[int, int] = {}
        self.exported: dict[bytes, int] = {}
        self.unreachable: set[tuple[int, int]] = set()
        self.fabric = False
        self.patience = 0
        self.free_bytes = 8 << 30
        self.rights: dict[int, list[int]] = {}
        self.waits: list[tuple[int, int, int]] = []
        self._buffers: dict[int, Any] = {}
        self._queries: dict[int, int] = defaultdict(int)
        self._numbers = iter(range(1, 1 << 30))
        self._sizes: dict[int, int] = {}
        self._thread = threading.local()

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not (name.startswith("cu") and callable(found)):
            return found

        @functools.wraps(found)
        def called(*args: Any) -> Any:
            self.calls[name] += 1
            return self.failing[name] if name in self.failing else found(*args)

        return called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(real, name)
        raise AttributeError(name)

    # ---- devices and contexts -------------------------------------------------------------------------------------

    @property
    def stack(self) -> list[int]:
        """Contexts of this thread, the current one last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[int] = self._thread.stack
        return stack

    def cuInit(self, flags):
        return OK

    def cuGetProcAddress(self, symbol, version, flags):
        return real.CUresult.CUDA_ERROR_NOT_FOUND, 0, 0

    def cuGetErrorString(self, status):
        return (*OK, b"words of the driver")

    def cuDriverGetVersion(self):
        return (*OK, 13000)

    def cuDeviceGetCount(self):
        return (*OK, self.devices)

    def cuDeviceGet(self, number):
        return (*OK, number)

    def cuDeviceGetName(self, length, device):
        return (*OK, b"NVIDIA Stand-in".ljust(length, b"\0"))

    def cuDeviceGetPCIBusId(self, length, device):
        return *OK, f"0000:{0x19 + device:02X}:00.0".encode().ljust(length, b"\0")

    def cuDeviceGetUuid(self, device):
        return (*OK, SimpleNamespace(bytes=bytes([device] * 16)))

    def cuDeviceGetAttribute(self, attribute, device):
        known = {
            real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
            real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
            real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: 1,
        }
        return (*OK, known.get(attribute, 0))

    def cuDeviceCanAccessPeer(self, own, other):
        return (*OK, int((own, other) not in self.unreachable))

    def cuDeviceGetP2PAttribute(self, attribute, own, other):
        return (*OK, 1)

    def cuDevicePrimaryCtxRetain(self, device):
        return (*OK, 1000 + device)

    def cuDevicePrimaryCtxRelease(self, device):
        return OK

    def cuCtxSetCurrent(self, context):
        self.stack[-1:] = [context]
        return OK

    def cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return OK

    def cuCtxPopCurrent(self):
        return (*OK, self.stack.pop())

    def cuCtxEnablePeerAccess(self, context, flags):
        return OK

    def cuCtxGetStreamPriorityRange(self):
        return (*OK, 0, -5)

    # ---- streams and events ---------------------------------------------------------------------------------------

    def cuStreamCreate(self, flags):
        return self._in_context(next(self._numbers))

    def cuStreamCreateWithPriority(self, flags, priority):
        return self._in_context(next(self._numbers))

    def cuStreamDestroy(self, stream):
        return OK

    def cuStreamSynchronize(self, stream):
        return OK

    def cuStreamWaitEvent(self, stream, event, flags):
        self.waits.append((self.stack[-1], stream, event))
        return OK

    def cuEventCreate(self, flags):
        return self._in_context(next(self._numbers))

    def cuEventRecord(self, event, stream):
        if not self.stack:
            return (R.CUDA_ERROR_INVALID_CONTEXT,)
        self._queries[event] = 0
        return OK

    def cuEventQuery(self, event):
        if not self.stack:
            return (R.CUDA_ERROR_INVALID_CONTEXT,)
        self._queries[event] += 1
        return OK if self._queries[event] > self.patience else (R.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event):
        self._queries[event] = self.patience
        return OK

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _in_context(self, value):
        return (*OK, value) if self.stack else (R.CUDA_ERROR_INVALID_CONTEXT, None)

    def _buffer(self, size: int) -> int:
        # Ends before its own end, as a GPU's range does, and 256-byte aligned.
        buffer = np.zeros(size + 256, np.uint8)
        addr = int(buffer.ctypes.data) + 255 & ~255
        self._buffers[addr] = buffer
        return addr

    def cuMemGetInfo(self):
        return (*OK, self.free_bytes, 16 << 30)

    def cuMemAlloc(self, size):
        if size > self.free_bytes:
            return (R.CUDA_ERROR_OUT_OF_MEMORY, None)
        addr = self._buffer(size)
        self.allocated[addr] = size
        return self._in_context(addr)

    def cuMemFree(self, addr):
        del self.allocated[int(addr)], self._buffers[int(addr)]
        return OK

    def cuMemHostAlloc(self, size, flags):
        return (*OK, self._buffer(size))

    def cuMemFreeHost(self, addr):
        del self._buffers[addr]
        return OK

    def cuMemsetD8Async(self, addr, value, nbytes, stream):
        ctypes.memset(addr, value, nbytes)
        return OK

    def cuMemcpyAsync(self, target, source, nbytes, stream):
        ctypes.memmove(target, source, nbytes)
        return OK

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyAsync

    # ---- memory made in parts -------------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, properties, option):
        return (*OK, 2 << 20)

    def cuMemCreate(self, size, properties, flags):
        kinds = real.CUmemAllocationHandleType
        if properties.requestedHandleTypes == kinds.CU_MEM_HANDLE_TYPE_FABRIC and not self.fabric:
            return (R.CUDA_ERROR_NOT_PERMITTED, None)
        handle = next(self._numbers)
        self.made.add(handle)
        self._sizes[handle] = size
        return (*OK, handle)

    def cuMemRelease(self, handle):
        self.made.remove(handle)
        return OK

    def cuMemAddressReserve(self, size, alignment, addr, flags):
        return (*OK, self._buffer(size))

    def cuMemMap(self, addr, size, offset, handle, flags):
        if size > self._sizes[handle]:
            return (R.CUDA_ERROR_INVALID_VALUE,)
        self.opened[addr] = size
        return OK

    def cuMemSetAccess(self, addr, size, rights, count):
        self.rights[addr] = [right.location.id for right in rights]
        return OK

    def cuMemUnmap(self, addr, size):
        return OK if self.opened.pop(addr, None) else (R.CUDA_ERROR_INVALID_VALUE,)

    def cuMemAddressFree(self, addr, size):
        del self._buffers[addr]
        return OK

    # ---- other processes ------------------------------------------------------------------------------------------

    def cuMemGetAddressRange(self, addr):
        for base, size in (self.allocated | self.opened).items():
            if base <= addr < base + size:
                return (*OK, base, size)
        return (R.CUDA_ERROR_INVALID_VALUE, None, None)

    def cuPointerGetAttribute(self, attribute, addr):
        attributes = real.CUpointer_attribute
        if attribute == attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            return (*OK, addr in self.allocated)
        return (*OK, 8 if self.fabric else 1)

    def cuIpcGetMemHandle(self, addr):
        handle = real.CUipcMemHandle()
        name = addr.to_bytes(64, "little")
        self.exported[name] = self.allocated[addr]
        ctypes.memmove(handle.getPtr(), name, 64)
        return (*OK, handle)

    def cuIpcOpenMemHandle(self, handle, flags):
        size = self.exported[ctypes.string_at(handle.getPtr(), 64)]
        addr = self._buffer(size)
        self.opened[addr] = size
        return self._in_context(addr)

    def cuIpcCloseMemHandle(self, addr):
        del self.opened[addr]
        return OK

    def cuMemRetainAllocationHandle(self, addr):
        handle = next(self._numbers)
        self.made.add(handle)
        self._sizes[handle] = self.opened[addr]
        return (*OK, handle)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        name = b"fabric".ljust(56, b"\0") + self._sizes[handle].to_bytes(8, "little")
        return (*OK, SimpleNamespace(data=name))

    def cuMemImportFromShareableHandle(self, name, kind):
        handle = next(self._numbers)
        self.made.add(handle)
        self._sizes[handle] = int.from_bytes(name[56:], "little")
        return (*OK, handle)
