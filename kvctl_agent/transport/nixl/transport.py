"""The `nixl` transport: NIXL agents writing into each other's registered memory, tags as notifications.

Module `nixl.binding` deals with progress threads and locks, `nixl.requests` with polling and the lifetime of handles,
and this module with these properties of NIXL:

- Adding a peer returns its name as bytes, notifications carry it as str, and a new incarnation under an old name
  is rejected until the old one is removed. So every agent gets a unique ASCII name (the caller's name, quoted, and a
  random part), and local names of peers are not passed to NIXL.
- The C++ code that parses metadata does not check its lengths: a checksum in front detects damaged metadata.
- Every descriptor list, local or remote, has one kind of memory (the host's or a GPU's): metadata contains the device
  of each range of addresses.
- A dead peer is reported once as "remote disconnect"; NIXL then drops it, and other writes to it end as "not found".
  Both become `PeerDisconnected`.

The engine has no progress thread (see `nixl.binding`), so connections, tags and bytes make progress only inside calls.
Any call that posts, polls or collects makes progress for all peers of the agent; received tags are kept for the next
`arrivals`. Between two processes of one host:

- A first write waits until both sides have made a few calls: 25 to 40 ms if the target makes one every 5 ms.
- Later writes are copied by the writer's post. NIXL then flushes the lane, and on a socket that has carried a tag UCX
  requests an acknowledgement from the target: until the target makes a call, the write is not complete and its tag is
  not sent.
- Between GPUs the copy engines copy the bytes after the post has returned, and UCX detects the end inside calls.
- The tag is sent in the `Write.poll` (or `arrivals` and `progress`, for released writes) that finds the flush done. It
  is then in the socket; bytes that did not fit are sent in the next calls of the sender.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import HOST
from kvctl_agent.device.base import Device
from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.layout.page_indices import FEW
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.memory.region import Region
from kvctl_agent.native import Turns, nixl_requests
from kvctl_agent.transport.base import Addresses, Arrival, SharedTag, Sizes, Waited
from kvctl_agent.transport.checks import check_tag
from kvctl_agent.transport.device_map import DeviceMap, device_name
from kvctl_agent.transport.engine_errors import captured_stderr, explain_refusal
from kvctl_agent.transport.environment import require_cuda_transports
from kvctl_agent.transport.nixl import binding
from kvctl_agent.transport.nixl.native_requests import UNLIMITED_NS, Described, NativeWrite, open_library
from kvctl_agent.transport.nixl.requests import InFlight, NixlWrite, Peer
from kvctl_agent.transport.nixl.threads import (
    MAX_SHARED,
    SLICE_BYTES,
    SliceTags,
    slice_size,
    thread_count,
)

_MAGIC = b"kvctl-nixl-4"
_LINGER_S = 0.1
_LINGER_NS = 500_000  # of a pool's thread after the last post of a write
_HELD_BYTES = 256 << 10  # as in common.h: what takes less than 100 µs is not handed over to threads
_SHARE_OF_WAIT, _SHARE_OF_WAIT_ON_DEVICE = 8, 64  # pauses between looks for tags are this part of the wait so far
_SHOWN = ("UCX_", "FI_", "NIXL_", "CUDA_VISIBLE_DEVICES")
_CHOICES = {"UCX": "UCX_TLS", "LIBFABRIC": "FI_PROVIDER"}  # variables that choose the lanes of a backend
_LOCAL = "this agent's memory"

AnyWrite = NixlWrite | NativeWrite


class NixlTransport:
    """Transport of one NIXL agent.

    `params` may have `backend` (default UCX); all other entries are parameters of that backend. The threads of the copy
    pool post large writes if `num_threads` is not 0, no `device` is given, and native code can call this NIXL.
    """

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        params: Mapping[str, str],
        device: Device | None = None,
        copy_pool: CopyPool | None = None,
    ) -> None:
        backend_params = dict(params)
        self._backend = backend_params.pop("backend", "UCX")
        configured = thread_count(backend_params)
        threads = copy_pool.threads if configured and copy_pool is not None and device is None else 0
        self._slice_size = slice_size(backend_params)
        for ours in ("num_threads", "split_batch_size"):
            backend_params.pop(ours, None)
        own_name = f"{quote(agent_name, safe='', errors='surrogatepass')}#{secrets.token_hex(8)}"
        self._device = device
        if device is not None:
            require_cuda_transports()
        with self._visit():
            self._engine = binding.start(own_name, self._enter)
            self._native, self._why_binding = self._open_library()
            # Large writes are divided among the threads of the copy pool, which have no device. Threads that post
            # through the binding would wait for each other, because each of its calls takes the GIL.
            self._threads = threads if self._native is not None else 0
            if self._threads:
                # One more for those who post without these threads, and one for the tags of the control loop.
                backend_params.setdefault("num_workers", str(self._threads + 2))
            binding.add_backend(self._engine, self._backend, backend_params)
        self._agent = self._engine.agent
        self._in_flight = InFlight(self._engine)
        self._closed = False
        self._peers: dict[str, Peer] = {}
        self._leaving: list[Peer] = []  # disconnected, with requests in flight
        self._keys: dict[str, str] = {}
        self._registered: list[Any] = []
        self._regions: list[Region] = []
        self._memory = DeviceMap([])
        self._peers_lock = threading.RLock()
        self._landed: deque[Arrival] = deque()
        self._linger_until = 0.0
        self._slices = SliceTags()
        self._share_of_wait = _SHARE_OF_WAIT if device is None else _SHARE_OF_WAIT_ON_DEVICE
        self._copy_pool = copy_pool if self._threads else None
        # Who gathers posts, too; but threads that copy and shall not post would share the connection of the loop.
        copies_on_threads = copy_pool is not None and copy_pool.threads > 0
        self._defers = self._native is not None and device is None and copies_on_threads == bool(self._threads)

    def _open_library(self) -> tuple[nixl_requests.Library | None, str]:
        """Returns NIXL's functions for native code; without them, why the transport posts through the binding."""
        if self._backend != "UCX":
            return None, "only its UCX backend is called by native code"
        try:
            return open_library(self._engine), ""
        except TransportError as error:
            return None, str(error)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        for device in sorted({region.device for region in regions}):
            on_device = [region for region in regions if region.device == device]
            with self._visit():
                self._registered.append(self._register(device, on_device))
            self._regions += on_device
        self._memory = DeviceMap(self._regions)

    def metadata(self) -> bytes:
        self._check_open()
        body: bytes = self._memory.pack() + self._agent.getLocalMD()
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    def connect(self, peer: str, metadata: bytes) -> None:
        self._begin()
        memory, body = _checked(peer, metadata)
        with self._peers_lock:
            known = self._peers.get(peer)
            if known is not None and known.metadata == metadata:
                return
            self.disconnect(peer)
            self._remove_idle()
            for former in self._leaving:
                if former.metadata == metadata:  # it was silent, and is heard again
                    self._leaving.remove(former)
                    former.left = False
                    self._keys[former.engine_name] = peer
                    self._peers[peer] = former
                    return
                if former.engine_name.encode() in body:
                    raise TransportError(f"nixl: writes to the earlier memory of peer {peer!r} are still in flight")
            try:
                engine_name = self._agent.loadRemoteMD(body).decode()
                if engine_name in self._keys:
                    raise TransportError(f"nixl: peer {peer!r} has the metadata of {self._keys[engine_name]!r}")
                self._keys[engine_name] = peer
                self._peers[peer] = Peer(peer, engine_name, metadata, memory)
                # Starts connecting now, so that the first write does not wait for it; does not wait for the peer.
                self._agent.makeConnection(engine_name, [])
            except self._engine.errors as error:
                self.disconnect(peer)
                binding = self._engine.binding
                # A refused connection is a "backend" error.
                if isinstance(error, binding.nixlRemoteDisconnectError | binding.nixlBackendError):
                    raise PeerDisconnected(f"nixl: peer {peer!r} cannot be reached: {error}") from error
                raise TransportError(f"nixl: cannot connect peer {peer!r}: {error}") from error

    def disconnect(self, peer: str) -> None:
        with self._peers_lock:
            known = self._peers.pop(peer, None)
            if known is None:
                return
            self._keys.pop(known.engine_name, None)
            self._slices.forget(known.engine_name)
            known.left = True
            self._in_flight.stop(known)
            self._leaving.append(known)
            self._remove_idle()

    def ended(self, metadata: bytes) -> None:
        with self._peers_lock:
            for known in [*self._peers.values(), *self._leaving]:
                if known.metadata == metadata:
                    self._remove(known)

    def _remove_idle(self) -> None:
        """Removes the disconnected peers to which nothing is in flight any more."""
        for known in self._leaving[:]:
            if not self._in_flight.reach(known):
                self._leaving.remove(known)
                self._remove(known)

    def _remove(self, peer: Peer) -> None:
        """Lets NIXL forget a peer, which ends the requests in flight to it, and UCX close its connections to it."""
        self._enter()
        self._in_flight.stop(peer)
        # If NIXL has dropped a dead peer itself, this returns a status and raises nothing.
        self._agent.invalidateRemoteMD(peer.engine_name)

    def share_tag(self, tag: bytes, descriptors: int) -> SharedTag | None:
        # Without threads, writes are posted one after another, and tags of their own would be mere cost.
        if not self._threads or not 1 < descriptors <= MAX_SHARED:
            return None
        return self._slices.share(check_tag(tag), descriptors)

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | SharedTag | None
    ) -> AnyWrite:
        known = self._peer(peer)
        if self._native is None or not 0 < len(local_addrs) == len(remote_addrs) == len(sizes):
            return self._post_by_binding(known, local_addrs, remote_addrs, sizes, tag)
        nbytes = _total(sizes)
        edges = self._edges(len(sizes), nbytes if tag is not None else 0)
        described = self._described(known, local_addrs, remote_addrs, sizes)
        tags = self._tags(tag, len(sizes), edges)
        write = self._native_write(known, described, nbytes, edges, tags, UNLIMITED_NS)
        pool = self._copy_pool
        if pool is not None and self._is_for_threads(pool, edges, nbytes, tag) and pool.has_threads:
            write.run_on(pool)
        else:
            write.post()
        return write

    def _post_by_binding(
        self, peer: Peer, local: Addresses, remote: Addresses, sizes: Sizes, tag: bytes | SharedTag | None
    ) -> NixlWrite:
        """Posts a write as one request through NIXL's binding, or refuses descriptors that do not match."""
        here = self._descriptors(self._memory, local, sizes, _LOCAL)
        there = self._descriptors(peer.memory, remote, sizes, f"peer {peer.key!r}")
        (sent,) = self._tags(tag, len(sizes), [slice(0, None)])
        write = self._engine.binding.NIXL_WRITE
        try:
            handle = self._agent.createXferReq(write, here, there, peer.engine_name, sent, [])
        except self._engine.errors as error:
            raise self._error(error, f"cannot prepare a write of {len(sizes)} descriptors", peer) from error
        return self._in_flight.post(peer, handle, _total(sizes), len(sizes))

    def defers(self, peer: str) -> bool:
        return self._defers and self._memory.only == HOST == self._peer(peer).memory.only

    def defer_write(
        self,
        peer: str,
        local_addrs: Addresses,
        remote_addrs: Addresses,
        sizes: Sizes,
        tag: bytes | SharedTag | None,
        until_ns: int,
    ) -> NativeWrite:
        known = self._peer(peer)
        if not self.defers(peer) or not 0 < len(local_addrs) == len(remote_addrs) == len(sizes):
            raise TransportError(f"nixl: there are no deferred writes to peer {peer!r}")
        each = [slice(number, number + 1) for number in range(len(sizes))]
        described = self._described(known, local_addrs, remote_addrs, sizes)
        return self._native_write(known, described, _total(sizes), each, self._tags(tag, len(sizes), each), until_ns)

    def _edges(self, descriptors: int, nbytes: int) -> list[slice]:
        """Divides the descriptors of a write into slices, at most one a thread; a small write is one slice.

        `nbytes` is 0 for a write without a tag. A copy that failed shows only in a tag on the same endpoint, so writes
        of which the last alone has a tag must all be posted by one thread.
        """
        most = min(self._threads, descriptors)
        count = max(1, min(most, max(descriptors // self._slice_size, nbytes // SLICE_BYTES)))
        edges = [descriptors * number // count for number in range(count)]
        return [slice(first, end) for first, end in zip(edges, [*edges[1:], None], strict=True)]

    def _described(self, peer: Peer, local: Addresses, remote: Addresses, sizes: Sizes) -> Described:
        """Returns descriptors, of which there is one at least, with the devices of both sides."""
        devices = self._memory.of(local, _LOCAL), peer.memory.of(remote, f"peer {peer.key!r}")
        return Described(local, remote, sizes, devices)

    @staticmethod
    def _is_for_threads(pool: CopyPool, edges: list[slice], nbytes: int, tag: bytes | SharedTag | None) -> bool:
        """Returns whether the threads of the pool post a write: one that is divided, or a large one with a tag.

        Threads on few cores get large writes only if these share a tag: a hand-over takes the core of the control loop.
        """
        if not pool.considerate and tag is not None and nbytes > _HELD_BYTES:
            return True
        return len(edges) > 1 or (isinstance(tag, SharedTag) and nbytes >= SLICE_BYTES)

    def _native_write(
        self, peer: Peer, described: Described, nbytes: int, edges: list[slice], tags: list[bytes], until_ns: int
    ) -> NativeWrite:
        """Returns a write of one request for each slice of its descriptors, with the tags that are sent."""
        assert self._native is not None
        linger_ns, threads = (_LINGER_NS, self._threads) if self._copy_pool is not None else (0, 0)
        ends = [len(described.local) if cut.stop is None else cut.stop for cut in edges]
        requests = nixl_requests.WriteRequests(
            self._native, peer.engine_name, *described, ends, tags, until_ns, linger_ns, threads
        )
        return NativeWrite(self._in_flight, self._engine, peer, requests, nbytes, ends)

    def _tags(self, tag: bytes | SharedTag | None, descriptors: int, edges: list[slice]) -> list[bytes]:
        """Returns what is sent with each slice of a write."""
        if tag is None:
            return [b""] * len(edges)
        if isinstance(tag, SharedTag):
            return [self._slices.slice(tag, len(range(descriptors)[cut])) for cut in edges]
        if len(edges) == 1:
            return [self._slices.whole(check_tag(tag))]
        return [self._slices.slice(self._slices.share(check_tag(tag), len(edges)), 1)] * len(edges)

    def tell(self, peer: str, tag: bytes) -> None:
        known = self._peer(peer)
        if known.gone:  # seen by another UCX worker; the one that sends tags may not have noticed it yet
            raise PeerDisconnected(f"nixl: cannot send a tag: peer {peer!r} is gone")
        self._linger_until = time.monotonic() + _LINGER_S
        sent = self._slices.whole(check_tag(tag))
        try:
            if self._native is None:
                self._agent.genNotif(known.engine_name, sent, [])
            else:
                tell = self._native.tell if known.told else self._native.reach
                if (status := tell(known.engine_name, sent)) < 0:
                    raise binding.status_error(self._engine, status)
                known.told = True
        except self._engine.errors as error:
            raise self._error(error, "cannot send a tag", known) from error

    def progress(self) -> None:
        self._landed.extend(self._notified())

    def arrivals(self) -> list[Arrival]:
        fresh = self._notified()
        if not self._landed:
            return fresh
        landed: list[Arrival] = []
        with contextlib.suppress(IndexError):
            while True:
                landed.append(self._landed.popleft())
        return landed + fresh

    def wait_for_tags(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> Waited | None:
        if self._native is None or self._landed or self._leaving or self._in_flight.draining:
            return None
        self._begin()
        pause_ns = max(1, int(pause_s * 1e9))
        notified, ended_ns, status = self._native.wait(
            polled, int(timeout_s * 1e9), pause_ns, self._share_of_wait, turns.calls
        )
        if status:
            raise TransportError(f"nixl: cannot look for tags: status {status}")
        return Waited(ended_ns, self._tags_of(notified) if notified else [])

    def describe(self) -> dict[str, Any]:
        settings = {key: value for key, value in sorted(os.environ.items()) if key.startswith(_SHOWN)}
        return {
            "engine": f"nixl {self._engine.version}",
            "backend": self._backend,
            "threads": self._threads,
            "posts": "native" if self._native is not None else "binding",
            **({} if self._native is not None else {"why_binding": self._why_binding}),
            "lanes": [settings.get(_CHOICES.get(self._backend, ""), f"{self._backend} default")],
            "environment": settings,
        }

    def close(self) -> None:
        if not self._closed:
            with self._visit():
                self._close()

    def _close(self) -> None:
        # UCX holds tags back until the peer is connected, and NIXL does not report when they are sent.
        while time.monotonic() < self._linger_until:
            self.progress()
            time.sleep(0.0005)
        self._closed = True
        self._in_flight.close()
        for peer in list(self._peers):
            self.disconnect(peer)
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, [])
        # The agent's destructor ends the engine, so every reference to the agent must be dropped.
        self._native = None
        self._engine = self._engine._replace(agent=None)
        self._in_flight = InFlight(self._engine)
        del self._agent

    def _notified(self) -> list[Arrival]:
        """Lets NIXL and abandoned writes make progress, and returns the tags that NIXL has received."""
        self._begin()
        self._in_flight.drain_on()
        if self._leaving:
            with self._peers_lock:
                self._remove_idle()
        try:
            # The only call of the binding that always drives UCX; it also returns the tags.
            notified: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        except self._engine.errors as error:
            raise TransportError(f"nixl: cannot collect tags: {error}") from error
        return self._tags_of(notified)

    def _tags_of(self, notified: dict[str, list[bytes]]) -> list[Arrival]:
        return [
            Arrival(self._keys.get(sender) or _agent_name(sender), tag)
            for sender, received in notified.items()
            for each in received
            if (tag := self._slices.join(sender, each)) is not None
        ]

    def _register(self, device: int, regions: list[Region]) -> Any:
        addrs, sizes = (np.array(column, np.uint64) for column in list(zip(*regions, strict=True))[:2])
        descriptors = self._engine.binding.nixlRegDList(self._segment(device), _rows(addrs, sizes, device))
        try:
            self._agent.registerMem(descriptors, [])
        except self._engine.errors:
            # The cause is only on stderr. A failed call leaves nothing registered, so it is repeated with a capture.
            failure: Exception | None = None
            with captured_stderr(quiet=True) as output:
                try:
                    self._agent.registerMem(descriptors, [])
                except self._engine.errors as error:
                    failure = error
            if failure is not None:
                why = explain_refusal(output.decode("utf-8", "replace"), device)
                raise TransportError(
                    f"nixl: cannot register {len(regions)} regions of {device_name(device)}, {int(sizes.sum())} bytes "
                    f"({failure}){why}"
                ) from failure
        return descriptors

    def _descriptors(self, memory: DeviceMap, addrs: Addresses, sizes: Sizes, whose: str) -> Any:
        if len(addrs) == 0 or len(addrs) != len(sizes):
            raise TransportError(f"nixl: {len(addrs)} addresses, {len(sizes)} sizes; at least one of each")
        device = memory.of(addrs, whose)
        return self._engine.binding.nixlXferDList(self._segment(device), _rows(addrs, sizes, device))

    def _segment(self, device: int) -> Any:
        return self._engine.binding.DRAM_SEG if device == HOST else self._engine.binding.VRAM_SEG

    def _peer(self, peer: str) -> Peer:
        self._begin()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"nixl: peer {peer!r} is not connected")
        return known

    def _error(self, error: Exception, what: str, peer: Peer) -> TransportError:
        return binding.translate(self._engine, error, what, peer.key, peer.engine_name)

    def _begin(self) -> None:
        """Checks that the transport is open, and makes the device current on this thread.

        Methods that may run on a thread of SGLang or vLLM use `_visit` instead, which restores the previous device.
        """
        self._check_open()
        self._enter()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("nixl: the transport is closed")

    def _enter(self) -> None:
        if self._device is not None:
            self._device.enter()

    def _visit(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._device is None else self._device.visit()


def _total(sizes: Sizes) -> int:
    """Returns the sum of sizes; for few of them without numpy, for the reason in `layout.page_indices`."""
    if len(sizes) <= FEW:
        few: list[int] = sizes.tolist()
        return sum(few)
    return int(sizes.sum())


def _rows(addrs: Addresses, sizes: Sizes, device: int) -> npt.NDArray[np.uint64]:
    """Returns an array `[n, 3]` of (address, bytes, device), which NIXL reads four times faster than tuples."""
    rows = np.empty((len(addrs), 3), np.uint64)
    rows[:, 0] = addrs
    rows[:, 1] = sizes
    rows[:, 2] = 0 if device == HOST else device
    return rows


def _checked(peer: str, metadata: bytes) -> tuple[DeviceMap, bytes]:
    """Checks the metadata of a peer, and returns the devices of its memory and NIXL's part of the metadata.

    Raises:
        TransportError: the metadata is malformed, damaged or of another transport.
    """
    magic, checksum, body = metadata[: len(_MAGIC)], metadata[len(_MAGIC) :][:4], metadata[len(_MAGIC) + 4 :]
    if magic != _MAGIC or checksum != zlib.crc32(body).to_bytes(4, "little"):
        raise TransportError(f"nixl: {len(metadata)} bytes of metadata for peer {peer!r} are not nixl's or damaged")
    try:
        return DeviceMap.unpack(body)
    except ValueError as error:
        raise TransportError(f"nixl: the metadata of peer {peer!r} is malformed: {error}") from error


def _agent_name(engine_name: str) -> str:
    return unquote(engine_name.rpartition("#")[0] or engine_name, errors="surrogatepass")
