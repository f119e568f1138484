"""Writes bytes into the memory of another process of the same host with `process_vm_writev`."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np

from kvctl_agent.errors import PeerDisconnected, TransportError, TransportUnavailable
from kvctl_agent.transport.base import Addresses, Sizes

_LIBC = ctypes.CDLL(None, use_errno=True)
_IOV_MAX = 1024
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def allow_siblings() -> None:
    """Let processes other than ancestors write to this one, and check that the kernel allows such writes.

    Raises:
        TransportUnavailable: `process_vm_writev` is missing or forbidden.
    """
    if not hasattr(_LIBC, "process_vm_writev"):
        raise TransportUnavailable("loopback needs process_vm_writev: Linux with glibc or musl")
    _LIBC.process_vm_writev.restype = ctypes.c_ssize_t
    _LIBC.process_vm_writev.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    # Where the Yama module restricts ptrace to ancestors, a process has to invite its siblings. The call fails
    # where there is no Yama, and then nothing is restricted.
    _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    scratch = np.zeros(1, np.uint64)
    here = np.array([scratch.ctypes.data], np.uint64)
    try:
        copy(os.getpid(), "ourselves", here, here, np.ones(1, np.uint64))
    except TransportError as error:
        raise TransportUnavailable(str(error)) from error


def copy(pid: int, peer: str, local: Addresses, remote: Addresses, sizes: Sizes) -> None:
    """Write sizes[i] bytes from address local[i] of this process to address remote[i] of process `pid`.

    Raises:
        PeerDisconnected: there is no such process.
        TransportError: the kernel forbids it, or memory is not mapped.
    """
    for start in range(0, len(sizes), _IOV_MAX):
        piece = slice(start, start + _IOV_MAX)
        source, target = (np.stack((addrs[piece], sizes[piece]), axis=1) for addrs in (local, remote))
        while len(source):
            written = _LIBC.process_vm_writev(pid, source.ctypes.data, len(source), target.ctypes.data, len(target), 0)
            if written <= 0:
                raise _failed(ctypes.get_errno() if written < 0 else errno.EFAULT, pid, peer)
            # The kernel moves at most 2 GiB a call: go on where it stopped.
            ends = np.cumsum(source[:, 1])
            full = int(np.searchsorted(ends, written, side="right"))
            rest = written - (int(ends[full - 1]) if full else 0)
            source, target = source[full:], target[full:]
            for rows in (source, target):
                rows[:1] += np.array([rest, -rest], np.int64).astype(np.uint64)


def _failed(code: int, pid: int, peer: str) -> TransportError:
    if code == errno.ESRCH:
        return PeerDisconnected(f"loopback: process {pid} of {peer} is gone")
    if code in (errno.EPERM, errno.ENOSYS):
        return TransportError(
            f"loopback: the kernel refuses process_vm_writev into process {pid} of {peer} ({os.strerror(code)}): both "
            f"must run as one user; in a container add --cap-add SYS_PTRACE, else set kernel.yama.ptrace_scope=0"
        )
    return TransportError(f"loopback: cannot write into process {pid} of {peer}: {os.strerror(code)}")
