"""The `nixl` transport: NIXL agents writing into each other's registered host memory, tags as notifications.

What NIXL asks of its user, and how it is met here:

- **A tag leaves while polling.** When a post returns "in progress", its notification is sent only inside a
  status call, once the bytes are flushed; and releasing the handle before that drops the tag silently. So a
  handle is freed only after NIXL calls it done or failed, and a write that its owner gave up is polled on from
  `arrivals()` and `close()`.
- **Names.** Adding a peer returns its name as bytes, notifications carry it as str; a new incarnation under an
  old name is refused until the old one is removed. So every agent gets an ASCII name that is never used again
  (the caller's name, quoted, plus a random part), and names of peers are kept on our side.
- **A dead peer** shows once as "remote disconnect"; after that NIXL has dropped the peer, and other writes to
  it end as "not found". Both become `PeerDisconnected`.
- **Metadata** is parsed by C++ that trusts its lengths: a checksum in front refuses what was damaged.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.transport import nixl_binding
from kvctl_agent.transport.base import Addresses, Arrival, Indices, Prepared, Region, Sizes, check_tag

_MAGIC = b"kvctl-nixl-1"
_DRAIN_S = 0.5


class _Peer:
    """One incarnation of a peer: the engine's name for it, what it was made from, what was prepared for it."""

    def __init__(self, key: str, engine_name: str, metadata: bytes) -> None:
        self.key = key
        self.engine_name = engine_name
        self.metadata = metadata
        self.prepared: list[NixlPrepared] = []


class NixlPrepared:
    """A descriptor list inside NIXL; `owner` is the incarnation it belongs to, None for our own memory."""

    def __init__(self, handle: int, sizes: Sizes, owner: _Peer | None) -> None:
        self.handle: int | None = handle
        self.count = len(sizes)
        self.owner = owner
        self._sizes = sizes
        self._uniform_bytes = int(sizes[0]) if bool((sizes == sizes[0]).all()) else None

    def bytes_of(self, index: Indices) -> int:
        """Bytes of the descriptors at `index`."""
        if self._uniform_bytes is not None:
            return self._uniform_bytes * len(index)
        return int(self._sizes[index].sum())


class NixlWrite:
    """A transfer request of NIXL, from post until its handle is freed."""

    def __init__(self, transport: NixlTransport, peer: _Peer, handle: int, nbytes: int, descriptors: int) -> None:
        self.bytes = nbytes
        self.descriptors = descriptors
        self._transport = transport
        self._peer = peer
        self._handle: int | None = handle
        self._error: TransportError | None = None

    def poll(self) -> bool:
        if not self._advance():
            return False
        if self._error is not None:
            raise self._error
        return True

    def release(self) -> bool:
        return self._transport._drain(self)

    def _post(self) -> None:
        transport = self._transport
        transport._open.add(self)
        try:
            status = transport._agent.postXferReq(self._handle)
        except RuntimeError as error:
            self._free()
            raise transport._error(error, "cannot post a write", self._peer) from error
        if status == transport._done:
            self._free()

    def _advance(self) -> bool:
        """True when nothing of this write is left in the engine; its failure is then in `_error`."""
        if self._handle is None:
            return True
        transport = self._transport
        try:
            if transport._agent.getXferStatus(self._handle) != transport._done:
                return False
        except RuntimeError as error:
            self._error = transport._error(error, "a write failed", self._peer)
        self._free()
        return True

    def _free(self) -> None:
        handle, self._handle = self._handle, None
        self._transport._open.discard(self)
        self._transport._agent.releaseXferReq(handle)


