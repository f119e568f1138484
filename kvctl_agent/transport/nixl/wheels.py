"""Selects and imports the NIXL wheel for the installed CUDA driver; there is one wheel per major version of CUDA.

NIXL's own package selects the wheel by the version of PyTorch. It may import torch for this, which costs 2 s and
200 MB, and may select a build for which the driver is too old. This module selects by the driver, or by PyTorch if that
is already imported, because then other code in the process will get NIXL's own choice and the process must not load two
NIXL engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

from kvctl_agent.errors import TransportUnavailable
from kvctl_agent.transport.missing_engine import unavailable

_WHEELS = {13: "nixl_cu13", 12: "nixl_cu12"}


def import_binding() -> tuple[Any, str]:
    """Import NIXL's compiled binding without importing torch.

    Returns:
        The binding and the version of its wheel.

    Raises:
        TransportUnavailable: no wheel is installed, none for this driver, or a library is missing.
    """
    loaded = _loaded()
    if loaded is not None:
        return loaded, _version(loaded.__name__.partition(".")[0])
    refused: ImportError = ModuleNotFoundError("none of its wheels is installed")
    # A binding that was built here, or for other hardware, has no wheel of that name: then NIXL's own package knows.
    for package in (*_by_preference(), "nixl"):
        try:
            binding = importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._bindings"):
                raise unavailable("nixl", error) from error
            continue
        except ImportError as error:
            refused = error
            break
        return binding, _version(package)
    too_new = _too_new()
    if too_new:
        raise TransportUnavailable(too_new) from refused
    raise unavailable("nixl", refused) from refused


def driver_cuda() -> int | None:
    """Major version of CUDA that the NVIDIA driver supports; None without a driver."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    return None


def _loaded() -> Any | None:
    """The binding that other code in this process has already imported."""
    for package in ("nixl", *_WHEELS.values()):
        binding = sys.modules.get(f"{package}._bindings")
        if binding is not None:
            return binding
    return None


def _by_preference() -> list[str]:
    torch_cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if torch_cuda:
        return [_WHEELS[major] for major in (int(torch_cuda.partition(".")[0]),) if major in _WHEELS]
    serves = driver_cuda()
    return [package for major, package in _WHEELS.items() if serves is None or major <= serves]


def _too_new() -> str:
    """Why the installed wheel does not fit this driver; "" if it does."""
    serves = driver_cuda()
    unusable = [package for package in _WHEELS.values() if package not in _by_preference() and _has(package)]
    if serves is None or not unusable:
        return ""
    return (
        f"transport 'nixl': {unusable[0].replace('_', '-')} is installed, but this process needs the build for CUDA "
        f"{min(serves, max(_WHEELS))}: pip install nixl-cu{min(serves, max(_WHEELS))}"
    )


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # its import was blocked
        return False


def _version(package: str) -> str:
    for name in (package.replace("_", "-"), "nixl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"
