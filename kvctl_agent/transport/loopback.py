"""The `loopback` transport: connects agents of one host, in one process or in several, without an engine.

The kernel copies the bytes into the peer's memory (`process_vm_writev`, as UCX does between processes of one host);
tags are datagrams on a unix socket. It is for machines without an engine, and for tests, because it starts in a
millisecond.

The bytes are copied inside `write`, which checks first that the peer has not exited. A tag that does not
fit into the peer's socket is queued here and sent by `Write.poll`, `progress` or `arrivals`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import select
import socket
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError, TransportUnavailable
from kvctl_agent.memory.region import Region
from kvctl_agent.native import Turns
from kvctl_agent.transport.base import Addresses, Arrival, Sizes
from kvctl_agent.transport.checks import CheckedTransport, Ranges, check_tag
from kvctl_agent.transport.device_map import device_name

_LIBC = ctypes.CDLL(None, use_errno=True)
_IOV_MAX = 1024
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PATH_MAX_BYTES = 107
_DATAGRAM_MAX_BYTES = 65536
_ARRIVALS_MAX = 4096
_OUTBOX_MAX = 65536
_FLUSH_S = 0.5


class Peer:
    """One incarnation of a peer, with a queue of tags that its socket cannot take yet.

    Attributes:
        ident: Random name of the incarnation; each of its datagrams begins with it.
    """

    def __init__(self, key: str, metadata: bytes) -> None:
        self.key = key
        self.metadata = metadata
        self.sent = 0
        self._closed = False
        self._queued = 0
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()
        try:
            fields = json.loads(metadata)
            self.ident = str(fields["loopback"])
            self.pid = int(fields["pid"])
            self._path = Path(fields["socket"])
            self.ranges = Ranges("loopback", [Region(*map(int, region)) for region in fields["regions"]])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TransportError(f"loopback: the metadata of peer {key!r} is malformed: {error!r}") from error
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._socket.connect(str(self._path))
        except OSError as error:
            self.close()
            raise PeerDisconnected(f"loopback: peer {key!r} (process {self.pid}) is gone: {error}") from error

    def check_alive(self) -> None:
        """Raises PeerDisconnected if the peer's process or its transport has ended.

        Without this check a write could go to another process that has the same PID by now, or to freed memory.
        """
        # A transport that closes removes its socket; a process's descriptor becomes readable when it exits.
        if self._closed or not self._path.exists() or select.select([self._pidfd], [], [], 0)[0]:
            raise PeerDisconnected(f"loopback: peer {self.key!r} (process {self.pid}) is gone")

    def enqueue(self, datagram: bytes) -> int:
        """Sends or queues a tag, and returns its number; the tag has been sent when `sent` reaches that number."""
        with self._lock:
            if len(self._outbox) >= _OUTBOX_MAX:
                raise TransportError(f"loopback: peer {self.key!r} leaves {_OUTBOX_MAX} tags uncollected")
            self._queued += 1
            number = self._queued
            self._outbox.append(datagram)
        self.flush()
        return number

    def flush(self) -> bool:
        """Sends queued tags until the peer's socket is full, and returns whether the queue is empty.

        Raises:
            PeerDisconnected: the peer is gone.
        """
        with self._lock:
            while self._outbox:
                try:
                    self._socket.send(self._outbox[0])
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise PeerDisconnected(f"loopback: peer {self.key!r} is gone: {error}") from error
                self._outbox.popleft()
                self.sent += 1
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)


class LoopbackWrite:
    """A write whose bytes have been copied; only its tag may still be queued."""

    def __init__(self, peer: Peer, number: int, nbytes: int, descriptors: int) -> None:
        self.bytes = nbytes
        self.descriptors = descriptors
        self._peer = peer
        self._number = number

    def poll(self) -> bool:
        if self._peer.sent < self._number:
            self._peer.flush()
        return self._peer.sent >= self._number

    def release(self) -> bool:
        try:
            return self.poll()
        except PeerDisconnected:
            return True


class LoopbackTransport(CheckedTransport[Peer, LoopbackWrite]):
    """Transport of one loopback agent.

    `params` may have `directory`, the directory of the agent's socket; the default is a temporary directory of the
    user.

    Agents remove the sockets of killed processes from the directory when they start and when they close.
    """

    name = "loopback"

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        for key in params:
            if key != "directory":
                raise ConfigError(f"transport_params: loopback has no parameter {key!r}; allowed: directory")
        allow_siblings()
        super().__init__()
        self._keys: dict[str, str] = {}
        self._ident = secrets.token_hex(8)
        sender = agent_name.encode("utf-8", "surrogatepass")
        self._header = self._ident.encode() + len(sender).to_bytes(2, "little") + sender
        default = Path(tempfile.gettempdir()) / f"kvctl-loopback-{os.getuid()}"
        self._directory = _private_directory(Path(params.get("directory", default)))
        _remove_stale_sockets(self._directory)
        self._path = self._directory / self._ident
        if len(os.fsencode(self._path)) > _PATH_MAX_BYTES:
            raise ConfigError(
                f"loopback: the socket {self._path} is longer than {_PATH_MAX_BYTES} bytes: set a shorter directory in "
                f"transport_params, or TMPDIR"
            )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        device = max((region.device for region in regions), default=HOST)
        if device != HOST:
            raise TransportError(
                f"loopback: the kernel copies the host's memory, not that of {device_name(device)}; --transport nixl"
            )
        self._regions += regions
        self._ranges = Ranges("loopback", self._regions)

    def metadata(self) -> bytes:
        self._check_open()
        fields = {"loopback": self._ident, "pid": os.getpid(), "socket": str(self._path), "regions": self._regions}
        return json.dumps(fields).encode()

    def connect(self, peer: str, metadata: bytes) -> None:
        self._check_open()
        known = self._peers.get(peer)
        if known is not None and known.metadata == metadata:
            return
        fresh = Peer(peer, metadata)
        self.disconnect(peer)
        self._peers[peer] = fresh
        self._keys[fresh.ident] = peer

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._keys.pop(known.ident, None)
            known.close()

    def tell(self, peer: str, tag: bytes) -> None:
        known = self._peer(peer)
        known.check_alive()
        known.enqueue(self._header + check_tag(tag))

    def progress(self) -> None:
        self._check_open()
        for peer in list(self._peers.values()):
            # A peer that is gone is reported to the threads that write to it.
            with contextlib.suppress(PeerDisconnected):
                peer.flush()

    def arrivals(self) -> list[Arrival]:
        self.progress()
        landed: list[Arrival] = []
        while len(landed) < _ARRIVALS_MAX:
            try:
                datagram = self._socket.recv(_DATAGRAM_MAX_BYTES)
            except BlockingIOError:
                break
            ident = datagram[:16].decode("ascii", "replace")
            tag_at = 18 + int.from_bytes(datagram[16:18], "little")
            if len(datagram) > tag_at:
                sender = self._keys.get(ident) or datagram[18:tag_at].decode("utf-8", "replace")
                landed.append(Arrival(sender, datagram[tag_at:]))
        return landed

    def wait_for_tags(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "loopback (no engine: the kernel copies between processes of one host)",
            "backend": "linux",
            "lanes": ["process_vm_writev for bytes", "unix datagrams for tags"],
            "socket": str(self._path),
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _FLUSH_S
        for peer in self._peers.values():
            with contextlib.suppress(PeerDisconnected):
                while not peer.flush() and time.monotonic() < deadline:
                    time.sleep(0.0005)
        for key in list(self._peers):
            self.disconnect(key)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        _remove_stale_sockets(self._directory)

    def _post(
        self, peer: Peer, descriptors: int, local: Addresses, remote: Addresses, sizes: Sizes, tag: bytes | None
    ) -> LoopbackWrite:
        peer.check_alive()
        copy_into(peer.pid, f"peer {peer.key!r}", local, remote, sizes)
        number = peer.enqueue(self._header + tag) if tag is not None else 0
        return LoopbackWrite(peer, number, int(sizes.sum()), descriptors)


def _private_directory(directory: Path) -> Path:
    """Creates the directory if it is missing, and returns it.

    Raises:
        ConfigError: it is not a directory that only this user can access.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"loopback: {directory} must be a directory of this user with mode 0700, or anyone could send tags; "
            f"set another one in transport_params"
        )
    return directory


def _remove_stale_sockets(directory: Path) -> None:
    """Removes sockets that no process listens on, left in the directory by processes that were killed."""
    for path in directory.iterdir():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # not a socket of an agent, or already removed
                continue


def allow_siblings() -> None:
    """Lets processes that are not ancestors write to this one, and checks that the kernel allows such writes.

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
    # The Yama module restricts ptrace to ancestors, unless a process permits others. Without Yama the call fails, and
    # nothing is restricted.
    _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    scratch = np.zeros(1, np.uint64)
    here = np.array([scratch.ctypes.data], np.uint64)
    try:
        copy_into(os.getpid(), "this process", here, here, np.ones(1, np.uint64))
    except TransportError as error:
        raise TransportUnavailable(str(error)) from error


def copy_into(pid: int, peer: str, local: Addresses, remote: Addresses, sizes: Sizes) -> None:
    """Writes sizes[i] bytes from address local[i] of this process to address remote[i] of process `pid`.

    `peer` describes that process in error texts.

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
            # The kernel copies at most 2 GiB per call; the next call continues where it stopped.
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
