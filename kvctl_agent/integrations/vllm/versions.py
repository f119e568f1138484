"""The installed version of vLLM, and whether the connector supports it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvctl_agent.contract.vllm import DISTRIBUTIONS, is_supported, supported_releases


def installed() -> str | None:
    """Returns the version of vLLM that is installed; None without one."""
    for name in DISTRIBUTIONS:
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
    if found is None or not is_supported(found):
        raise RuntimeError(
            f"kvctl's connector supports vLLM {supported_releases()}, not {found or 'an unknown version'}: install one "
            "of these, or use one of vLLM's own connectors"
        )
