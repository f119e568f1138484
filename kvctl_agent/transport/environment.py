"""Sets environment variables that torch and the engines read once, while their libraries load.

A process therefore calls `prepare_environment` before it imports them (the lab's rank processes do, and so does the
plugin of an embedding worker). Every transport sets them again before it imports its
engine, which is early enough for the engine but too late for torch. Variables that are already set are not changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvctl_agent.errors import ConfigError

_INFINIBAND = Path("/sys/class/infiniband")


def prepare_environment() -> dict[str, str]:
    """Sets the variables that are not set yet. Imports no engine and may be called repeatedly.

    Returns:
        The variables that this call set, by name.
    """
    wanted = {
        # Copies between processes run at 15 GB/s on huge pages and at 6 GB/s without. numpy requests huge pages by
        # itself, torch's CPU allocator only with this variable.
        "THP_MEM_ALLOC_ENABLE": "1",
        # NIXL writes INFO lines to stdout, which is for data.
        "NIXL_LOG_LEVEL": "WARN",
        # UCX writes its warnings to stdout, too, for example when a peer has died.
        "UCX_LOG_FILE": "stderr",
        # Mooncake logs several lines for every connection.
        "MC_LOG_LEVEL": "ERROR",
        # By default a small write that a stopped peer does not acknowledge fails after 30 s, and still lands when the
        # peer continues, in memory that may have another owner by then. One day effectively turns this off; the agent
        # has deadlines of its own.
        "MC_TCP_STATUS_TIMEOUT_SEC": "86400",
    }
    if not has_infiniband():
        # UCX's ib module loads libnl, whose destructor crashes the process after Python has finished (exit code 139).
        # With RDMA hardware the module is needed, so only machines without it exclude the module.
        wanted["UCX_MODULES"] = "^ib"
    missing = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(missing)
    return missing


def prefer_family_of(address: str) -> None:
    """Makes UCX connect hosts by the family of `address`, at which peers reach this agent, unless it is configured.

    By default UCX uses IPv4 addresses wherever an interface has one, even if only IPv6 leads from host to host.
    """
    if ":" in address:
        os.environ.setdefault("UCX_TCP_AF_PRIO", "inet6,inet")


def has_infiniband() -> bool:
    """Returns whether this machine has an RDMA device."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def require_cuda_transports() -> None:
    """Checks that UCX_TLS lets UCX access GPU memory, because NIXL reports a violation only as an error code.

    Raises:
        ConfigError: UCX_TLS excludes all UCX transports that copy to and from a GPU.
    """
    lanes = os.environ.get("UCX_TLS", "all")
    if not lanes.startswith("^") and not {"all", "cuda", "cuda_copy"} & {
        lane.strip("\\ ") for lane in lanes.split(",")
    }:
        raise ConfigError(f"UCX_TLS={lanes} excludes GPU memory: unset it, or add cuda (cuda_copy and cuda_ipc)")
