"""What NIXL holds for us by handle: prepared lists per peer, and transfer requests from post until freed.

Freeing a request that is still in flight makes NIXL cancel it: the bytes may land all the same, and the tag is
silently lost. So a request is freed only once NIXL calls it done or failed. One whose owner gave it up is polled
on from `InFlight.drain_on`, since nothing but a status call sends the tag behind flushed bytes.
"""

from __future__ import annotations

import contextlib
import time

from kvctl_agent.errors import TransportError
from kvctl_agent.transport.abandoned_writes import AbandonedWrites
from kvctl_agent.transport.base import Indices, Sizes
from kvctl_agent.transport.device_map import DeviceMap
from kvctl_agent.transport.nixl.binding import Engine, translate

_DRAIN_S = 0.5
_NO_PTRACE = (
    " (a container without SYS_PTRACE denies the copy: set UCX_TLS=tcp,self, and cuda where there are GPUs, if the "
    "peer is alive)"
)


class Peer:
    """One incarnation of a peer.

    Attributes:
        key: our name for it.
        engine_name: NIXL's name for it.
        metadata: what it was made from.
        memory: where its memory is.
        reached: a write to it was posted without an error.
        prepared: lists of its descriptors.
    """

    def __init__(self, key: str, engine_name: str, metadata: bytes, memory: DeviceMap) -> None:
        self.key = key
        self.engine_name = engine_name
        self.metadata = metadata
        self.memory = memory
        self.reached = False
        self.prepared: list[NixlPrepared] = []


class NixlPrepared:
    """A descriptor list inside NIXL; `owner` is the incarnation it belongs to, None for our own memory."""

    def __init__(self, handle: int, sizes: Sizes, owner: Peer | None) -> None:
        self.handle: int | None = handle
        self.count = len(sizes)
        self.owner = owner
        self._sizes = sizes.copy()
        self._uniform_bytes = int(sizes[0]) if bool((sizes == sizes[0]).all()) else None

    def bytes_of(self, index: Indices) -> int:
        """Bytes of the descriptors at `index`."""
        if self._uniform_bytes is not None:
            return self._uniform_bytes * len(index)
        return int(self._sizes[index].sum())

    def release(self, engine: Engine) -> None:
        """Frees the list in the engine; idempotent."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            engine.agent.releasedDlistH(handle)


class NixlWrite:
    """A posted transfer request."""

    def __init__(self, in_flight: InFlight, peer: Peer, handle: int, nbytes: int, descriptors: int) -> None:
        self.bytes = nbytes
        self.descriptors = descriptors
        self.peer = peer
        self.handle: int | None = handle
        self.error: TransportError | None = None
        self._in_flight = in_flight

    def poll(self) -> bool:
        if not self._in_flight.advance(self):
            return False
        if self.error is not None:
            raise self.error
        return True

    def release(self) -> bool:
        return self._in_flight.drain(self)


class InFlight(AbandonedWrites[NixlWrite]):
    """The transfer requests of one agent that the engine still has."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._agent = engine.agent
        self._done = engine.binding.NIXL_SUCCESS
        self._open: set[NixlWrite] = set()

    def post(self, peer: Peer, handle: int, nbytes: int, descriptors: int) -> NixlWrite:
        """Posts a request; with host memory on one host, the copy happens in here with the GIL released.

        Raises:
            PeerDisconnected, TransportError: the request is freed.
        """
        write = NixlWrite(self, peer, handle, nbytes, descriptors)
        self._open.add(write)
        try:
            status = self._agent.postXferReq(handle)
        except self._engine.errors as error:
            self._free(write)
            # UCX does not fall back when the kernel denies it the copy between processes: it "disconnects".
            what = "cannot post a write" if peer.reached else f"cannot post the first write{_NO_PTRACE}"
            raise translate(self._engine, error, what, peer.key, peer.engine_name) from error
        peer.reached = True
        if status == self._done:
            self._free(write)
        return write

    def advance(self, write: NixlWrite) -> bool:
        """Drives a request on; True when the engine has nothing of it any more, why is then in its `error`."""
        if write.handle is None:
            return True
        self._engine.enter()
        try:
            if self._agent.getXferStatus(write.handle) != self._done:
                return False
        except self._engine.errors as error:
            write.error = translate(self._engine, error, "a write failed", write.peer.key, write.peer.engine_name)
        self._free(write)
        return True

    def close(self) -> None:
        """Waits a moment for what is in flight, then gives it up."""
        deadline = time.monotonic() + _DRAIN_S
        while [write for write in list(self._open) if not self.drain(write)] and time.monotonic() < deadline:
            time.sleep(0.0005)
        for write in list(self._open):
            write.error = TransportError(
                f"nixl: a write to peer {write.peer.key!r} was still in flight when the transport was closed"
            )
            self._free(write)
        self._draining.clear()

    def _free(self, write: NixlWrite) -> None:
        handle, write.handle = write.handle, None
        self._open.discard(write)
        # A request to a peer that just died may be called active once more; its memory is the engine's then.
        with contextlib.suppress(*self._engine.errors):
            self._agent.releaseXferReq(handle)
