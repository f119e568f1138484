"""Interface of the transfer paths: a path starts a `Flight` for each part, which the control loop then advances.

A path uses the pool's memory and one transport. It has no access to rooms, ring grants or a peer's state: a part is
passed to it only when it may be sent (on path staged, when the watermark permits the write).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from kvctl_agent.device.base import Event
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.transport.base import Write


class Flight(ABC):
    """The transfer of one part in progress, with its durations and counts so far.

    Attributes:
        connection: The connection to the reader.
        order: The part to transfer, as ordered by the state machine.
        began_ns: Time at which the transfer began.
        gather_ns: Time spent gathering.
        post_ns: Time spent in the engine's post call; includes the copy if the engine copies in that call.
        descriptors: Descriptors passed to the engine, before it merges them; kernels on path direct.
        posts: Writes submitted to the engine; kernels on path direct.
        row: The aux row that was sent in the tag; None if the tag carried none.
        event: The event of the GPU that the transfer waits for, and nothing else; None if there is none.
    """

    def __init__(self, connection: PeerConnection, order: Transfer, began_ns: int) -> None:
        self.connection = connection
        self.order = order
        self.began_ns = began_ns
        self.gather_ns = 0
        self.post_ns = 0
        self.descriptors = 0
        self.posts = 0
        self.row: bytes | None = None
        self.event: Event | None = None

    @abstractmethod
    def advance(self) -> bool:
        """Makes progress without waiting.

        Returns:
            True when the transfer is complete, or has stopped after cancellation.

        Raises:
            TransportError: the engine failed; call `give_up` to learn whether bytes may still land.
        """

    @abstractmethod
    def give_up(self) -> bool:
        """Abandons the transfer and lets the transport drain its writes.

        Returns:
            True when no bytes of the part can land any more.
        """

    def count(self, write: Write, since_ns: int) -> None:
        """Adds a write to the counts and durations; `since_ns` is the time at which its submission began."""
        self.post_ns += time.monotonic_ns() - since_ns
        self.posts += 1
        self.descriptors += write.descriptors

    def moments(self) -> dict[str, int]:
        """Returns the end time of each stage (ready, gate, queue, gather, post, wire) in ns of the monotonic clock.

        Pieces overlap, so the ends of gather and post are computed from their total durations.
        """
        order = self.order
        gathered = self.began_ns + self.gather_ns
        posted = gathered + self.post_ns
        moments = {"ready": order.ready_ns, "gate": max(order.ready_ns, order.opened_ns), "queue": self.began_ns}
        if self.gather_ns:
            moments["gather"] = gathered
        return {**moments, "post": posted, "wire": max(time.monotonic_ns(), posted)}


class WriteFlight(Flight):
    """The transfer of a part by a single write."""

    def __init__(self, connection: PeerConnection, order: Transfer, began_ns: int, post: Callable[[], Write]) -> None:
        super().__init__(connection, order, began_ns)
        self._write = post()
        self.count(self._write, began_ns)

    def advance(self) -> bool:
        return self._write.poll()

    def give_up(self) -> bool:
        return self._write.release()


class Path(Protocol):
    """Interface of a transfer path."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        """Starts the transfer of a part. The control loop then advances the returned flight.

        Raises:
            MemoryLayoutError: the part cannot use this path, or does not fit the pools.
            TransportError: the engine failed.
        """
        ...
