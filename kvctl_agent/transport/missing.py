"""Says how to get an engine that cannot be imported: the extra, or the Debian package of a missing library."""

from __future__ import annotations

import re

from kvctl_agent.errors import TransportUnavailable

_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libstdc++.so.6": "libstdc++6",
}
_LIBRARY = re.compile(r"\blib[\w+.-]*\.so[\w.]*")


def unavailable(engine: str, error: ImportError) -> TransportUnavailable:
    """The error to raise when importing `engine` failed with `error`."""
    library = _LIBRARY.search(str(error))
    if library is None:
        return TransportUnavailable(
            f"transport {engine!r} is not installed ({error}): pip install 'kvctl[{engine}]', "
            f"or run without an engine: --transport loopback"
        )
    package = _DEBIAN.get(library[0])
    remedy = f"apt-get install {package}" if package else "install the package that holds it"
    return TransportUnavailable(
        f"transport {engine!r} needs the shared library {library[0]}, which this machine lacks ({error}): "
        f"{remedy}, or run without an engine: --transport loopback"
    )
