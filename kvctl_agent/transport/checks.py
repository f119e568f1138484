"""Checks descriptors and tags, and provides the base class of transports whose engine makes no checks.

The checks are vectorised, because a write may have tens of thousands of descriptors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np

from kvctl_agent.errors import TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import MAX_TAG_BYTES, Addresses, SharedTag, Sizes


def check_tag(tag: bytes) -> bytes:
    """Returns the tag if its length is valid.

    Raises:
        TransportError: the tag is empty or too long.
    """
    if not 0 < len(tag) <= MAX_TAG_BYTES:
        raise TransportError(f"a tag must have 1 to {MAX_TAG_BYTES} bytes, this one has {len(tag)}")
    return tag


class Ranges:
    """Registered regions of one agent, against which descriptors are checked; error texts begin with `engine`."""

    def __init__(self, engine: str, regions: Sequence[Region]) -> None:
        self._engine = engine
        ordered = np.array(sorted((addr, nbytes) for addr, nbytes, _ in regions), np.uint64).reshape(-1, 2)
        self._starts = ordered[:, 0]
        self._ends = ordered.sum(axis=1, dtype=np.uint64)
        self._bounds = self._starts.tolist(), self._ends.tolist()

    def check(self, addrs: Addresses, sizes: Sizes, whose: str) -> None:
        """Raises TransportError unless every descriptor lies inside a registered region; `whose` names their owner."""
        if len(addrs) == 0 or len(addrs) != len(sizes):
            raise TransportError(f"{self._engine}: {len(addrs)} addresses, {len(sizes)} sizes; at least one of each")
        if len(addrs) == 1 and self._holds(int(addrs[0]), int(sizes[0])):
            return
        place = np.searchsorted(self._starts, addrs, side="right").astype(np.int64) - 1
        inside = place >= 0
        if bool(inside.all()):
            ends = self._ends[place]
            inside = (addrs <= ends) & (sizes <= ends - np.minimum(addrs, ends))
        if not bool(inside.all()):
            first = int(np.argmin(inside))
            raise TransportError(
                f"{self._engine}: descriptor {first}, {int(sizes[first])} bytes at {int(addrs[first]):#x}, is not in "
                f"the registered memory of {whose}"
            )

    def _holds(self, addr: int, nbytes: int) -> bool:
        """Returns whether one descriptor lies inside a registered region, in a fifth of the time of the array check."""
        starts, ends = self._bounds
        place = bisect_right(starts, addr) - 1
        return place >= 0 and addr + nbytes <= ends[place]


class CheckedPeer(Protocol):
    """Interface of a connected peer of a `CheckedTransport`."""

    @property
    def ranges(self) -> Ranges:
        """The peer's registered memory."""
        ...


P = TypeVar("P", bound=CheckedPeer)
W = TypeVar("W")


class CheckedTransport(ABC, Generic[P, W]):
    """Base class of a transport that checks descriptors.

    The subclass adds to `_regions` and `_ranges` when it registers memory, and to `_peers` when it connects a peer.
    """

    name: str

    def __init__(self) -> None:
        self._closed = False
        self._regions: list[Region] = []
        self._ranges = Ranges(self.name, [])
        self._peers: dict[str, P] = {}

    @abstractmethod
    def _post(
        self, peer: P, descriptors: int, local: Addresses, remote: Addresses, sizes: Sizes, tag: bytes | None
    ) -> W:
        """Starts a write of checked and merged descriptors; `descriptors` is their number before the merge."""

    def ended(self, metadata: bytes) -> None:
        """Does nothing: engines of this kind end writes to a process that has ended by themselves."""

    def share_tag(self, tag: bytes, descriptors: int) -> SharedTag | None:
        return None

    def defers(self, peer: str) -> bool:
        return False

    def defer_write(
        self,
        peer: str,
        local_addrs: Addresses,
        remote_addrs: Addresses,
        sizes: Sizes,
        tag: bytes | SharedTag | None,
        until_ns: int,
    ) -> NoReturn:
        """Raises TransportError: engines of this kind have no deferred writes."""
        raise TransportError(f"{self.name}: there are no deferred writes")

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | SharedTag | None
    ) -> W:
        known = self._peer(peer)
        if isinstance(tag, SharedTag):
            raise TransportError(f"{self.name}: writes do not share tags")
        self._ranges.check(local_addrs, sizes, "this agent")
        known.ranges.check(remote_addrs, sizes, f"peer {peer!r}")
        count = len(sizes)
        if count > 1:
            local_addrs, remote_addrs, sizes = merge(local_addrs, remote_addrs, sizes)
        return self._post(known, count, local_addrs, remote_addrs, sizes, tag if tag is None else check_tag(tag))

    def _peer(self, peer: str) -> P:
        self._check_open()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"{self.name}: peer {peer!r} is not connected")
        return known

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self.name}: the transport is closed")


def merge(local: Addresses, remote: Addresses, sizes: Sizes) -> tuple[Addresses, Addresses, Sizes]:
    """Returns the descriptors, with consecutive ones merged if they are adjacent in memory on both sides."""
    follows = (local[1:] == local[:-1] + sizes[:-1]) & (remote[1:] == remote[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return local[first], remote[first], np.add.reduceat(sizes, first)
