"""Removes socket files that killed agents leave behind; checks that sockets can get the file descriptors they need.

A process has provably ended if no process holds its file lock, which an agent holds as long as it runs, and its socket
refuses connections. Files without a lock file, files of other users, and files that are not sockets are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvctl_agent.contract.admin import LOCK_SUFFIX, SOCKET_SUFFIX

_MOST = 4096


@contextlib.contextmanager
def directory_lock(directory: int, timeout_s: float) -> Iterator[None]:
    """Locks a socket directory against processes that add or remove agents.

    Args:
        directory: open file descriptor of the directory; closing it releases the lock.
        timeout_s: longest time to wait for the lock.

    Raises:
        TimeoutError: another process holds the lock for longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.01)
    yield


def prune(directory: Path) -> list[str]:
    """Removes the files of agents that have ended; returns their names. The caller holds `directory_lock`.

    Raises:
        OSError: the directory cannot be read or written.
    """
    names = sorted(path.name for path in directory.iterdir() if path.name.endswith(LOCK_SUFFIX))[:_MOST]
    return [name for name in (each.removesuffix(LOCK_SUFFIX) for each in names) if _removed(directory, name)]


def _removed(directory: Path, name: str) -> bool:
    lock, path = directory / f"{name}{LOCK_SUFFIX}", directory / f"{name}{SOCKET_SUFFIX}"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # removed meanwhile, or owned by another user
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and not (path.is_socket() and _refuses(path)):
            return False
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    except BlockingIOError:  # the agent runs
        return False
    finally:
        os.close(descriptor)
    return True


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        return client.connect_ex(os.fspath(path)) == errno.ECONNREFUSED


def shortage(wanted: int) -> str | None:
    """Returns an error text if `wanted` more descriptors cannot be opened; None if they can.

    Call it before creating sockets: libzmq and the transfer engines abort the process if they run out of descriptors.
    """
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
