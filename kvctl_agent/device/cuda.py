"""Implementation of `Device` for NVIDIA GPUs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.device import topology
from kvctl_agent.device.base import DeviceMemory, Event, Export, Mapping, RowCopies
from kvctl_agent.device.driver import Context, checked, load, load_short_calls
from kvctl_agent.device.events import CudaEvent, EventPool, event_of
from kvctl_agent.device.kernels import Kernels
from kvctl_agent.device.memory import ExportableMemory, PlainMemory, fabric_refusal
from kvctl_agent.device.row_copies import CudaRowCopies
from kvctl_agent.device.sharing import FABRIC as FABRIC_HANDLE
from kvctl_agent.device.sharing import MappingCache, PeerMapping, exported
from kvctl_agent.errors import DeviceError, DeviceUnavailable

_NAME_BYTES = 128
_PCI_BYTES = 16
_FASTEST_FIRST = (topology.SAME, topology.NVLINK, topology.FABRIC, topology.PCIE)


class CudaDevice:
    """One GPU of this process. `open_device` creates one object per GPU, which lives until the process ends.

    Attributes:
        context: The primary context, which engines use too.
        kernels: Loaded kernels, shared by all `RowCopies`.
    """

    def __init__(self, index: int) -> None:
        driver = load()
        label = f"GPU {index}"
        self.index = index
        self._device = checked(driver.cuDeviceGet(index), label)
        model: bytes = checked(driver.cuDeviceGetName(_NAME_BYTES, self._device), label)
        self.name = f"{label} ({model.split(bytes(1), 1)[0].decode(errors='replace')})"
        self.uuid = topology.uuid_of(self._device)
        address: bytes = checked(driver.cuDeviceGetPCIBusId(_PCI_BYTES, self._device), label)
        self.pci = address.split(bytes(1), 1)[0].decode().lower()
        self.context = Context(self._device, label)
        self.events = EventPool(self.context)
        self.kernels = Kernels(self.context, self.capability)
        self._opened = MappingCache(self.context, index)
        with self.context.visit():
            # Streams for fills and uploads, for the memcpy baseline, and one that is always idle.
            self._plain, self._memcpy, self._idle = (self._stream() for _ in range(3))

    def enter(self) -> None:
        self.context.enter()

    def visit(self) -> AbstractContextManager[None]:
        return self.context.visit()

    # ---- streams and events -------------------------------------------------------------------------------------

    def now(self) -> Event:
        with self.context.visit():  # the calling thread may be any thread of the engine
            return self.events.record(self._idle)

    def copy(self, target: int, source: int, nbytes: int) -> Event:
        with self.context.visit():
            checked(load().cuMemcpyAsync(target, source, nbytes, self._memcpy), f"{self.name}: cannot copy")
            return self.events.record(self._memcpy)

    def copies(self) -> RowCopies:
        return CudaRowCopies(self.context, self.kernels, self.events)

    @cached_property
    def event_query(self) -> int:
        return load_short_calls().address("cuEventQuery")

    def event_of(self, event: Any) -> CudaEvent:
        return event_of(self.context, event)

    # ---- memory -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, pool: str = "default") -> DeviceMemory:
        if pool == "default":
            return PlainMemory(self.context, nbytes, self.name)
        return ExportableMemory(
            self.context, nbytes, self.name, self.index, [*topology.interconnects(self.index)], not self._fabric_refusal
        )

    def fill(self, addr: int, nbytes: int, value: int) -> None:
        self._do(load().cuMemsetD8Async, addr, value, nbytes, self._plain)
        self._wait()

    def upload(self, addr: int, data: npt.NDArray[np.uint8]) -> None:
        data = np.ascontiguousarray(data)
        self._do(load().cuMemcpyHtoDAsync, addr, data.ctypes.data, data.nbytes, self._plain)
        self._wait()

    def download(self, addr: int, out: npt.NDArray[np.uint8]) -> None:
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise DeviceError(f"{self.name}: cannot download into an array that is read-only or not contiguous")
        self._do(load().cuMemcpyDtoHAsync, out.ctypes.data, addr, out.nbytes, self._plain)
        self._wait()

    # ---- other processes ----------------------------------------------------------------------------------------

    def export(self, regions: Sequence[tuple[int, int]]) -> list[Export]:
        return exported(self.context, regions, self.uuid)

    def open(self, exports: Sequence[Export], same_process: bool = False) -> Mapping:
        lanes = {export.device: self._lane_to(export) for export in exports}
        slowest = max(lanes.values(), key=_FASTEST_FIRST.index, default=topology.SAME)
        mapping = PeerMapping(None if same_process else self._opened, exports, slowest)
        if same_process:
            ordinals = topology.ordinals()
            for name in lanes:
                if ordinals[name] != self.index:
                    topology.enable_peer_access(self.context, self.index, ordinals[name])
        return mapping

    def _lane_to(self, export: Export) -> str:
        """Returns the interconnect to an export's device; "fabric" for a device of another host."""
        if export.kind == FABRIC_HANDLE and export.device not in topology.ordinals():
            if self._fabric_refusal:
                raise DeviceError(f"{self.name} cannot map memory of another host: {self._fabric_refusal}")
            return topology.FABRIC
        return topology.interconnect_to(self.index, export.device)

    @cached_property
    def _fabric_refusal(self) -> str:
        return fabric_refusal(self.context, self._device, self.index)

    # ---- description --------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Returns properties of the GPU, for display.

        `peers` maps the number of each reachable GPU to its interconnect; `fabric` is true or the reason why other
        hosts cannot map the GPU's memory.
        """
        driver = load()
        version = checked(driver.cuDriverGetVersion(), self.name)
        with self.context.visit():
            free, total = checked(driver.cuMemGetInfo(), self.name)
        return {
            "name": self.name,
            "uuid": self.uuid,
            "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
            "capability": f"{self.capability // 10}.{self.capability % 10}",
            "multiprocessors": self.multiprocessors,
            "memory_bytes": total,
            "free_bytes": free,
            "peers": topology.interconnects(self.index),
            "fabric": self._fabric_refusal or True,
        }

    @cached_property
    def capability(self) -> int:
        """Compute capability as an integer, for example 90 for 9.0."""
        return 10 * self._attribute("COMPUTE_CAPABILITY_MAJOR") + self._attribute("COMPUTE_CAPABILITY_MINOR")

    @cached_property
    def multiprocessors(self) -> int:
        return self._attribute("MULTIPROCESSOR_COUNT")

    def _attribute(self, name: str) -> int:
        driver = load()
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver.cuDeviceGetAttribute(attribute, self._device), f"{self.name}: {name}"))

    # ---- the driver ---------------------------------------------------------------------------------------------

    def _stream(self) -> Any:
        driver = load()
        return checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), self.name)

    def _do(self, function: Any, *args: Any) -> None:
        with self.context.visit():
            checked(function(*args), f"{self.name}: {function.__name__}")

    def _wait(self) -> None:
        self._do(load().cuStreamSynchronize, self._plain)


_lock = threading.Lock()
_opened: dict[int, CudaDevice] = {}


def open_device(index: int) -> CudaDevice:
    """Returns the GPU with this number (as in the engine's tensors), always as the same object.

    Raises:
        DeviceUnavailable: there is no GPU of this number, or the packages for GPUs are not installed.
        DeviceError: the driver refuses to open the GPU.
    """
    with _lock:
        if index not in _opened:
            count = checked(load().cuDeviceGetCount(), "cannot count GPUs")
            if not 0 <= index < count:
                numbers = "only GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
                raise DeviceUnavailable(f"there is no GPU {index} here, {numbers}: see CUDA_VISIBLE_DEVICES")
            _opened[index] = CudaDevice(index)
        return _opened[index]
