"""Interface of the transports: writes of bytes into a peer's memory, and tags that announce them.

Paths and runtime use only this interface. Differences between engines (how arrivals are announced, which call makes
progress, how handles are freed) are hidden behind these guarantees and duties:

- **Order.** When `arrivals()` returns a tag, all bytes of the write that carried it are visible to this CPU.
  Tags of *different* writes of one peer may be delivered out of order.
- **Duty to poll.** A posted write makes progress only inside calls of the side that posted it: call
  `Write.poll()` until it is True, or abandon the write with `Write.release()`, after which `arrivals()` and
  `close()` of the same transport poll it. In addition, both sides must call `arrivals()` or `progress()` every few
  milliseconds while transfers are in progress, because an engine may have no thread of its own. While the target
  makes no calls, a write to it may stay incomplete: its tag is not sent, and for the first write its bytes are not
  either. A tag that could not be sent at once (after `tell`, or with a complete write) is sent in later calls of
  its sender.
- **No cancel.** A write that was posted may land at any time until it is complete.
- **No call blocks on a peer.** `write` may copy the bytes itself, but never waits for an answer. For a stopped peer,
  `poll()` stays False, and the caller's deadline decides.
- **Threads.** Every method may be called from any thread. A `Write` is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvctl_agent.memory.region import Region
from kvctl_agent.native import Turns

Addresses = npt.NDArray[np.uint64]
"""Absolute addresses in the process they belong to, shape [n]."""

Sizes = npt.NDArray[np.uint64]
"""Bytes per descriptor, shape [n]."""

MAX_TAG_BYTES = 4096
"""Longest tag in bytes; the shortest is one byte, because engines treat an empty tag as none."""


class Arrival(NamedTuple):
    """A tag that has arrived from a peer.

    `peer` is the name under which the sender is connected here, or its own agent name if it is not connected.
    """

    peer: str
    tag: bytes


class Waited(NamedTuple):
    """End of a wait for tags.

    Attributes:
        ended_ns: Monotonic time, before the thread waited for the GIL again.
    """

    ended_ns: int
    arrivals: list[Arrival]


class SharedTag(NamedTuple):
    """A tag that several writes to one peer share: it arrives when the bytes of all of them have.

    Attributes:
        number: Number of the tag, unique to its sender.
        descriptors: Descriptors of all these writes together.
    """

    tag: bytes
    number: int
    descriptors: int


class Write(Protocol):
    """Handle of one posted write.

    Attributes:
        bytes: Payload of all descriptors together.
        descriptors: Number of descriptors passed to the transport, before adjacent descriptors are merged.
    """

    @property
    def bytes(self) -> int: ...

    @property
    def descriptors(self) -> int: ...

    def poll(self) -> bool:
        """Makes progress and returns whether the write is complete on this side.

        Complete means that the source may be overwritten, that the bytes are visible at the target (over a network:
        before the tag is), and that the tag is being sent. Once True, the result stays True. Completion frees the
        engine's handle.

        Raises:
            PeerDisconnected: the engine reports that the peer is gone. It is unknown whether bytes landed.
            TransportError: the engine failed in another way.
        """
        ...

    def release(self) -> bool:
        """Abandons the write without waiting for it; idempotent, never raises.

        Returns:
            True when the engine has finished the write (complete or failed). False while it is still in flight: the
            write is drained, not cancelled. The transport then polls it, and source and target memory must not be
            reused until a later `release()` returns True. `poll()` must not be called again.
        """
        ...


class DeferredWrite(Write, Protocol):
    """A write that is not posted yet: a copy pool posts its descriptors one by one, without the GIL.

    Each descriptor is sent with the tag. `poll` returns False until all are posted and complete.

    Attributes:
        then: What the pool runs for descriptor i, from any of its threads, when the bytes of the descriptor are there.
        skipped: Whether descriptors were not posted because the time limit had passed.
        post_ns: Time that the pool's threads have spent posting, all together.
    """

    @property
    def then(self) -> object: ...

    @property
    def skipped(self) -> bool: ...

    @property
    def post_ns(self) -> int: ...

    def resume(self, until_ns: int) -> None:
        """Posts the descriptors that were skipped, on this thread, with a new time limit."""
        ...

    def stop(self) -> None:
        """Lets no further descriptor be posted; the write ends with those that are, and with an error if any is not."""
        ...


class Transport(Protocol):
    """Interface of a transport, which writes into peers' memory and reports the tags that arrive from peers."""

    @property
    def name(self) -> str:
        """Name of the transport: `nixl`, `mooncake` or `loopback`."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Registers memory that the engine reads and peers write; call before `metadata()`."""
        ...

    def metadata(self) -> bytes:
        """Returns the opaque data that peers pass to `connect` to write to this agent; unique to each incarnation."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Connects a peer under the name `peer`, so that it can be written to.

        If the peer is already connected with the same metadata, nothing changes. Metadata of a new incarnation
        replaces the connection.

        Raises:
            PeerDisconnected: the process that created `metadata` is gone.
            TransportError: the metadata is malformed or of another transport.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Disconnects `peer`; an unknown name is ignored.

        Writes in flight to it stay in flight, because they cannot be recalled: a silent peer may be heard again, and
        then they land. `ended` ends them.
        """
        ...

    def ended(self, metadata: bytes) -> None:
        """Takes note that the process that created `metadata` has ended, so no write can land in its memory.

        Writes in flight to it end with an error.
        """
        ...

    def share_tag(self, tag: bytes, descriptors: int) -> SharedTag | None:
        """Returns a tag for several writes that have `descriptors` descriptors together.

        Returns None if the transport has no use for it: then the tag must be sent with the last write, after all others
        are complete.
        """
        ...

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | SharedTag | None
    ) -> Write:
        """Writes sizes[i] bytes from local_addrs[i] to remote_addrs[i] for all i, and sends `tag` after them.

        No tag is sent if `tag` is None. An engine need not merge adjacent descriptors.

        Raises:
            PeerDisconnected: the engine reports that the peer is gone.
            TransportError: the peer is not connected, memory is not registered, there are no descriptors, or the engine
                failed. If threads of the transport post the write, `poll` of the result raises what the engine reports.
        """
        ...

    def defers(self, peer: str) -> bool:
        """Returns whether the transport has deferred writes to a peer."""
        ...

    def defer_write(
        self,
        peer: str,
        local_addrs: Addresses,
        remote_addrs: Addresses,
        sizes: Sizes,
        tag: bytes | SharedTag | None,
        until_ns: int,
    ) -> DeferredWrite:
        """Returns a write as `write` makes it, for a copy pool to post.

        Args:
            tag: Tag of one descriptor, or a shared tag.
            until_ns: Time on the monotonic clock after which no descriptor is posted.

        Raises:
            PeerDisconnected, TransportError: as `write`, but what the engine reports is raised by `poll`.
        """
        ...

    def tell(self, peer: str, tag: bytes) -> None:
        """Sends a tag without a write. A tag that cannot be sent at once is sent inside later calls.

        Raises:
            PeerDisconnected, TransportError: as `write`.
        """
        ...

    def progress(self) -> None:
        """Accepts connecting peers, sends queued tags and polls abandoned writes, without returning arrivals.

        Raises:
            TransportError: the engine failed, or the transport is closed.
        """
        ...

    def arrivals(self) -> list[Arrival]:
        """Returns the tags that arrived since the last call, without waiting; the bytes of their writes are visible.

        A tag has 1 to `MAX_TAG_BYTES` bytes of any value. Also does what `progress` does.
        """
        ...

    def wait_for_tags(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> Waited | None:
        """Waits without the GIL until a tag has arrived or a descriptor is readable.

        It looks for tags at once, and again after each pause.

        Args:
            polled: Array of `struct pollfd`; their `revents` are set.
            turns: Turns of the calling thread at the GIL.
            timeout_s: Limit of the wait in seconds.
            pause_s: Seconds between the first two looks for tags. Later pauses grow to a share of the wait, an eighth
                in host memory, but not beyond a millisecond if they began below it.

        Returns:
            What the wait has found; None, at once, if only calls of `arrivals` find tags now.

        Raises:
            TransportError: the engine failed, or the transport is closed.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Returns the engine, its version, the backend and the lanes in use, as JSON values for display."""
        ...

    def close(self) -> None:
        """Frees all resources within about half a second, even if writes to a stopped peer are in flight; idempotent.

        Tags sent just before are still delivered if the peer accepts them. All threads that use the transport must have
        ended before; later calls raise TransportError.
        """
        ...


def described(transport: Transport) -> dict[str, str | list[str]]:
    """Returns `Transport.describe`, with each list or dict as a list of texts, and any other value as text."""
    return {
        key: [f"{name}={item}" for name, item in value.items()]
        if isinstance(value, dict)
        else [str(item) for item in value]
        if isinstance(value, list | tuple)
        else str(value)
        for key, value in transport.describe().items()
    }


W = TypeVar("W")


class AbandonedWrites(ABC, Generic[W]):
    """Base class that polls the abandoned writes of an engine until the engine has finished them.

    `advance` is a method and not a callback, because a stored bound method would be a reference cycle that delays the
    destruction of a closed transport.
    """

    def __init__(self) -> None:
        self._draining: list[W] = []
        self._drain_lock = threading.Lock()

    @abstractmethod
    def advance(self, write: W) -> bool:
        """Polls a write and returns whether the engine has finished it; a failure is stored in the write's `error`."""

    def drain(self, write: W) -> bool:
        """Polls a write as `advance` does; if the write is not finished, `drain_on` polls it from now on."""
        with self._drain_lock:
            if self.advance(write):
                return True
            if write not in self._draining:
                self._draining.append(write)
            return False

    @property
    def draining(self) -> bool:
        """Whether abandoned writes have not finished."""
        return bool(self._draining)

    def drain_on(self) -> None:
        """Polls all abandoned writes and forgets those that are finished."""
        if self._draining:
            with self._drain_lock:
                self._draining = [write for write in self._draining if not self.advance(write)]
