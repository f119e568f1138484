"""Owns NIXL's handles of transfer requests, from post until freed.

If a request in flight is freed, NIXL cancels it: its bytes may still land, but its tag is lost without an error. A
request is therefore freed only when NIXL reports it as done or failed. NIXL also reports it as failed once its peer's
metadata is removed, although UCX goes on sending it, from memory that may have another owner by then; so a peer with
requests in flight is not removed (`NixlTransport.disconnect`). Abandoned requests are polled by
`InFlight.drain_on`, because only a status call sends the tag after the bytes are flushed.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.transport.base import AbandonedWrites
from kvctl_agent.transport.device_map import DeviceMap
from kvctl_agent.transport.nixl.binding import Engine, translate

_DRAIN_S = 0.5
NO_PTRACE = (
    " (a container without SYS_PTRACE denies the copy: set UCX_TLS=tcp,self, and cuda where there are GPUs, if the "
    "peer is alive)"
)


class Peer:
    """One incarnation of a peer.

    Attributes:
        reached: Whether a write to the peer has been posted without an error.
        told: The same for a tag without a write.
        gone: Whether the engine has reported that the peer is gone.
        left: Whether the peer is disconnected, so that nothing more may be posted to it.
    """

    def __init__(self, key: str, engine_name: str, metadata: bytes, memory: DeviceMap) -> None:
        self.key = key
        self.engine_name = engine_name
        self.metadata = metadata
        self.memory = memory
        self.reached = self.told = False
        self.gone = False
        self.left = False


class OpenWrite(Protocol):
    """Interface of a write that NIXL has not finished.

    Attributes:
        error: The reason why it failed; None if it has not.
    """

    peer: Peer
    error: TransportError | None

    def advance(self) -> bool:
        """Polls the write and returns whether NIXL has finished it; a failure is stored in `error`."""
        ...

    def stop(self) -> None:
        """Lets nothing more of the write be posted."""
        ...

    def close(self) -> None:
        """Ends the write; NIXL may cancel what is in flight."""
        ...


class NixlWrite:
    """A transfer request that was posted through NIXL's binding, as a `Write`.

    Used where native code cannot call this version of NIXL (`nixl.native_requests`).
    """

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

    def advance(self) -> bool:
        return self._in_flight.advance(self)

    def stop(self) -> None:
        """Does nothing: all of the write is posted."""

    def close(self) -> None:
        self._in_flight.free(self)


class InFlight(AbandonedWrites[NixlWrite | OpenWrite]):
    """The writes of one agent that NIXL has not finished; posts and polls those of the binding, and drains all."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._agent = engine.agent
        self._done = engine.binding.NIXL_SUCCESS
        self._open: set[OpenWrite] = set()

    def add(self, write: OpenWrite) -> None:
        """Adds a write before any of it is posted.

        Raises:
            PeerDisconnected: the peer has been disconnected.
        """
        self._open.add(write)
        if write.peer.left:  # looked at after the write is open: whoever disconnects a peer looks in the other order
            self._open.discard(write)
            raise PeerDisconnected(f"nixl: peer {write.peer.key!r} was disconnected before a write was posted")

    def discard(self, write: OpenWrite) -> None:
        """Removes a write that has ended."""
        self._open.discard(write)

    def stop(self, peer: Peer) -> None:
        """Lets nothing more be posted to a peer that is being disconnected."""
        for write in self._open.copy():
            if write.peer is peer:
                write.stop()

    def reach(self, peer: Peer) -> bool:
        """Returns whether a request to this incarnation of a peer is in flight."""
        return any(write.peer is peer for write in self._open.copy())

    def post(self, peer: Peer, handle: int, nbytes: int, descriptors: int) -> NixlWrite:
        """Posts a request.

        Between host memories of one host, this call copies the bytes, with the GIL released.

        Raises:
            PeerDisconnected, TransportError: the post failed; the request is freed.
        """
        write = NixlWrite(self, peer, handle, nbytes, descriptors)
        try:
            self.add(write)
        except PeerDisconnected:
            self.free(write)
            raise
        try:
            status = self._agent.postXferReq(handle)
        except self._engine.errors as error:
            self.free(write)
            # If the kernel denies UCX the copy between processes, UCX reports a disconnect instead of falling back.
            what = "cannot post a write" if peer.reached else f"cannot post the first write{NO_PTRACE}"
            raise translate(self._engine, error, what, peer.key, peer.engine_name) from error
        peer.reached = True
        if status == self._done:
            self.free(write)
        return write

    def advance(self, write: NixlWrite | OpenWrite) -> bool:
        """Polls a write and returns whether NIXL has finished it; a failure is stored in its `error`."""
        if not isinstance(write, NixlWrite):
            return write.advance()
        if write.handle is None:
            return True
        self._engine.enter()
        try:
            if self._agent.getXferStatus(write.handle) != self._done:
                return False
        except self._engine.errors as error:
            write.error = translate(self._engine, error, "a write failed", write.peer.key, write.peer.engine_name)
        self.free(write)
        return True

    def close(self) -> None:
        """Waits up to half a second for the requests in flight, then frees the rest, whose `error` is set."""
        deadline = time.monotonic() + _DRAIN_S
        while [write for write in list(self._open) if not self.drain(write)] and time.monotonic() < deadline:
            time.sleep(0.0005)
        for write in list(self._open):
            write.error = TransportError(
                f"nixl: a write to peer {write.peer.key!r} was still in flight when the transport was closed"
            )
            write.close()
        self._draining.clear()

    def free(self, write: NixlWrite) -> None:
        """Frees the request of a write in NIXL."""
        handle, write.handle = write.handle, None
        self._open.discard(write)
        # NIXL may report a request to a peer that has just died as active; the engine then keeps its memory.
        with contextlib.suppress(*self._engine.errors):
            self._agent.releaseXferReq(handle)
