"""What the bench must know of this machine: how much memory it may take, and a fingerprint for its results."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvctl.lab.ranks.messages import Gpu
from kvctl_agent.contract import VERSION

# Pools and rings get a third of what is free: the ranks' own memory, and whoever else is here, need some too.
_SHARE = 3
_MOST_BYTES = 12 << 30
_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda_bindings": ("cuda-bindings",),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
}


def memory_budget_bytes() -> int:
    """Memory that all pools and rings of a fleet may take together."""
    return min(_available_bytes() // _SHARE, _MOST_BYTES)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def fingerprint(device: str, lanes: list[str], gpus: Mapping[int, Gpu]) -> dict[str, object]:
    """The `env` of a saved result: versions are "" where the package is not installed.

    Args:
        gpus: those in use, by number; their names take the place of `device`.
    """
    any_gpu = next(iter(gpus.values()), Gpu(name="", driver="", cuda=""))
    return {
        "kvctl": VERSION,
        "python": platform.python_version(),
        **{name: _version(candidates) for name, candidates in _PACKAGES.items()},
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "device": ", ".join(f"{number}: {gpu['name']}" for number, gpu in gpus.items()) or device,
        "driver": any_gpu["driver"],
        "cuda": any_gpu["cuda"],
        "lanes": lanes,
    }


def _available_bytes() -> int:
    """Free memory, or what the control group leaves of it."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, max(0, int(limit) - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        pass  # no control groups here, or none that bounds us
    return free


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(candidates: tuple[str, ...]) -> str:
    for name in candidates:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
