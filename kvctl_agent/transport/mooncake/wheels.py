"""Which of Mooncake's wheels is installed, and what to type when it is the wrong one, broken, too old or missing.

Three wheels own one folder: the last one installed wins, and removing one removes it for all. Two of them load CUDA
while they are imported. And `import mooncake` succeeds where `mooncake.engine` does not, for want of a library.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from types import ModuleType

from kvctl_agent.errors import ConfigError, TransportUnavailable
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.missing_engine import unavailable

CPU_WHEEL = "mooncake-transfer-engine-non-cuda"
CUDA_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
MINIMUM = (0, 3, 13)
"""The first version that all this was tried with. Its writes over TCP are done when the target has acknowledged their
bytes; earlier framing calls them done when they have left, and a tag could overtake them."""

LIBRARIES = ("libibverbs1", "libnuma1", "libcurl4")

_NEEDED = (
    "initialize",
    "get_rpc_port",
    "register_memory",
    "batch_register_memory",
    "batch_unregister_memory",
    "send_probe",
    "transfer_submit_write",
    "transfer_check_status",
)

_CUDA = re.compile(r"\blib(?:cuda|cudart|nvidia-ml|cufile)\.so[\w.]*")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def import_engine() -> tuple[ModuleType, str]:
    """Imports Mooncake's engine (25 ms).

    Returns:
        Its module, and the wheel with its version.

    Raises:
        TransportUnavailable: there is no wheel, an old one, one of CUDA's without CUDA, or a library is missing.
        ConfigError: a variable is set that ends the process or loses bytes.
    """
    wheels = installed()
    if not wheels:
        raise unavailable("mooncake", ModuleNotFoundError("none of its three wheels is installed"))
    _check_versions(wheels)
    if "MC_LOG_DIR" in os.environ:
        raise ConfigError("mooncake: MC_LOG_DIR ends the process while the engine is imported; unset it")
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise ConfigError(
            "mooncake: with MC_TCP_PROTO=1 nobody acknowledges bytes, so tags would overtake them: unset it"
        )
    prepare_environment()
    try:
        import mooncake.engine
    except ImportError as error:
        raise explain(error, wheels) from error
    lacking = [name for name in ("TransferEngine", "TransferOpcode") if not hasattr(mooncake.engine, name)]
    lacking += [name for name in _NEEDED if not hasattr(mooncake.engine.TransferEngine, name)]
    if lacking:
        raise TransportUnavailable(
            f"the binding of {_named(wheels)} lacks {', '.join(lacking)}; kvctl is known to work with "
            f"mooncake {_dotted(MINIMUM)}"
        )
    return mooncake.engine, _named(wheels)


def installed() -> dict[str, str]:
    """Version by wheel, for those of the three that are recorded as installed."""
    found = {}
    for wheel in (CPU_WHEEL, *CUDA_WHEELS):
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def explain(error: ImportError, wheels: dict[str, str]) -> TransportUnavailable:
    """The error to raise when `mooncake.engine` could not be imported although `wheels` are installed."""
    library = _CUDA.search(str(error))
    if library is not None:
        present = [wheel for wheel in CUDA_WHEELS if wheel in wheels] or list(wheels)
        return TransportUnavailable(
            f"transport 'mooncake': {_named(wheels)} needs {library[0]}, which this machine lacks ({error}). Without "
            f"CUDA install the wheel that does without it: pip uninstall -y {' '.join([*present, CPU_WHEEL])} && "
            f"pip install '{CPU_WHEEL}>={_dotted(MINIMUM)}'; or run without an engine: --transport loopback"
        )
    if isinstance(error, ModuleNotFoundError):
        wheel = CPU_WHEEL if CPU_WHEEL in wheels and not _NVIDIA_DRIVER.exists() else next(iter(wheels))
        return TransportUnavailable(
            f"transport 'mooncake': {_named(wheels)} is recorded as installed, but its files are gone ({error}): "
            f"Mooncake's wheels share one folder, and removing one removes it for all. "
            f"pip install --force-reinstall --no-deps '{wheel}>={_dotted(MINIMUM)}'"
        )
    return unavailable("mooncake", error, others=LIBRARIES)


def _check_versions(wheels: dict[str, str]) -> None:
    old = {wheel: version for wheel, version in wheels.items() if _release(version) < MINIMUM}
    if old:
        wheel = next(iter(old))
        raise TransportUnavailable(
            f"transport 'mooncake' needs version {_dotted(MINIMUM)} or newer, but {_named(old)} is installed: "
            f"pip install --upgrade '{wheel}>={_dotted(MINIMUM)}'"
        )


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers: (0, 3, 13) of "0.3.13.post1"."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _named(wheels: dict[str, str]) -> str:
    return " and ".join(f"{wheel} {version}" for wheel, version in wheels.items())
