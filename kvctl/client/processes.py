"""What has become of the process behind an admin socket, found in /proc: a stopped process must not be connected to.

Nobody accepts the connections that are made to it, so they would fill its backlog, and what looks like a process that
hangs would no longer tell that it is stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvctl_agent.contract.admin import lock_path

_STOPPED = ("T", "t")
_LONGEST_PID = 32


def stopped_pid(socket: Path) -> int | None:
    """The process that serves an admin socket, where it is stopped; None where it is not, or cannot be seen."""
    lock = lock_path(socket)
    try:
        with lock.open("rb") as file:
            pid = int(file.read(_LONGEST_PID))
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if not words or words[0] not in _STOPPED:
            return None
        status = lock.stat()
        # The number may be of another process, when the agent is in another PID namespace or has ended.
        return pid if any(os.path.samestat(status, each) for each in _open_files(pid)) else None
    except (OSError, ValueError):
        return None


def _open_files(pid: int) -> Iterator[os.stat_result]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield entry.stat()
        except OSError:  # it was closed meanwhile, or is no file
            continue