class NixlTransport:
    """One NIXL agent. `params`: `backend` (default UCX); all others go to that backend."""

    name = "nixl"

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        own = dict(params)
        self._backend = own.pop("backend", "UCX")
        self._own_name = f"{quote(agent_name, safe='', errors='surrogatepass')}#{secrets.token_hex(8)}"
        self._engine = nixl_binding.start(self._own_name, self._backend, own)
        self._agent = self._engine.agent
        self._done = self._engine.binding.NIXL_SUCCESS
        self._write_op = self._engine.binding.NIXL_WRITE
        self._host = self._engine.binding.DRAM_SEG
        self._closed = False
        self._peers: dict[str, _Peer] = {}
        self._keys: dict[str, str] = {}
        self._prepared: list[NixlPrepared] = []
        self._registered: list[Any] = []
        self._open: set[NixlWrite] = set()
        self._draining: list[NixlWrite] = []
        self._drain_lock = threading.Lock()
        self._peers_lock = threading.RLock()

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if not regions:
            return
        rows = _rows(
            np.array([region.addr for region in regions], np.uint64),
            np.array([region.nbytes for region in regions], np.uint64),
        )
        descriptors = self._engine.binding.nixlRegDList(self._host, rows)
        try:
            self._agent.registerMem(descriptors, [])
        except RuntimeError as error:
            raise TransportError(f"nixl: cannot register {len(regions)} regions: {error}") from error
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        self._check_open()
        body: bytes = self._agent.getLocalMD()
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    def connect(self, peer: str, metadata: bytes) -> None:
        self._check_open()
        body = _checked(peer, metadata)
        with self._peers_lock:
            known = self._peers.get(peer)
            if known is not None and known.metadata == metadata:
                return
            # Also for a peer that registered more memory: its lists were checked against the old metadata.
            self.disconnect(peer)
            try:
                engine_name = self._agent.loadRemoteMD(body).decode()
                if engine_name in self._keys:
                    raise TransportError(f"nixl: the metadata for peer {peer!r} is that of {self._keys[engine_name]!r}")
                self._keys[engine_name] = peer
                self._peers[peer] = _Peer(peer, engine_name, metadata)
                # Starts wiring up now, so that the first write does not pay for it; returns at once.
                self._agent.makeConnection(engine_name, [])
            except RuntimeError as error:
                self.disconnect(peer)
                raise nixl_binding.translate(self._engine, error, "cannot connect", peer) from error

    def disconnect(self, peer: str) -> None:
        with self._peers_lock:
            known = self._peers.pop(peer, None)
            if known is None:
                return
            self._keys.pop(known.engine_name, None)
            for prepared in known.prepared:
                self._release_prepared(prepared)
            # "Not found" comes back as a status, not as an exception: NIXL may have dropped a dead peer itself.
            self._agent.invalidateRemoteMD(known.engine_name)

    def prepare_local(self, addrs: Addresses, sizes: Sizes) -> NixlPrepared:
        self._check_open()
        prepared = NixlPrepared(self._prepare("", addrs, sizes, "our own memory"), sizes, None)
        self._prepared.append(prepared)
        return prepared

    def prepare_remote(self, peer: str, addrs: Addresses, sizes: Sizes) -> NixlPrepared:
        known = self._peer(peer)
        prepared = NixlPrepared(self._prepare(known.engine_name, addrs, sizes, f"peer {peer!r}"), sizes, known)
        known.prepared.append(prepared)
        return prepared

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | None
    ) -> NixlWrite:
        known = self._peer(peer)
        try:
            handle = self._agent.createXferReq(
                self._write_op,
                self._descriptors(local_addrs, sizes),
                self._descriptors(remote_addrs, sizes),
                known.engine_name,
                check_tag(tag) if tag is not None else b"",
                [],
            )
        except RuntimeError as error:
            raise self._error(error, f"cannot prepare a write of {len(sizes)} descriptors", known) from error
        return self._posted(NixlWrite(self, known, handle, int(sizes.sum()), len(sizes)))

    def write_prepared(
        self,
        peer: str,
        local: Prepared,
        local_index: Indices,
        remote: Prepared,
        remote_index: Indices,
        tag: bytes | None,
    ) -> NixlWrite:
        known = self._peer(peer)
        if not isinstance(local, NixlPrepared) or local.owner is not None or local.handle is None:
            raise TransportError("nixl: the local list is not one of our own memory, or was released")
        if not isinstance(remote, NixlPrepared) or remote.owner is not known or remote.handle is None:
            raise TransportError(f"nixl: the remote list does not belong to peer {peer!r} as it is connected now")
        try:
            # NIXL merges neighbours here, and only here (`createXferReq` does not): 30,000 contiguous rows of
            # 512 bytes are one copy of 1 ms instead of 30,000 of 2.4 µs each.
            handle = self._agent.makeXferReq(
                self._write_op,
                local.handle,
                np.ascontiguousarray(local_index, np.int32),
                remote.handle,
                np.ascontiguousarray(remote_index, np.int32),
                check_tag(tag) if tag is not None else b"",
                [],
            )
        except RuntimeError as error:
            raise self._error(error, f"cannot prepare a write of {len(local_index)} descriptors", known) from error
        return self._posted(NixlWrite(self, known, handle, local.bytes_of(local_index), len(local_index)))

    def tell(self, peer: str, tag: bytes) -> None:
        known = self._peer(peer)
        try:
            self._agent.genNotif(known.engine_name, check_tag(tag), [])
        except RuntimeError as error:
            raise self._error(error, "cannot send a tag", known) from error

    def arrivals(self) -> list[Arrival]:
        self._check_open()
        if self._draining:
            self._drain_on()
        notified: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        if not notified:
            return []
        return [
            Arrival(self._keys.get(sender) or _agent_name(sender), tag)
            for sender, tags in notified.items()
            for tag in tags
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "engine": f"nixl {self._engine.version}",
            "backend": self._backend,
            "lanes": [os.environ.get("UCX_TLS", "all that UCX finds")],
            "progress_delay_us": nixl_binding.PROGRESS_DELAY_US,
            "environment": {
                key: value for key, value in sorted(os.environ.items()) if key.startswith(("UCX_", "NIXL_"))
            },
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _DRAIN_S
        while self._open and time.monotonic() < deadline:
            for write in list(self._open):
                self._drain(write)
            time.sleep(0.0005)
        for write in list(self._open):
            # The peer does not answer. NIXL then cancels what it can; the tag is lost, the bytes may have landed.
            write._free()
        for peer in list(self._peers):
            self.disconnect(peer)
        for prepared in self._prepared:
            self._release_prepared(prepared)
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, [])
        # The agent's destructor joins its progress thread; both references must go.
        del self._agent
        self._engine = self._engine._replace(agent=None)

    def _posted(self, write: NixlWrite) -> NixlWrite:
        write._post()
        return write

    def _prepare(self, owner: str, addrs: Addresses, sizes: Sizes, whose: str) -> int:
        try:
            handle: int = self._agent.prepXferDlist(
                owner or self._engine.binding.NIXL_INIT_AGENT, self._descriptors(addrs, sizes), []
            )
        except RuntimeError as error:
            raise TransportError(
                f"nixl: cannot prepare {len(addrs)} descriptors of {whose}: {error} (is the memory registered?)"
            ) from error
        return handle

    def _descriptors(self, addrs: Addresses, sizes: Sizes) -> Any:
        if len(addrs) == 0 or len(addrs) != len(sizes):
            raise TransportError(f"nixl: {len(addrs)} addresses with {len(sizes)} sizes; at least one of each")
        return self._engine.binding.nixlXferDList(self._host, _rows(addrs, sizes))

    def _release_prepared(self, prepared: NixlPrepared) -> None:
        if prepared.handle is not None:
            handle, prepared.handle = prepared.handle, None
            self._agent.releasedDlistH(handle)

    def _drain(self, write: NixlWrite) -> bool:
        with self._drain_lock:
            if write._advance():
                return True
            if write not in self._draining:
                self._draining.append(write)
            return False

    def _drain_on(self) -> None:
        with self._drain_lock:
            self._draining = [write for write in self._draining if not write._advance()]

    def _peer(self, peer: str) -> _Peer:
        self._check_open()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"nixl: peer {peer!r} is not connected")
        return known

    def _error(self, error: Exception, what: str, peer: _Peer) -> TransportError:
        binding = self._engine.binding
        if isinstance(error, binding.nixlNotFoundError):
            # Either a wrong address, or NIXL dropped the peer when another write found it dead.
            nothing = binding.nixlXferDList(self._host)
            if self._agent.checkRemoteMD(peer.engine_name, nothing) != self._done:
                return PeerDisconnected(f"nixl: {what}: peer {peer.key!r} is gone")
            return TransportError(f"nixl: {what} (peer {peer.key!r}): {error}: an address is not registered")
        return nixl_binding.translate(self._engine, error, what, peer.key)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("nixl: the transport is closed")


def _rows(addrs: Addresses, sizes: Sizes) -> npt.NDArray[np.uint64]:
    """(address, bytes, device 0) per descriptor: NIXL takes an N x 3 array four times faster than tuples."""
    rows = np.zeros((len(addrs), 3), np.uint64)
    rows[:, 0] = addrs
    rows[:, 1] = sizes
    return rows


def _checked(peer: str, metadata: bytes) -> bytes:
    header = len(_MAGIC) + 4
    body = metadata[header:]
    if metadata[: len(_MAGIC)] != _MAGIC or zlib.crc32(body).to_bytes(4, "little") != metadata[len(_MAGIC) : header]:
        raise TransportError(f"nixl: {len(metadata)} bytes of metadata for peer {peer!r} are not nixl's or damaged")
    return body


def _agent_name(engine_name: str) -> str:
    return unquote(engine_name.rpartition("#")[0] or engine_name, errors="surrogatepass")
