"""What the process that an agent lives in takes of its host."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from kvctl_agent.contract.snapshots import ProcessUse

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_use() -> ProcessUse:
    """As of now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "fds": _entries("/proc/self/fd") - 1,  # without the one that lists them
        "fds_limit": None if limit == resource.RLIM_INFINITY else limit,
        "threads": _entries("/proc/self/task"),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
        "cpu_ns": time.process_time_ns(),
    }


def _entries(directory: str) -> int:
    return len(os.listdir(directory))  # noqa: PTH208 -- asked ten times a second by whoever watches
