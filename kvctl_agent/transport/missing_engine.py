"""Error for an engine that cannot be imported, with the pip extra or Debian package to install."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvctl_agent.errors import TransportUnavailable

_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libstdc++.so.6": "libstdc++6",
}
_LIBRARY = re.compile(r"\blib[\w+.-]*\.so[\w.]*")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def unavailable(engine: str, error: ImportError, others: Sequence[str] = ()) -> TransportUnavailable:
    """Return the error to raise when importing `engine` failed with `error`.

    Args:
        engine: Name of the transport.
        error: The import error, whose text has the name of a missing library.
        others: Debian packages that the engine also needs; the loader reports only one missing library at a time.
    """
    library = _LIBRARY.search(str(error))
    if library is None:
        return TransportUnavailable(
            f"transport {engine!r} is not installed ({error}): pip install 'kvctl[{_extra(engine)}]', "
            f"or run without an engine: --transport loopback"
        )
    package = _DEBIAN.get(library[0])
    packages = " ".join(dict.fromkeys([package, *others])) if package else ""
    remedy = f"apt-get install {packages}" if package else "install the package that holds it"
    return TransportUnavailable(
        f"transport {engine!r} needs the shared library {library[0]}, which this machine lacks ({error}): "
        f"{remedy}, or run without an engine: --transport loopback"
    )


def _extra(engine: str) -> str:
    """The pip extra of an engine; Mooncake has a separate wheel for machines without CUDA."""
    return "mooncake-cpu" if engine == "mooncake" and not _NVIDIA_DRIVER.exists() else engine
