"""Identity of this host, and whether another process on it has ended, so that it can no longer write to memory."""

from __future__ import annotations

import socket
from pathlib import Path

from kvctl_agent import gil

_THREADS = 17  # index of num_threads in /proc/[pid]/stat, counted from the state
_MAX_HOST_NAME = 256


def host_name(configured: str) -> str:
    """Returns the name of this host: the value of the setting `host`, or the system's host name if it is empty."""
    return (configured or socket.gethostname())[:_MAX_HOST_NAME]


def host_identity() -> str:
    """Returns a string that is equal for processes that see each other's process ids: same boot, same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_dead(pid: int) -> bool:
    """Returns whether a process has ended: it does not exist, or is a zombie without other threads.

    A process whose main thread alone has ended looks like a zombie, too. In a process that is being killed another
    thread may still be releasing its GPUs, whose kernels run until that is done.

    Keeps the GIL: the control loop asks about every peer twice a second.
    """
    try:
        status = gil.read_start(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    fields = status.rpartition(b")")[2].split()
    return fields[0] in (b"Z", b"X") and int(fields[_THREADS]) <= 1
