"""The GPUs of this process, each opened once."""

from __future__ import annotations

import threading

from kvctl_agent.device.cuda import CudaDevice
from kvctl_agent.device.driver import checked, load
from kvctl_agent.errors import DeviceUnavailable

_lock = threading.Lock()
_opened: dict[int, CudaDevice] = {}


def open_device(index: int) -> CudaDevice:
    """The GPU with this number, as the engine's tensors have it; the same object every time.

    Raises:
        DeviceUnavailable: there is none of that number, or what drives GPUs is not installed; says which.
        DeviceError: the driver does not let us use it.
    """
    with _lock:
        if index not in _opened:
            count = checked(load().cuDeviceGetCount(), "cannot count GPUs")
            if not 0 <= index < count:
                numbers = "only GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
                raise DeviceUnavailable(f"there is no GPU {index} here, {numbers}: see CUDA_VISIBLE_DEVICES")
            _opened[index] = CudaDevice(index)
        return _opened[index]
