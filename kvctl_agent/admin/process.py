"""The process that an agent lives in: its use of the host, and the stacks of its threads."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path

from kvctl_agent.contract.snapshots import ProcessUse, ThreadStack

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_use() -> ProcessUse:
    """As of now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = _entries("/proc/self/fd") - 1  # without the one that lists them
        threads = _entries("/proc/self/task")
        rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        used, threads = limit, threading.active_count()
        rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # its largest: the best that is known
    return {
        "fds": used,
        "fds_limit": None if limit == resource.RLIM_INFINITY else limit,
        "threads": threads,
        "rss_bytes": rss_bytes,
        "cpu_ns": time.process_time_ns(),
    }


def stacks() -> list[ThreadStack]:
    """One row per thread, innermost frame last, as in a traceback; threads that Python did not start included."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    rows: list[ThreadStack] = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        rows.append(
            {
                "name": thread.name if thread else f"foreign-{ident}",
                "ident": ident,
                "daemon": thread.daemon if thread else True,
                "frames": [
                    f"{entry.filename}:{entry.lineno} {entry.name}" + (f": {entry.line}" if entry.line else "")
                    for entry in traceback.extract_stack(frame)
                ],
            }
        )
    return sorted(rows, key=lambda row: row["name"])


def _entries(directory: str) -> int:
    return len(os.listdir(directory))  # noqa: PTH208 -- asked ten times a second by whoever watches
