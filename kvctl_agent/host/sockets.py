"""Sockets of trusted users: who could replace a path, whose socket was left by a killed agent, are descriptors free?

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
import struct
import time
from collections.abc import Iterator, Set
from pathlib import Path

from kvctl_agent.contract.admin import ENDED_SUFFIX, LOCK_SUFFIX, SOCKET_SUFFIX, region_directory

_MOST = 4096
_MOST_LINKS = 40  # as the kernel allows in a path
_ROOT = 0
_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UntrustedPathError(PermissionError):
    """Another user could replace a file, or listens on a Unix socket; the message names the path, uid and remedy."""


def connect_unix(connection: socket.socket, path: str | Path, trusted: Set[int] | None = None) -> None:
    """Connects a stream socket to a Unix socket on which a trusted user listens: this user or root.

    For root, a user to whom root has given a directory on the path, such as /run/user/1000, is trusted as well.

    Args:
        trusted: what `check_path` returns for the path or its directory, if they are known.

    Raises:
        UntrustedPathError: a process of another user listens, or another user could replace the socket.
        OSError: as for `connect`.
    """
    trusted = check_path(path) if trusted is None else trusted
    connection.connect(os.fspath(path))
    uid = peer_uid(connection)
    if uid not in trusted:
        raise UntrustedPathError(
            f"uid {uid} listens on {path}, not uid {os.geteuid()} or root: use a socket in a directory that only you "
            f"may write to (mkdir -m 700), or run both processes as one user"
        )


def peer_uid(connection: socket.socket) -> int:
    """Returns the uid of the process at the other end of a connected Unix stream socket, at the time it listened."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def check_path(path: str | Path, *, of_socket: bool = True) -> set[int]:
    """Checks that no other user could replace a file; returns the users who may own it and listen on it.

    These are this user and root. Every directory and symbolic link on the path must belong to them, as must the file
    unless it is a socket. A directory that others may write to must have the sticky bit: then they can create files in
    it, but not replace those of trusted users. Of a socket that applies to its own directory only: whoever replaces a
    directory above cannot listen as a trusted user, and volumes of Kubernetes (emptyDir) may be written to by all.

    Args:
        of_socket: whether the path is that of a socket or of its directory. Then root also trusts the owner of a
            directory that nobody but root can have put there.

    Raises:
        UntrustedPathError: another user could replace the file or a directory on the path, or write to the file.
        OSError: a part of the path is missing or may not be read.
    """
    at, links = Path("/"), 0
    top = at.stat()
    # In a user namespace without a mapping for root, the system's directories belong to the overflow uid, as / does.
    trusted, system = {_ROOT, os.geteuid()}, top.st_uid
    delegated = not _others_may_write(at, top, path) and of_socket and os.geteuid() == _ROOT
    unsafe: UntrustedPathError | None = None
    left = _components(Path(path).absolute())
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        here = at / name
        status = here.lstat()
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFSOCK:
            continue
        if delegated and kind == stat.S_IFDIR:
            trusted.add(status.st_uid)
        if status.st_uid not in trusted and status.st_uid != system:
            raise UntrustedPathError(
                f"{_on_path(here, path)} belongs to uid {status.st_uid}, not to uid {os.geteuid()} or root: use "
                "a directory of your own (mkdir -m 700)"
            )
        if kind == stat.S_IFLNK:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(here))
            target = here.readlink()
            at = Path("/") if target.is_absolute() else at
            left += _components(target)
            continue
        try:
            delegated = not _others_may_write(here, status, path) and delegated
            unsafe = None if kind == stat.S_IFDIR else unsafe
        except UntrustedPathError as error:
            if not of_socket:
                raise
            delegated, unsafe = False, error
        at = here
    if unsafe is not None:
        raise unsafe
    return trusted


def _components(path: Path) -> list[str]:
    """Returns the components of a path without its root, the last one first."""
    return [name for name in reversed(path.parts) if not name.startswith("/")]


def _others_may_write(here: Path, status: os.stat_result, path: str | Path) -> bool:
    """Returns whether others may create files in a directory.

    A group with the number of the owner is the owner's private group.

    Raises:
        UntrustedPathError: they may also replace files in it, or write to it if it is a file.
    """
    for_others = stat.S_IWOTH if status.st_gid in (status.st_uid, _ROOT) else _FOR_OTHERS
    if not status.st_mode & for_others:
        return False
    if not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        raise UntrustedPathError(
            f"{_on_path(here, path)} (uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}) lets other users "
            f"write to it: chmod go-w {here}"
        )
    return True


def _on_path(here: Path, path: str | Path) -> str:
    return str(here) if here == Path(path) else f"{here}, on the path of {path},"


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


def prune_black_boxes(directory: Path) -> list[str]:
    """Removes what observers keep of workers that have ended, which they notice within a second; returns the names.

    Args:
        directory: of the admin sockets.
    """
    names = []
    for path in sorted(region_directory(directory).glob(f"*{ENDED_SUFFIX}")):
        with contextlib.suppress(OSError):  # expired meanwhile, or of another user
            path.unlink()
            names.append(path.name.rsplit(".", 3)[0])  # NAME.PID.INCARNATION.ended
    return names


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
