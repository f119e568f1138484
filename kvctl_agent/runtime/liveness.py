"""Proof of death on one host: a process that is gone, or a zombie, writes nothing any more.

A process whose first thread alone has ended looks like a zombie. While it is killed that may last: another thread then
gives its GPUs back, whose kernels run until that is done.
"""

from __future__ import annotations

from pathlib import Path

_THREADS = 17  # where /proc/[pid]/stat has their number, from the state on


def host_identity() -> str:
    """Equal for processes that see each other's process ids: same boot, same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_dead(pid: int) -> bool:
    """Whether the process has ended; a zombie has, once all of its threads have."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    fields = status.rpartition(")")[2].split()
    return fields[0] in ("Z", "X") and int(fields[_THREADS]) <= 1
