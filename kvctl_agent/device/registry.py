"""Registry of the GPUs that this process has opened."""

from __future__ import annotations

import threading

from kvctl_agent.device.cuda import CudaDevice
from kvctl_agent.device.driver import checked, load
from kvctl_agent.errors import DeviceUnavailable

_lock = threading.Lock()
_opened: dict[int, CudaDevice] = {}


def open_device(index: int) -> CudaDevice:
    """Return the GPU with this number, as in the engine's tensors; always the same object.

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
