"""Access to the CUDA driver: loads it on first use, turns errors into texts with a remedy, and manages contexts.

All GPU code in `kvctl_agent.device` calls functions of the module that `load` returns (`cuda.bindings.driver`) and
passes their results to `checked`. These functions release the GIL, except those of `load_short_calls`.

A context does not survive a fork: in the child all calls fail as "not initialized" without an effect, so no guard is
needed.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from kvctl_agent.contract.extras import install
from kvctl_agent.errors import DeviceError, DeviceUnavailable

_REMEDIES = {
    "CUDA_ERROR_INVALID_VALUE": "the driver takes no such value or address: this memory is not the GPU's, or was freed",
    "CUDA_ERROR_NOT_INITIALIZED": "a GPU cannot be used in a child forked by a process that has used it: start workers "
    "by spawn",
    "CUDA_ERROR_DEINITIALIZED": "the process is ending: close agents before",
    "CUDA_ERROR_INVALID_CONTEXT": "the thread has another GPU's context, or one that was reset",
    "CUDA_ERROR_INVALID_DEVICE": "there is no such GPU here: see nvidia-smi -L and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has it for itself: set nvidia-smi -c DEFAULT",
    "CUDA_ERROR_INVALID_HANDLE": "a stream, event or module of another GPU, or one that was freed",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the copy kernel was compiled for another GPU: remove Triton's cache "
    "(TRITON_CACHE_DIR, ~/.triton/cache)",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "these two GPUs cannot reach each other's memory: use path staged",
    "CUDA_ERROR_TOO_MANY_PEERS": "the GPU has no peer mapping left: use path staged",
    "CUDA_ERROR_MAP_FAILED": "the memory's exporter is gone, or a container hides it: share the IPC namespace "
    "(docker --ipc=host)",
    "CUDA_ERROR_NOT_PERMITTED": "the process may not: give containers one IPC namespace (docker --ipc=host), and for "
    "fabric handles an IMEX channel (/dev/nvidia-caps-imex-channels)",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or its driver cannot",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the fabric manager is not running: systemctl start nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's library and kernel module differ: reboot, or reload the module",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove CUDA's compatibility libraries from LD_LIBRARY_PATH",
    "CUDA_ERROR_STUB_LIBRARY": "remove CUDA's stubs folder from LD_LIBRARY_PATH",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the GPU is lost to this process, whose pages or peers' memory were freed too early: "
    "restart the worker",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is damaged: drain the host, see nvidia-smi -q -d ECC",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "an NVLink failed: drain the host, see nvidia-smi nvlink -e",
    "CUDA_ERROR_LAUNCH_FAILED": "the GPU is lost to this process: restart the worker",
    "CUDA_ERROR_UNKNOWN": "see the kernel's log for Xid (dmesg)",
}


@cache
def load() -> Any:
    """Returns the module `cuda.bindings.driver`, after initialising the CUDA driver.

    Raises:
        DeviceUnavailable: the package, the driver or a GPU is missing; the text says which.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceUnavailable(f"a GPU needs cuda-bindings ({error}): {install('gpu')}") from error
    try:
        failed = driver.cuInit(0)[0]
    # The package raises RuntimeError if it finds no libcuda.so.1.
    except RuntimeError as error:
        raise DeviceUnavailable(
            "there is no NVIDIA driver here (libcuda.so.1): install it, or start the container with --gpus all"
        ) from error
    if failed == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DeviceUnavailable("the NVIDIA driver shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES")
    if failed:
        raise DeviceUnavailable(f"the NVIDIA driver does not start: {_explained(driver, failed)}")
    return driver


@lru_cache(1)
def _short_calls(driver: Any) -> ShortCalls:
    return ShortCalls(driver)


def load_short_calls() -> ShortCalls:
    """Returns the functions of the driver that the control loop calls for every part. Raises as `load`."""
    return _short_calls(load())


