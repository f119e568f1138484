"""What of this machine explains how agents on it fare; for a bundle, whose reader has no other way to ask."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from kvctl.client.fleet_snapshot import utf8

_PACKAGES = ("nixl", "mooncake-transfer-engine", "torch", "numpy", "pyzmq", "orjson", "msgspec", "triton")
_ENVIRONMENT = ("KVCTL_", "UCX_", "NIXL_", "MC_", "SGLANG_DISAGG", "CUDA_VISIBLE", "NCCL_")
_LIMITS = {
    "memlock_bytes": resource.RLIMIT_MEMLOCK,
    "open_files": resource.RLIMIT_NOFILE,
    "core_bytes": resource.RLIMIT_CORE,
}


def facts() -> dict[str, Any]:
    """JSON-ready; a fact that cannot be had is None."""
    system = platform.uname()
    return {
        "at_ns": time.time_ns(),
        "host": system.node,
        "system": f"{system.system} {system.release} {system.machine}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": _meminfo(),
        "shared_memory_free_bytes": _free("/dev/shm"),
        "limits": {name: _limit(which) for name, which in _LIMITS.items()},
        "infiniband": _names("/sys/class/infiniband"),
        "nvidia": _names("/proc/driver/nvidia/gpus"),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "environment": {
            name: utf8(value) for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)
        },
    }


def _meminfo() -> dict[str, int] | None:
    wanted = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    pairs = (line.split(":", 1) for line in lines)
    return {wanted[name]: int(rest.split()[0]) * 1024 for name, rest in pairs if name in wanted}


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _limit(which: int) -> list[int | None]:
    """Soft and hard; None is no limit."""
    return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]


def _names(directory: str) -> list[str]:
    try:
        return sorted(each.name for each in Path(directory).iterdir())
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
