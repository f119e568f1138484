"""Command that installs kvctl with the optional packages of one purpose (the extras of pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

_NVIDIA_DRIVER = Path("/proc/driver/nvidia")


_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def install(extra: str) -> str:
    """Returns the command, which depends on whether kvctl runs from a checkout or was installed from wheels."""
    if _PROJECT.is_file():
        return f"`pip install '.[{extra}]'` in a checkout of kvctl"
    return f"`pip install 'kvctl[{extra}]'`"


def engine_extra(transport: str) -> str:
    """Returns the extra of a transport; Mooncake has a separate wheel for machines without CUDA."""
    if transport == "loopback":
        return "agent"
    return "mooncake-cpu" if transport == "mooncake" and not _NVIDIA_DRIVER.exists() else transport
