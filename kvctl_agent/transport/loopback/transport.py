"""The `loopback` transport: agents on one host without any engine, in one process or in several.

The kernel writes the bytes straight into the peer's memory (`process_vm_writev`, which is what UCX uses on one
host too), tags are datagrams on a unix socket. It exists so that a machine without an engine can run the bench,
and tests can use a transport that starts in a millisecond. It is no test double: bytes move between processes.

What it adds to the promises of `base`: the copy happens inside `write`, and a peer that exited is noticed before
a byte is written. A tag that finds the peer's socket full waits here; `Write.poll`, `progress` and `arrivals`
send it on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import Addresses, Arrival, Indices, Prepared, Sizes, check_tag
from kvctl_agent.transport.descriptors import CheckedList, Ranges, pair
from kvctl_agent.transport.device_map import device_name
from kvctl_agent.transport.loopback.memory import allow_siblings, copy
from kvctl_agent.transport.loopback.peer import Peer, pack_metadata

_PATH_MAX_BYTES = 107
_DATAGRAM_MAX_BYTES = 65536
_ARRIVALS_MAX = 4096
_FLUSH_S = 0.5


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


class LoopbackTransport:
    """One agent. `params`: `directory` for its socket, private to the user (default: one per user).

    Agents sweep sockets of killed ones out of it, when they start and when they close.
    """

    name = "loopback"

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        for key in params:
            if key != "directory":
                raise ConfigError(f"transport_params: loopback has no parameter {key!r}; allowed: directory")
        allow_siblings()
        self._closed = False
        self._regions: list[Region] = []
        self._ranges = Ranges("loopback", [])
        self._peers: dict[str, Peer] = {}
        self._keys: dict[str, str] = {}
        self._ident = secrets.token_hex(8)
        sender = agent_name.encode("utf-8", "surrogatepass")
        self._header = self._ident.encode() + len(sender).to_bytes(2, "little") + sender
        default = Path(tempfile.gettempdir()) / f"kvctl-loopback-{os.getuid()}"
        self._directory = _private(Path(params.get("directory", default)))
        _sweep(self._directory)
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
        return pack_metadata(self._ident, self._path, self._regions)

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

    def prepare_local(self, addrs: Addresses, sizes: Sizes) -> CheckedList:
        self._check_open()
        self._ranges.check(addrs, sizes, "this agent")
        return CheckedList(addrs, sizes, None)

    def prepare_remote(self, peer: str, addrs: Addresses, sizes: Sizes) -> CheckedList:
        known = self._peer(peer)
        known.ranges.check(addrs, sizes, f"peer {peer!r}")
        return CheckedList(addrs, sizes, known)

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | None
    ) -> LoopbackWrite:
        known = self._peer(peer)
        self._ranges.check(local_addrs, sizes, "this agent")
        known.ranges.check(remote_addrs, sizes, f"peer {peer!r}")
        return self._post(known, local_addrs, remote_addrs, sizes, len(sizes), tag)

    def write_prepared(
        self,
        peer: str,
        local: Prepared,
        local_index: Indices,
        remote: Prepared,
        remote_index: Indices,
        tag: bytes | None,
    ) -> LoopbackWrite:
        known = self._peer(peer)
        here, there, sizes = pair("loopback", peer, known, local, local_index, remote, remote_index)
        return self._post(known, here, there, sizes, len(local_index), tag)

    def tell(self, peer: str, tag: bytes) -> None:
        known = self._peer(peer)
        known.check_alive()
        known.enqueue(self._header + check_tag(tag))

    def progress(self) -> None:
        self._check_open()
        for peer in list(self._peers.values()):
            # Whoever posts to a peer that is gone is told; those who only listen have nothing to learn here.
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
        _sweep(self._directory)

    def _post(
        self, peer: Peer, local: Addresses, remote: Addresses, sizes: Sizes, descriptors: int, tag: bytes | None
    ) -> LoopbackWrite:
        datagram = self._header + check_tag(tag) if tag is not None else None
        peer.check_alive()
        copy(peer.pid, f"peer {peer.key!r}", local, remote, sizes)
        number = peer.enqueue(datagram) if datagram is not None else 0
        return LoopbackWrite(peer, number, int(sizes.sum()), descriptors)

    def _peer(self, peer: str) -> Peer:
        self._check_open()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"loopback: peer {peer!r} is not connected")
        return known

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("loopback: the transport is closed")


def _private(directory: Path) -> Path:
    """Return the directory, created if missing; raise ConfigError unless only this user has access."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"loopback: {directory} must be a directory of this user with mode 0700, or anyone could send tags; "
            f"set another one in transport_params"
        )
    return directory


def _sweep(directory: Path) -> None:
    """Remove the sockets of processes that were killed and could not remove them."""
    for path in directory.iterdir():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # not a socket of ours, or gone meanwhile
                continue