_NUMBER, _WORD = ctypes.c_uint, ctypes.c_size_t  # a word is an address, a handle or a size
_SHORT = {
    "cuCtxSetCurrent": (_WORD,),
    "cuEventQuery": (_WORD,),
    "cuEventRecord": (_WORD, _WORD),
    "cuLaunchKernel": (_WORD, *[_NUMBER] * 7, _WORD, _WORD, _WORD),
    "cuMemcpyDtoHAsync": (_WORD,) * 4,
    "cuMemcpyHtoDAsync": (_WORD,) * 4,
    "cuStreamWaitEvent": (_WORD, _WORD, _NUMBER),
}
_ABI = 12_000  # version of CUDA whose declarations of these functions `_SHORT` has


class ShortCalls:
    """Functions of the driver that take microseconds, called without releasing the GIL.

    Beside an engine's thread that runs Python, each release may cost a wait of 5 ms for the GIL, and a part takes ten
    of these calls. The arguments and results are those of `cuda.bindings.driver`. Host memory of the
    copies must be pinned: pageable memory is copied within the call.
    """

    def __init__(self, driver: Any) -> None:
        """Wraps what `load` returned, whose own functions are called if the driver does not provide theirs."""
        self._driver = driver

    def __getattr__(self, name: str) -> Callable[..., tuple[Any]]:
        address = self.address(name)
        call = self._short(address, _SHORT[name]) if address else getattr(self._driver, name)
        setattr(self, name, call)
        return call

    def address(self, name: str) -> int:
        """Returns the address of a function of the driver; 0 if the driver does not provide it."""
        failed, address, *_ = self._driver.cuGetProcAddress(name.encode(), _ABI, 0)
        return 0 if failed else int(address)

    def _short(self, address: int, types: tuple[Any, ...]) -> Callable[..., tuple[Any]]:
        function, status = ctypes.PYFUNCTYPE(ctypes.c_int, *types)(address), self._driver.CUresult

        def call(*args: Any) -> tuple[Any]:
            failed = function(*map(int, args))
            return (status(failed) if failed else 0,)

        return call


def checked(result: tuple[Any, ...], message: str) -> Any:
    """Checks the status of a driver call and returns its other results: None, one value, or a tuple of several.

    Args:
        result: The tuple that the driver's function returned, status first.
        message: Start of the error text, for example "GPU 0: cannot allocate 1.5 GiB".

    Raises:
        DeviceError: the status is not success; the text has `message`, the driver's text and a remedy.
    """
    if result[0]:
        raise DeviceError(f"{message}: {_explained(load(), result[0])}")
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def _explained(driver: Any, status: Any) -> str:
    """Returns the driver's description and name of an error status, and a remedy if one is known."""
    failed, text = driver.cuGetErrorString(status)
    description = str(status) if failed or not text else text.decode(errors="replace")
    name = getattr(status, "name", str(status))
    remedy = _memory_remedy(driver) if name == "CUDA_ERROR_OUT_OF_MEMORY" else _REMEDIES.get(name, "")
    return f"{description} ({name})" + (f"; {remedy}" if remedy else "")


def _memory_remedy(driver: Any) -> str:
    """Returns a text with the free memory and the settings that reduce memory use."""
    failed, free, total = driver.cuMemGetInfo()
    available = "" if failed else f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free; "
    return f"{available}reduce staging_buffer_mb or staging_ring_mb, or the size of the engine's own pool"


class Context:
    """The primary context of one device, which the inference engine uses too; retained until the process ends."""

    def __init__(self, device: Any, label: str) -> None:
        """Retains the primary context of `device`, a `CUdevice`; error texts begin with `label`."""
        self._driver = load()
        self._calls = load_short_calls()
        self._label = label
        self._handle = checked(self._driver.cuDevicePrimaryCtxRetain(device), f"{label}: no context")

    def enter(self) -> None:
        """Makes the context current on the calling thread.

        Calls the driver every time (a fraction of a microsecond), because an engine may have changed the thread's
        current context.
        """
        checked(self._calls.cuCtxSetCurrent(self._handle), self._label)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Makes the context current within a `with` block, then restores the previous one; for engine threads."""
        checked(self._driver.cuCtxPushCurrent(self._handle), self._label)
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()
