"""Command that installs kvctl with the optional packages of one purpose (the extras of pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

_NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def install(extra: str) -> str:
    """Returns the command, which runs in a checkout of kvctl, because no package index has kvctl."""
    return f"`pip install '.[{extra}]'` in a checkout of kvctl"


def engine_extra(transport: str) -> str:
    """Returns the extra of a transport; Mooncake has a separate wheel for machines without CUDA."""
    if transport == "loopback":
        return "agent"
    return "mooncake-cpu" if transport == "mooncake" and not _NVIDIA_DRIVER.exists() else transport
