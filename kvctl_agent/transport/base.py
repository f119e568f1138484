"""The one interface behind which every engine stands: a transport only writes and tells.

Paths and runtime are written against this file alone, so that an engine can be exchanged without an `if` in a
path. What differs between engines (how an arrival is told, which call drives progress, how handles are freed)
is each transport's own affair and is hidden behind these few promises:

- **Order.** When `arrivals()` returns a tag, all bytes of the write that carried it are visible to this CPU.
  Tags of one peer's *different* writes may overtake each other.
- **Duty to poll.** A posted write makes progress only inside calls of the side that posted it: call
  `Write.poll()` until it is True, or hand the write over with `Write.release()`, after which `arrivals()` and
  `close()` of the same transport drive it. Besides, both sides call `arrivals()` or `progress()` now and then,
  every few milliseconds while anything is going on: there may be no thread that does it for them. A write
  to a target that calls nothing may stay incomplete for that long, its tag unsent and, if it is the first one, its
  bytes too; and a tag that could not leave at once (after `tell`, but also behind a complete write) leaves in such
  calls of its sender.
- **Nothing is recalled.** There is no cancel: a write that was posted may land until it is complete.
- **No call blocks on a peer.** `write` may copy (that is the engine moving the bytes), but never waits for an
  answer; a stopped peer is a `poll()` that stays False, and the caller's deadline decides.
- **Threads.** Every method may be called from any thread. One `Write` belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.memory import HOST
from kvctl_agent.errors import TransportError

Addresses = npt.NDArray[np.uint64]
"""Absolute addresses in the process they belong to, shape [n]."""

Sizes = npt.NDArray[np.uint64]
"""Bytes per descriptor, shape [n]."""

Indices = npt.NDArray[np.int32]
"""Places in a prepared descriptor list, shape [n]."""

MAX_TAG_BYTES = 4096
"""Longest tag that every transport carries; the shortest is one byte (an engine takes none for no tag)."""


class Region(NamedTuple):
    """One contiguous piece of this process's memory; `device` is the number of the GPU it is on, or HOST."""

    addr: int
    nbytes: int
    device: int = HOST


class Arrival(NamedTuple):
    """A tag that landed, and whose it is.

    `peer` is the key the sender was connected under here or, where it was not, the name it gave itself.
    """

    peer: str
    tag: bytes


class Prepared(Protocol):
    """Opaque list of descriptors that the engine has already checked; lives until disconnect or close."""

    @property
    def count(self) -> int:
        """Descriptors in the list."""
        ...


class Write(Protocol):
    """One posted write.

    Attributes:
        bytes: payload of all descriptors together.
        descriptors: number of descriptors as given, before the engine merges neighbours.
    """

    @property
    def bytes(self) -> int: ...

    @property
    def descriptors(self) -> int: ...

    def poll(self) -> bool:
        """Drives the write on; True once it is complete here.

        Complete means: the source may be overwritten, the bytes are (or, behind a network, will be before the
        tag) visible at the target, and the tag is on its way. True for ever after; frees the engine's handle.

        Raises:
            PeerDisconnected: the engine says that the peer is gone. Whether bytes landed is unknown.
            TransportError: the engine failed otherwise.
        """
        ...

    def release(self) -> bool:
        """Gives the write up without waiting for it; idempotent, never raises.

        Returns:
            True when the engine has nothing of this write any more (complete or failed). False while it is
            still in flight: that is a drain, not a cancel. The transport polls it on, and source and target
            memory must stay untouched until a later `release()` returns True; `poll()` is not called again.
        """
        ...


class Transport(Protocol):
    """Registers memory, connects peers, writes batches of descriptors with a tag, reports what arrived."""

    @property
    def name(self) -> str:
        """`nixl`, `mooncake`, `loopback`."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Lets the engine read from and peers write into `regions`; before `metadata()`."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to write to us; opaque, differs for every incarnation of an agent."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Makes `peer` writable under this name.

        The same metadata again changes nothing; metadata of a new incarnation replaces the old one, and
        everything prepared for the old one is gone.

        Raises:
            PeerDisconnected: the process behind `metadata` is gone.
            TransportError: the metadata is malformed or not ours.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets `peer` and what was prepared for it; unknown names are fine.

        Writes in flight to it end with an error (their bytes may land all the same).
        """
        ...

    def prepare_local(self, addrs: Addresses, sizes: Sizes) -> Prepared:
        """Checks descriptors of our own registered memory once, for many `write_prepared`."""
        ...

    def prepare_remote(self, peer: str, addrs: Addresses, sizes: Sizes) -> Prepared:
        """Checks descriptors of `peer`'s registered memory once; valid until that incarnation is gone."""
        ...

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | None
    ) -> Write:
        """Posts local_addrs[i] → remote_addrs[i], sizes[i] bytes, for all i at once; one tag at the end.

        Best for few and large descriptors: nothing is merged.

        Raises:
            PeerDisconnected: the engine says that the peer is gone.
            TransportError: not connected, memory not registered, no descriptors, or an engine failure.
        """
        ...

    def write_prepared(
        self,
        peer: str,
        local: Prepared,
        local_index: Indices,
        remote: Prepared,
        remote_index: Indices,
        tag: bytes | None,
    ) -> Write:
        """Posts local[local_index[i]] → remote[remote_index[i]] for all i.

        Best for many small descriptors: neighbours on both sides merge where the index arrays are sorted.

        Raises:
            PeerDisconnected, TransportError: as `write`.
        """
        ...

    def tell(self, peer: str, tag: bytes) -> None:
        """Sends a bare tag (a part of zero bytes); what cannot leave at once leaves in later calls.

        Raises:
            PeerDisconnected, TransportError: as `write`.
        """
        ...

    def progress(self) -> None:
        """Lets the engine work without taking arrivals: answers peers that connect, sends what is queued, drives
        released writes on.

        Raises:
            TransportError: the engine failed, or the transport is closed.
        """
        ...

    def arrivals(self) -> list[Arrival]:
        """Tags that landed since the last call, without waiting; their bytes are visible.

        A tag is 1 to `MAX_TAG_BYTES` bytes of any value. Does what `progress` does, too.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """For people: engine and version, backend, the lanes in use."""
        ...

    def close(self) -> None:
        """Releases everything within about half a second, also with writes in flight to a stopped peer; idempotent.

        What was told just before still leaves if the peer is there to take it. Comes after the threads that use the
        transport have ended; later calls raise TransportError.
        """
        ...


def check_tag(tag: bytes) -> bytes:
    """The tag itself, if every transport can carry it.

    Raises:
        TransportError: it is empty or too long.
    """
    if not 0 < len(tag) <= MAX_TAG_BYTES:
        raise TransportError(f"a tag has 1 to {MAX_TAG_BYTES} bytes, this one {len(tag)}")
    return tag
