"""Identity of this host, and whether another process on it has ended, so that it can no longer write to memory.

docs/reliability.md lists what proves an end, and what does not.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from kvctl_agent import gil

_THREADS = 17  # index of num_threads in /proc/[pid]/stat, counted from the state
_MAX_HOST_NAME = 256
_MAX_PID = (1 << 31) - 1
_UNKNOWN_HOST = secrets.token_hex(16)


def host_name(configured: str) -> str:
    """Returns the name of this host: the value of the setting `host`, or the system's host name if it is empty."""
    return (configured or socket.gethostname())[:_MAX_HOST_NAME]


def host_identity() -> str:
    """Returns a string that is equal for processes that see each other's process ids: same boot, same PID namespace.

    Without a readable /proc, only this process has it: it can neither prove ends nor share memory.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{_UNKNOWN_HOST}/{os.getpid()}"


def is_dead(pid: int) -> bool:
    """Returns whether a process of this PID namespace has ended: it does not exist, or is a zombie without threads.

    That it does not exist is told by `kill`, which no mount option of /proc, user or container hides from; a process
    that may not be signalled exists. A process whose main thread alone has ended looks like a zombie, too. In a process
    that is being killed another thread may still be releasing its GPUs, whose kernels run until that is done.

    Keeps the GIL: the control loop asks about every peer twice a second.
    """
    if not 0 < pid <= _MAX_PID:  # `kill` has other meanings for 0 and less
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    try:
        status = gil.read_start(f"/proc/{pid}/stat")
    except OSError:
        return False
    fields = status.rpartition(b")")[2].split()
    return fields[0] in (b"Z", b"X") and int(fields[_THREADS]) <= 1 and _proc_is_of_this_namespace()


def _proc_is_of_this_namespace() -> bool:
    """Returns whether /proc numbers processes as this process does; a container may have the host's /proc mounted."""
    try:
        status = gil.read_start("/proc/self/status")
    except OSError:
        return False
    # The pids of this process in the PID namespace of /proc and in those below it, up to its own.
    numbers = status.partition(b"\nNSpid:")[2].partition(b"\n")[0].split()
    return numbers == [str(os.getpid()).encode()]
