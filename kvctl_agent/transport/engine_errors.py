"""Explains why an engine cannot be imported or cannot register memory, and how to fix it.

Engines return only an error code. The error of the kernel or driver is in a line on stderr, as the text of an errno, so
stderr is captured during such a call.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.extras import engine_extra, install
from kvctl_agent.errors import TransportUnavailable

_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libstdc++.so.6": "libstdc++6",
}
_LIBRARY = re.compile(r"\blib[\w+.-]*\.so[\w.]*")


def unavailable(engine: str, error: ImportError, others: Sequence[str] = ()) -> TransportUnavailable:
    """Returns the error to raise when importing `engine` failed with `error`.

    Args:
        error: The import error, whose text has the name of a missing library.
        others: Debian packages that the engine also needs; the loader reports only one missing library at a time.
    """
    library = _LIBRARY.search(str(error))
    if library is None:
        return TransportUnavailable(
            f"transport {engine!r} is not installed ({error}): {install(engine_extra(engine))}, "
            f"or run without an engine: --transport loopback"
        )
    package = _DEBIAN.get(library[0])
    packages = " ".join(dict.fromkeys([package, *others])) if package else ""
    remedy = f"apt-get install {packages}" if package else "install the package that contains it"
    return TransportUnavailable(
        f"transport {engine!r} needs the shared library {library[0]}, which is not installed ({error}): "
        f"{remedy}, or run without an engine: --transport loopback"
    )


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


# Pattern of the output; whether the memory is on a device only (None: on either); cause and remedy.
_CAUSES: tuple[tuple[str, bool | None, str], ...] = (
    (
        r"Cannot allocate memory|ENOMEM|max(imum)? locked memory|ulimit -l",
        None,
        "this process may lock too little memory (ENOMEM): raise `ulimit -l` to unlimited (LimitMEMLOCK=infinity in a "
        "unit, --ulimit memlock=-1 for a container)",
    ),
    (
        r"detected as host",
        True,
        "this engine does not recognise GPU memory: unset UCX_TLS and UCX_MODULES, or add cuda_copy and cuda_ipc to "
        "them",
    ),
    (
        r"no available backends|not supported",
        True,
        "this engine was built without CUDA: install a wheel with it (nixl-cu12, nixl-cu13, or "
        "mooncake-transfer-engine-cuda13)",
    ),
    (
        r"Bad address|EFAULT",
        True,
        "the network card cannot access GPU memory (EFAULT): `modprobe nvidia-peermem`, or install the driver's open "
        "kernel modules, which share it as dma-buf",
    ),
    (
        r"Invalid argument|EINVAL",
        True,
        "the driver cannot share this GPU memory with the network card (EINVAL): allocate it with cuMemAlloc "
        "(mem_pool=default)",
    ),
    (
        r"No space left|ENOSPC|Resource temporarily unavailable|EAGAIN",
        None,
        "the network card has no room for more registrations: allocate the pool as one slab",
    ),
    (
        r"Operation not permitted|EPERM|Permission denied|EACCES",
        None,
        "the kernel forbids it (EPERM): give the container the card's devices (--device /dev/infiniband) and IPC_LOCK",
    ),
)


def explain_refusal(output: str, device: int) -> str:
    """Returns the cause of a failed registration and its remedy, as a clause beginning with a colon; "" if unknown."""
    on_device = device != HOST
    for pattern, device_only, cause in _CAUSES:
        if device_only in (None, on_device) and re.search(pattern, output, re.IGNORECASE):
            if device_only and _expandable():
                break
            return f": {cause}"
    if on_device and _expandable():
        return f": PyTorch's expandable segments cannot be shared: remove expandable_segments:True from {_expandable()}"
    return ""


def _expandable() -> str:
    """Returns the environment variable that enables PyTorch's expandable segments; "" if none does."""
    for name in _ALLOCATOR:
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            return name
    return ""


_capturing = threading.Lock()


@contextlib.contextmanager
def captured_stderr(drop: Sequence[bytes] = (), quiet: bool = False) -> Iterator[bytearray]:
    """Captures what this process writes to stderr within the block, and writes it to stderr at the end.

    The context value is filled with the captured bytes at the end of the block.

    Args:
        drop: Lines that contain one of these strings are dropped.
        quiet: Do not write to stderr at the end, because the same text was written before.
    """
    captured = bytearray()
    with _capturing, tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            for line in file:
                if not any(dropped in line for dropped in drop):
                    captured += line
            if not quiet:
                os.write(2, captured)
