"""File descriptors that are still free: libzmq and the engines abort the process where one is missing."""

from __future__ import annotations

import os
import resource


def shortage(wanted: int) -> str | None:
    """Why `wanted` more descriptors cannot be opened, with the limit; None where they can."""
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
