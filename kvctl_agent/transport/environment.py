"""Environment variables that must be set before torch or an engine is imported.

Engines and torch read these variables once, while their libraries load. So this runs first thing in a process
(the rig's rank processes, an embedding worker's plugin); every transport calls it again before it imports its
engine, which is enough for the engine but too late for torch. Nothing a user has set is overridden.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvctl_agent.errors import ConfigError

_INFINIBAND = Path("/sys/class/infiniband")


def prepare_environment() -> dict[str, str]:
    """Set the variables that are missing. Imports no engine and may be called repeatedly.

    Returns:
        The variables that this call set.
    """
    wanted = {
        # Copies between processes run at 15 GB/s on huge pages and at 6 without; numpy asks for them by itself,
        # torch's CPU allocator only with this.
        "THP_MEM_ALLOC_ENABLE": "1",
        # NIXL's INFO lines go to stdout, and stdout is data.
        "NIXL_LOG_LEVEL": "WARN",
        # UCX prints its warnings (a peer died) to stdout too.
        "UCX_LOG_FILE": "stderr",
        # Mooncake says several lines for every connection.
        "MC_LOG_LEVEL": "ERROR",
        # A small write that a stopped peer does not acknowledge fails after 30 s by default, and lands all the same
        # when the peer goes on: then in memory that may have another owner. A day is for ever; deadlines are ours.
        "MC_TCP_STATUS_TIMEOUT_SEC": "86400",
    }
    if not has_infiniband():
        # UCX's ib module loads libnl, whose destructor crashes the process after Python is done (exit code 139).
        # Where there is RDMA hardware the module must stay, so this is decided by the hardware. All other modules,
        # CUDA's among them, load as ever.
        wanted["UCX_MODULES"] = "^ib"
    missing = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(missing)
    return missing


def has_infiniband() -> bool:
    """Return whether this machine has an RDMA device."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def require_cuda_transports() -> None:
    """Check that UCX may access GPU memory; NIXL would report this only as an error code.

    Raises:
        ConfigError: UCX_TLS excludes all UCX transports that copy to and from a GPU.
    """
    lanes = os.environ.get("UCX_TLS", "all")
    if not lanes.startswith("^") and not {"all", "cuda", "cuda_copy"} & {
        lane.strip("\\ ") for lane in lanes.split(",")
    }:
        raise ConfigError(f"UCX_TLS={lanes} keeps UCX from GPU memory: unset it, or add cuda (cuda_copy and cuda_ipc)")
