"""The one interface of all paths: a path turns an order into a flight, and a worker advances flights.

A path knows memory and one transport; it knows no room, no ring and no peer's state. The order it gets has passed
every gate already.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.direct_routes import Route
from kvctl_agent.paths.mapped_memory import MappedMemory
from kvctl_agent.paths.segment_pair import SegmentPair
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.transport.base import Prepared, Transport, Write

BULK = "bulk"
SLICE = "slice"
STAGED = "staged"
DIRECT = "direct"


class PeerConnection:
    """What a path needs to write to one peer.

    Attributes:
        peer: its name at the transport.
        pool: our pool, the source.
        ours, theirs: addresses of our pool and of the peer's, the destination.
        ring_base: address of the peer's staging ring; 0 where it has none.
        segments: both sides of each segment, in the model's order.
        prepared: descriptor lists of the peer's pool by (segment, first head, heads), made at first use.
        mapping: of the peer's memory, for `direct`; None where there is none.
        why_not: why there is none, for people.
        routes: of `direct`, by (segment, source's first head, destination's, heads), made at first use.
    """

    def __init__(
        self,
        peer: str,
        transport: Transport,
        pool: KVPool,
        theirs: PoolAddresses,
        ring_base: int,
        mapping: MappedMemory | None = None,
        why_not: str = "",
    ) -> None:
        """Raises DeviceError where `mapping` does not cover the peer's pages."""
        self.peer = peer
        self.transport = transport
        self.pool = pool
        self.ours = pool.addresses()
        self.theirs = theirs
        self.ring_base = ring_base
        pairs = zip(self.ours.segments, theirs.segments, strict=True)
        self.segments = tuple(SegmentPair(here, there, mapping) for here, there in pairs)
        self.prepared: dict[tuple[int, int, int], Prepared] = {}
        self.mapping = mapping
        self.why_not = why_not
        self.routes: dict[tuple[int, int, int, int], tuple[Route, ...]] = {}

    def close(self) -> None:
        """Nothing new is begun on it; the peer's memory is unmapped when the last kernel on it has ended."""
        if self.mapping is not None:
            self.mapping.close()


class Flight(ABC):
    """One part on its way, and what it has cost so far.

    Attributes:
        began_ns: when a worker took it.
        gather_ns: time spent gathering.
        post_ns: time spent in the engine's post; on connections that copy in the post, this is the copy.
        descriptors: handed to the engine, before it merges; of `direct` kernels.
        posts: submissions to the engine; of `direct` kernels.
    """

    def __init__(self, connection: PeerConnection, order: Transfer, began_ns: int) -> None:
        self.connection = connection
        self.order = order
        self.began_ns = began_ns
        self.gather_ns = 0
        self.post_ns = 0
        self.descriptors = 0
        self.posts = 0

    @abstractmethod
    def advance(self) -> bool:
        """Drive it on without waiting; True when it is complete, or has stopped behind its raised cancel.

        Raises:
            TransportError: the engine failed; `give_up` says whether bytes may still land.
        """

    @abstractmethod
    def give_up(self) -> bool:
        """Hand what is in flight to the transport to drain; True when nothing of it can land any more."""

    def count(self, write: Write, since_ns: int) -> None:
        """Account for one submission that began at `since_ns`."""
        self.post_ns += time.monotonic_ns() - since_ns
        self.posts += 1
        self.descriptors += write.descriptors

    def moments(self) -> dict[str, int]:
        """When each stage ended. Pieces overlap, so gather and post are placed by their summed durations."""
        order = self.order
        gathered = self.began_ns + self.gather_ns
        posted = gathered + self.post_ns
        moments = {"ready": order.ready_ns, "gate": max(order.ready_ns, order.opened_ns), "queue": self.began_ns}
        if self.gather_ns:
            moments["gather"] = gathered
        return {**moments, "post": posted, "wire": max(time.monotonic_ns(), posted)}


class WriteFlight(Flight):
    """A part that is one write."""

    def __init__(self, connection: PeerConnection, order: Transfer, began_ns: int, post: Callable[[], Write]) -> None:
        super().__init__(connection, order, began_ns)
        self._write = post()
        self.count(self._write, began_ns)

    def advance(self) -> bool:
        return self._write.poll()

    def give_up(self) -> bool:
        return self._write.release()


class Path(Protocol):
    """One way to move a part."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        """Take an order; the worker then advances the flight.

        Raises:
            MemoryLayoutError: the order does not fit this path or these pools.
            TransportError: the engine failed.
        """
        ...
