"""Causes and remedies of failed memory registrations.

Engines return only an error code. The error of the kernel or driver is in a line on stderr, as the text of an errno.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from kvctl_agent.contract.choices import HOST

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class _Cause(NamedTuple):
    said: re.Pattern[str]
    of_devices: bool | None  # memory of a device only, of the host only, or either
    why: str


_CAUSES = (
    _Cause(
        re.compile(r"Cannot allocate memory|ENOMEM|max(imum)? locked memory|ulimit -l", re.IGNORECASE),
        None,
        "this process may lock too little memory (ENOMEM): raise `ulimit -l` to unlimited (LimitMEMLOCK=infinity in a "
        "unit, --ulimit memlock=-1 for a container)",
    ),
    _Cause(
        re.compile(r"detected as host", re.IGNORECASE),
        True,
        "this engine does not know GPU memory: unset UCX_TLS and UCX_MODULES, or let them have cuda_copy and cuda_ipc",
    ),
    _Cause(
        re.compile(r"no available backends|not supported", re.IGNORECASE),
        True,
        "this engine was built without CUDA: install a wheel with it (nixl-cu12, nixl-cu13, or "
        "mooncake-transfer-engine-cuda13)",
    ),
    _Cause(
        re.compile(r"Bad address|EFAULT", re.IGNORECASE),
        True,
        "the network card cannot reach GPU memory (EFAULT): `modprobe nvidia-peermem`, or take the open kernel modules "
        "of the driver, which share it as dma-buf",
    ),
    _Cause(
        re.compile(r"Invalid argument|EINVAL", re.IGNORECASE),
        True,
        "the driver cannot share this GPU memory with the network card (EINVAL): allocate it with cuMemAlloc "
        "(mem_pool=default)",
    ),
    _Cause(
        re.compile(r"No space left|ENOSPC|Resource temporarily unavailable|EAGAIN", re.IGNORECASE),
        None,
        "the network card has no room for more registrations: allocate the pool as one slab",
    ),
    _Cause(
        re.compile(r"Operation not permitted|EPERM|Permission denied|EACCES", re.IGNORECASE),
        None,
        "the kernel forbids it (EPERM): give the container the card's devices (--device /dev/infiniband) and IPC_LOCK",
    ),
)


def explain_refusal(said: str, device: int) -> str:
    """Return the cause and its remedy, with a leading colon to append to a sentence; "" if the cause is unknown.

    Args:
        said: The engine's output on stderr.
        device: The device of the memory, or HOST.
    """
    on_device = device != HOST
    for cause in _CAUSES:
        if cause.of_devices in (None, on_device) and cause.said.search(said):
            if cause.of_devices and _expandable():
                break
            return f": {cause.why}"
    if on_device and _expandable():
        return f": PyTorch's expandable segments cannot be shared: take expandable_segments:True out of {_expandable()}"
    return ""


def _expandable() -> str:
    """The environment variable that enables PyTorch's expandable segments, which cannot be shared; "" if none does."""
    for name in _ALLOCATOR:
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            return name
    return ""
