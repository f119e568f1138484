"""Checks for free file descriptors: libzmq and the transfer engines abort the process if they cannot open one."""

from __future__ import annotations

import os
import resource


def shortage(wanted: int) -> str | None:
    """Returns an error text if `wanted` more descriptors cannot be opened; None if they can."""
    opened: list[int] = []
    try:
        for _ in range(wanted):
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{wanted} more file descriptors are needed and {len(opened)} are free; the limit is {limit} (ulimit -n)"
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None
