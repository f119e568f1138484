"""What the kernel tells of a worker's process: its state, its processor time, and how it has ended.

What cannot be known stays None: the process is in another PID namespace, or /proc hides it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path
from typing import NamedTuple

from kvctl_agent.contract.snapshots import ProcessState
from kvctl_agent.telemetry.region import START_FIELD, Header, namespace, stat_fields

_STATES: dict[bytes, ProcessState] = {
    b"R": "running",
    b"S": "sleeping",
    b"D": "uninterruptible",
    b"T": "stopped",
    b"t": "stopped",  # by a debugger
    b"I": "sleeping",
    b"Z": "zombie",
    b"X": "gone",
}
_OF_ALL_THREADS = (b"T", b"t", b"Z", b"X")
_UTIME, _STIME, _THREADS, _RSS, _EXIT_CODE = 11, 12, 17, 21, 49  # in `stat_fields`
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_INFO = struct.Struct("=QQ8I4I")  # struct pidfd_info of its first version, 64 bytes; unused fields follow the mask
_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, since Linux 6.13
_INFO_EXIT = 1 << 3  # since Linux 6.15


class ProcessFacts(NamedTuple):
    """Facts of one process, each None if it is unknown.

    Attributes:
        state: "running", "sleeping", "stopped", "uninterruptible", "zombie" or "gone": that of the whole process, or
            else of the thread that was asked for, or of the main thread.
        cpu_ns: processor time of all threads so far, in steps of 10 ms.
        threads: number of threads.
        rss_bytes: resident memory.
    """

    state: ProcessState | None = None
    cpu_ns: int | None = None
    threads: int | None = None
    rss_bytes: int | None = None


def process_facts(header: Header, thread: int = 0) -> ProcessFacts:
    """Returns the facts of the process that writes, or wrote, a region.

    Args:
        thread: number of a task of the process whose state is of more interest than the main thread's; 0: none.
    """
    fields = stat_fields(header.pid) if header.pid > 0 else []
    if not header.started or len(fields) <= _RSS or int(fields[START_FIELD]) != header.started:
        return ProcessFacts("gone" if _is_gone(header, fields) else None)
    state = fields[0]
    if thread and state not in _OF_ALL_THREADS:
        state = (stat_fields(f"{header.pid}/task/{thread}") or fields)[0]
    cpu_ns = (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_NS
    return ProcessFacts(_STATES.get(state), cpu_ns, int(fields[_THREADS]), int(fields[_RSS]) * _PAGE_BYTES)


def _is_gone(header: Header, fields: list[bytes]) -> bool:
    """Returns whether no process, or a later one, has the id; `fields` are those of /proc, which may be another's."""
    if header.pid <= 0 or not header.pid_namespace or header.pid_namespace != namespace("pid"):
        return False
    try:
        os.kill(header.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user: not the writer
        return bool(header.started)
    return bool(header.started and fields) and _proc_is_of_this_namespace()


def _proc_is_of_this_namespace() -> bool:
    """Returns whether /proc numbers processes as this process does; a container may have the host's /proc mounted."""
    return str(Path("/proc/self").readlink()) == str(os.getpid())


def open_process(header: Header) -> int | None:
    """Returns a descriptor of the process that writes a region, which becomes readable when the process has ended.

    None if there is no such process, or if it cannot be told.
    """
    if process_facts(header).state in (None, "gone"):
        return None
    try:
        descriptor = os.pidfd_open(header.pid)
    except OSError:
        return None
    if process_facts(header).state in (None, "gone"):  # ended meanwhile: the descriptor may be of its successor
        os.close(descriptor)
        return None
    return descriptor


def end_status(descriptor: int, header: Header) -> int | None:
    """Returns the exit status of a process that has ended, as of wait(2); None if it is unknown.

    Args:
        descriptor: as returned by `open_process`.
    """
    fields = stat_fields(header.pid)
    if len(fields) > _EXIT_CODE and fields[0] == b"Z" and int(fields[START_FIELD]) == header.started:
        return int(fields[_EXIT_CODE])  # its parent has not asked for it yet
    info = bytearray(_INFO.size)
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(info)
    return int(code) if mask & _INFO_EXIT else None


def why_ended(status: int) -> str:
    """Describes an exit status: "killed by SIGKILL", "exited with 1"."""
    number = status & 0x7F
    if not number:
        return f"exited with {status >> 8 & 0xFF}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
