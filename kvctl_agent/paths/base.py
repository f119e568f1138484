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

from kvctl_agent.memory.addresses import K, PoolAddresses, V
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.transport.base import Prepared, Transport, Write

BULK = "bulk"
SLICE = "slice"
STAGED = "staged"


class Lane:
    """What a path needs to write to one peer.

    Attributes:
        peer: its name at the transport.
        pool: our pool, the source.
        theirs: the peer's pool, the destination.
        ring_base: address of the peer's staging ring; 0 where it has none.
        planes: (ours, theirs, page bytes), each int64 `[2 * layers]` in the order K, V of layer 0, K, V of layer 1 …
        prepared: descriptor lists of the peer's pool by (first head, heads), made at first use.
    """

    def __init__(self, peer: str, transport: Transport, pool: KVPool, theirs: PoolAddresses, ring_base: int) -> None:
        self.peer = peer
        self.transport = transport
        self.pool = pool
        self.theirs = theirs
        self.ring_base = ring_base
        page_bytes = np.array([theirs.page_bytes(kv) for _ in theirs.k_bases for kv in (K, V)], np.int64)
        self.planes = _bases(pool.addresses()), _bases(theirs), page_bytes
        self.prepared: dict[tuple[int, int], Prepared] = {}


def _bases(pool: PoolAddresses) -> npt.NDArray[np.int64]:
    return np.array([base for pair in zip(pool.k_bases, pool.v_bases, strict=True) for base in pair], np.int64)


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
