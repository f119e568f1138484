"""Facts about this machine for a bench: usable memory and cores, kinds of roofline, and software versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvctl.lab.ranks.messages import Gpu
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.request import FloorKind
from kvctl_agent.contract import VERSION

ROOFLINES: tuple[FloorKind, ...] = ("memcpy", "write", "device", "peer")
"""All kinds of roofline: measured upper limits of the transfer rate."""

# Pools and rings take a third of the free memory, at most 12 GiB; ranks and other programs need the rest.
_POOL_SHARE = 3
_MAX_POOL_BYTES = 12 << 30
_NVIDIA_SMI_S = 30.0
_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cuda_bindings": ("cuda-bindings",),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
}


def rooflines_of(plan: Plan) -> tuple[FloorKind, ...]:
    """Returns the kinds of roofline that apply to a plan: copies on the host, or copies on and between GPUs."""
    return ("memcpy", "write") if plan["device"] == "cpu" else ("write", "device", "peer")


def copy_roofline(plan: Plan, roofline: Mapping[FloorKind, float | None]) -> float | None:
    """Returns the measured rate of a copy from a prefill rank's GPU to a decode rank's GPU, in GB/s.

    If all ranks share one GPU and cannot map each other's memory, the rate of a copy within that GPU is used. None if
    the pools are in host memory or the rate was not measured.

    Args:
        roofline: GB/s of each kind in `ROOFLINES`.
    """
    if plan["device"] == "cpu":
        return None
    shared = len({rank["device"] for rank in plan["ranks"]}) == 1
    return roofline["peer"] or (roofline["device"] if shared else None)


def memory_budget_bytes() -> int:
    """Returns the number of bytes that all pools and rings of a bench may take together."""
    return min(_available_bytes() // _POOL_SHARE, _MAX_POOL_BYTES)


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def fingerprint(device: str, lanes: list[str], gpus: Mapping[int, Gpu]) -> dict[str, object]:
    """Returns hardware and software versions for the `env` of a saved result; a missing package has the version "".

    Args:
        device: Device to report if no GPU is used, such as `cpu`.
        lanes: How the transports move bytes, as the ranks describe it, such as the value of `UCX_TLS`.
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


def nvidia_gpus() -> dict[int, Gpu]:
    """Returns the GPUs that processes started here see, by the number that they have there; {} without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines()]
    gpus = {index: Gpu(name=name, driver=driver, cuda="") for index, name, driver in rows}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [*gpus] if visible is None else [each.strip() for each in visible.split(",") if each.strip()]
    return {number: gpus.get(name, Gpu(name=name, driver="", cuda="")) for number, name in enumerate(names)}


def _available_bytes() -> int:
    """Returns the available memory in bytes: the machine's, or the rest of the cgroup's limit if that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, max(0, int(limit) - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit
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
