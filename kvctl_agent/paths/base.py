"""The one interface of all paths: a path turns an order into a flight, and a worker advances flights.

A path knows memory and one transport; it knows no room, no ring and no peer's state. The order it gets has passed
every gate already.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import PoolAddresses, SegmentAddresses
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.transport.base import Prepared, Transport, Write

BULK = "bulk"
SLICE = "slice"
STAGED = "staged"

Numbers = npt.NDArray[np.int64]


class LaneSegment:
    """One segment of our pool and of a peer's, which hold different layers and heads of it, maybe.

    Attributes:
        ours, theirs: where each side's bytes are.
        page_bytes: of each plane, where both hold the same heads; int64 `[planes]`.
    """

    def __init__(self, ours: SegmentAddresses, theirs: SegmentAddresses) -> None:
        self.ours = ours
        self.theirs = theirs
        planes = len(theirs.held.segment.planes)
        self.page_bytes = np.array([theirs.page_bytes(plane) for plane in range(planes)], np.int64)
        self._ours = np.array(ours.bases, np.int64).reshape(-1, planes)
        self._theirs = np.array(theirs.bases, np.int64).reshape(-1, planes)

    def bases(self, lo: int, hi: int) -> tuple[Numbers, Numbers]:
        """Addresses of page 0 of every plane of layers [lo, hi), here and there, int64 `[hi - lo, planes]`.

        Raises:
            MemoryLayoutError: as `check_layers`.
        """
        self.check_layers(lo, hi)
        ours, theirs = self.ours.held.layer_lo, self.theirs.held.layer_lo
        return self._ours[lo - ours : hi - ours], self._theirs[lo - theirs : hi - theirs]

    def check_layers(self, lo: int, hi: int) -> None:
        """Raises MemoryLayoutError unless both sides hold layers [lo, hi)."""
        for held in (self.ours.held, self.theirs.held):
            if not held.layer_lo <= lo < hi <= held.layer_hi:
                raise MemoryLayoutError(
                    f"{held.segment.name}: layers {lo}-{hi} are not those of a rank that has "
                    f"{held.layer_lo}-{held.layer_hi}"
                )


class Lane:
    """What a path needs to write to one peer.

    Attributes:
        peer: its name at the transport.
        pool: our pool, the source.
        ours, theirs: addresses of our pool and of the peer's, the destination.
        ring_base: address of the peer's staging ring; 0 where it has none.
        segments: both sides of each segment, in the model's order.
        prepared: descriptor lists of the peer's pool by (segment, first head, heads), made at first use.
    """

    def __init__(self, peer: str, transport: Transport, pool: KVPool, theirs: PoolAddresses, ring_base: int) -> None:
        self.peer = peer
        self.transport = transport
        self.pool = pool
        self.ours = pool.addresses()
        self.theirs = theirs
        self.ring_base = ring_base
        pairs = zip(self.ours.segments, theirs.segments, strict=True)
        self.segments = tuple(LaneSegment(here, there) for here, there in pairs)
        self.prepared: dict[tuple[int, int, int], Prepared] = {}


class Flight(ABC):
    """One part on its way, and what it has cost so far.

    Attributes:
        began_ns: when a worker took it.
        gather_ns: time spent gathering.
        post_ns: time spent in the engine's post; on lanes that copy in the post, this is the copy.
        descriptors: handed to the engine, before it merges.
        posts: submissions to the engine.
    """

    def __init__(self, lane: Lane, order: Transfer, began_ns: int) -> None:
        self.lane = lane
        self.order = order
        self.began_ns = began_ns
        self.gather_ns = 0
        self.post_ns = 0
        self.descriptors = 0
        self.posts = 0

    @abstractmethod
    def advance(self) -> bool:
        """Drive it on without waiting; True when it is complete, or has stopped behind its raised fence.

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

    def __init__(self, lane: Lane, order: Transfer, began_ns: int, post: Callable[[], Write]) -> None:
        super().__init__(lane, order, began_ns)
        self._write = post()
        self.count(self._write, began_ns)

    def advance(self) -> bool:
        return self._write.poll()

    def give_up(self) -> bool:
        return self._write.release()


class Path(Protocol):
    """One way to move a part."""

    def start(self, lane: Lane, order: Transfer) -> Flight:
        """Take an order; the worker then advances the flight.

        Raises:
            MemoryLayoutError: the order does not fit this path or these pools.
            TransportError: the engine failed.
        """
        ...
