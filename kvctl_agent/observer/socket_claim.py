"""Claims an agent's name in the socket directory, so that no two agents use the same admin socket.

The directory is made accessible to the agent's user only (0700) before a file is created in it. The agent that holds
the lock on `<name>.lock` owns the name; if the lock is free, the socket is pinged once: an agent that answers there
keeps it, and a black box gets another name. A lock on the directory serialises claims and releases.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import zmq

from kvctl_agent.contract.admin import (
    ENDED_SUFFIX,
    LOCK_SUFFIX,
    MAGIC,
    OBSERVER_SOCKET,
    RELAY_SOCKET,
    SOCKET_SUFFIX,
    socket_dir,
    socket_path,
)
from kvctl_agent.errors import AdminError
from kvctl_agent.host.sockets import directory_lock, prune
from kvctl_agent.telemetry.region import NEW_SUFFIX, SUFFIX

PING_TIMEOUT_MS = 1000
LOCK_TIMEOUT_S = 5.0
_OBSERVER_FILES = (OBSERVER_SOCKET, f"{OBSERVER_SOCKET}.log", RELAY_SOCKET)
_AGENT_FILES = (SOCKET_SUFFIX, LOCK_SUFFIX, SUFFIX, NEW_SUFFIX, ENDED_SUFFIX, *_OBSERVER_FILES)


def prepare_directory(directory: Path) -> None:
    """Creates `directory` if necessary and makes it accessible to the agent's user only.

    Raises:
        AdminError: `directory` is a link or not a directory, belongs to another user, or is accessible to others and
            contains files of other programs, which a change of its mode could break.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AdminError(
            f"cannot create the admin socket directory {directory}: {error.strerror}; "
            "set KVCTL_SOCKET_DIR to a directory of your own"
        ) from None
    with _opened(directory) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise AdminError(
                f"the admin socket directory {directory} belongs to uid {status.st_uid}, this agent runs as uid "
                f"{os.geteuid()}: set KVCTL_SOCKET_DIR to a directory of your own"
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077 == 0:
            return
        with os.scandir(descriptor) as entries:
            foreign = [entry.name for entry in entries if not entry.name.endswith(_AGENT_FILES)]
        if foreign:
            raise AdminError(
                f"the admin socket directory {directory} is open to others (mode {mode:04o}) and holds other things "
                f"({foreign[0]}), so it is not made private: set KVCTL_SOCKET_DIR to a directory of its own"
            )
        os.fchmod(descriptor, 0o700)
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            raise AdminError(
                f"the admin socket directory {directory} stays open to others after chmod 0700: "
                "set KVCTL_SOCKET_DIR to a directory on a file system that keeps modes"
            )


class Claim:
    """Exclusive claim of an agent's name: until `release`, no other agent binds `path`.

    Attributes:
        path: path at which the agent's socket is bound; a file there was left by an agent that was killed.
    """

    def __init__(self, name: str, directory: Path | None = None, endpoint: str = "") -> None:
        """Claims `name` in `directory` (None: `contract.admin.socket_dir()`).

        The lock file has the process id, and in a second line `endpoint`, by which other processes find the name.

        Raises:
            AdminError: a running agent has the name, the name cannot be a file name, or the directory is unsuitable.
        """
        directory = directory or socket_dir()
        try:
            self.path = socket_path(name, directory)
        except ValueError as error:
            raise AdminError(str(error)) from None
        self._lock_path = directory / f"{name}{LOCK_SUFFIX}"
        prepare_directory(directory)
        with _locked(directory):
            self._descriptor: int | None = self._lock(name, endpoint)
            try:
                self._refuse_if_served(name)
                with contextlib.suppress(OSError):  # not essential
                    prune(directory)
            except BaseException:
                self._unlock()
                raise
        _claims.add(self)

    def release(self) -> None:
        """Removes the socket and the lock file, and releases the name. Idempotent."""
        if self._descriptor is None:
            return
        _claims.discard(self)
        try:
            with _locked(self.path.parent):
                if os.path.samestat(self._lock_path.stat(), os.fstat(self._descriptor)):  # no later claim's
                    self.path.unlink(missing_ok=True)
                    self._lock_path.unlink(missing_ok=True)
                self._unlock()
        except (AdminError, OSError):
            # The directory or the lock file is gone, or it stays locked. The next claim replaces files without a lock.
            self._unlock()

    def _lock(self, name: str, endpoint: str) -> int:
        try:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise AdminError(f"cannot open the lock file {self._lock_path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").partition("\n")[0] or "unknown"
            os.close(descriptor)
            answer = "it does not answer: stopped or just starting" if ask_hello(self.path) is None else "it answers"
            raise AdminError(
                f"an agent named {name} runs already, pid {holder} ({answer}): "
                f"give this one another name, or stop that one ({self.path})"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n{endpoint}".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise AdminError(f"cannot write the lock file {self._lock_path}: {error.strerror}") from None
        return descriptor

    def _refuse_if_served(self, name: str) -> None:
        hello = ask_hello(self.path)
        if hello is None:
            return
        if hello.get("ended_age_ns") is not None:  # a black box
            self.path.rename(ended_path(self.path, _pid(hello)))
            return
        raise AdminError(
            f"an agent named {name} answers at {self.path}, pid {_pid(hello)}, though its lock file is gone: "
            "give this one another name, or stop that one"
        )

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # releases the lock
            self._descriptor = None


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _leave_locks_to_the_parent() -> None:
    # A forked child shares the lock and would keep the name claimed after the agent was killed.
    for claim in list(_claims):
        claim._unlock()
    _claims.clear()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def ended_path(socket_path: Path, pid: int) -> Path:
    """Returns the path of a black box's socket when another agent has its name."""
    return socket_path.with_name(f"{socket_path.name.removesuffix(SOCKET_SUFFIX)}{ENDED_SUFFIX}-{pid}{SOCKET_SUFFIX}")


def _pid(hello: Mapping[str, Any]) -> int:
    pid = hello.get("pid")
    return pid if isinstance(pid, int) else 0


def ask_hello(path: Path, timeout_ms: int = PING_TIMEOUT_MS) -> dict[str, Any] | None:
    """Returns the answer to `hello` at a socket: None without one, empty if it is unreadable.

    Waits, for at most `timeout_ms`, only if a process listens at `path`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            pass  # the backlog is full, so something listens
        except OSError:
            return None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(f"ipc://{path}")
        dealer.send_multipart([MAGIC, b"ping", orjson.dumps({"cmd": "hello"})])
        if not dealer.poll(timeout_ms):
            return None
        try:
            reply: Any = orjson.loads(dealer.recv_multipart()[-1])
            return dict(reply["data"])
        except (ValueError, KeyError, TypeError):
            return {}  # it answers, but with another protocol
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise AdminError(
            f"the admin socket directory {directory} cannot be used ({error.strerror}): "
            "it must be a directory of your own, not a link"
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the lock on `directory` within a `with` block; a claim or a release takes a few milliseconds.

    Raises:
        AdminError: the directory is unsuitable, or another process holds the lock for too long.
    """
    with _opened(directory) as descriptor, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory_lock(descriptor, LOCK_TIMEOUT_S))
        except TimeoutError:
            raise AdminError(
                f"another process has held the lock on {directory} for over {LOCK_TIMEOUT_S:g} s: "
                f"find it with `fuser {directory}`"
            ) from None
        yield
