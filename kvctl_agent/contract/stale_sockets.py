"""Removes what killed agents leave in a socket directory: socket and lock file of a process that has provably ended.

The proof is the kernel's: nobody holds the lock that an agent holds as long as it lives, and the socket refuses
connections. What has no lock file, belongs to another user, or is no socket is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvctl_agent.contract.admin import LOCK_SUFFIX, SOCKET_SUFFIX

_MOST = 4096


@contextlib.contextmanager
def turn(directory: int, timeout_s: float) -> Iterator[None]:
    """Alone among those who add or remove agents of a directory, given as a descriptor; ends when that is closed.

    Raises:
        TimeoutError: another process has its turn for longer than that.
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
    """Removes what agents that are gone have left; returns their names. The caller has its `turn`.

    Raises:
        OSError: the directory cannot be read or written.
    """
    names = sorted(path.name for path in directory.iterdir() if path.name.endswith(LOCK_SUFFIX))[:_MOST]
    return [name for name in (each.removesuffix(LOCK_SUFFIX) for each in names) if _removed(directory, name)]


def _removed(directory: Path, name: str) -> bool:
    lock, path = directory / f"{name}{LOCK_SUFFIX}", directory / f"{name}{SOCKET_SUFFIX}"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # gone, or not ours
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
    except BlockingIOError:  # it lives
        return False
    finally:
        os.close(descriptor)
    return True


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as knock:
        return knock.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
