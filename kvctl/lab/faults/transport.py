"""Transport that refuses posts, fails writes whose bytes still land, delays writes, flips bytes and loses tags.

Everything else is passed on to a real transport. Injected failures obey the contract of `kvctl_agent.transport.base`,
so code that mishandles them would mishandle the failures of a real transfer engine as well.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from kvctl.lab.faults.injector import FaultInjector
from kvctl_agent.errors import TransportError
from kvctl_agent.native import Turns
from kvctl_agent.transport.base import Addresses, Arrival, SharedTag, Sizes, Transport, Waited, Write

# Long enough that a room can end and its pages can be reused before the bytes land.
_MAX_LATE_NS = 200_000_000

_WRITE_FAULTS = ("write-error", "write-doubt", "corrupt-write", "slow-lane", "slow-writer")


class FaultyTransport:
    """Transport that wraps another transport and injects faults into its writes and arrivals."""

    def __init__(self, engine: Transport, faults: FaultInjector) -> None:
        self._engine = engine
        self._faults = faults
        self._next_poll_ns = 0

    def __getattr__(self, name: str) -> Any:
        """Passes everything that no fault concerns on to the engine."""
        return getattr(self._engine, name)

    def defers(self, peer: str) -> bool:
        """Returns what the engine does; False while faults of writes are in force, which `write` injects."""
        return self._engine.defers(peer) and not any(self._faults.find(fault) for fault in _WRITE_FAULTS)

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | SharedTag | None
    ) -> Write:
        post = partial(self._engine.write, peer, local_addrs, remote_addrs, sizes, tag)
        return self._post(post, int(sizes.sum()), local_addrs)

    def wait_for_tags(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> Waited | None:
        if self._faults.find("slow-reader"):
            return None
        waited = self._engine.wait_for_tags(polled, turns, timeout_s, pause_s)
        return None if waited is None else Waited(waited.ended_ns, self._delivered(waited.arrivals))

    def arrivals(self) -> list[Arrival]:
        pause_ns = self._faults.ns("slow-reader")
        if pause_ns:
            now = time.monotonic_ns()
            if now < self._next_poll_ns:
                return []
            self._next_poll_ns = now + pause_ns
            self._faults.count("slow-reader")
        return self._delivered(self._engine.arrivals())

    def _delivered(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Returns the tags that are not lost, with those that are repeated."""
        delivered: list[Arrival] = []
        for arrival in arrivals:
            if not self._faults.should_fire("notify-loss"):
                delivered.append(arrival)
                if self._faults.should_fire("notify-dup"):
                    delivered.append(arrival)
        return delivered

    def _post(self, post: Callable[[], Write], nbytes: int, addrs: Addresses) -> Write:
        if self._faults.should_fire("write-error"):
            raise TransportError("injected fault write-error: the engine refused the post")
        if random := self._faults.should_fire("write-doubt"):
            return DoubtfulWrite(post, nbytes, len(addrs), random.randrange(_MAX_LATE_NS))
        if random := self._faults.should_fire("corrupt-write"):
            post = partial(CorruptWrite, post, addrs, random)
        if pause_ns := self._faults.ns("slow-lane"):
            self._faults.count("slow-lane")
            return LateWrite(post, nbytes, len(addrs), pause_ns)
        write = post()
        pause_ns = self._faults.ns("slow-writer")
        if not pause_ns:
            return write
        self._faults.count("slow-writer")
        return SlowWrite(write, pause_ns)


class CorruptWrite:
    """A write in which the first byte of a random descriptor is wrong.

    The byte is flipped in the source memory before the post and restored when the write has finished.
    """

    _flipping = threading.Lock()  # for two writes that flip the same byte

    def __init__(self, post: Callable[[], Write], addrs: Addresses, random: Random) -> None:
        self._byte = ctypes.c_ubyte.from_address(int(addrs[random.randrange(len(addrs))]))
        self._flipped = False
        self._flip()
        try:
            self._write = post()
        except BaseException:
            self._restore()
            raise
        self.bytes = self._write.bytes
        self.descriptors = self._write.descriptors

    def poll(self) -> bool:
        return self._finished(self._write.poll)

    def release(self) -> bool:
        return self._finished(self._write.release)

    def _finished(self, poll: Callable[[], bool]) -> bool:
        finished = poll()
        if finished:
            self._restore()
        return finished

    def _flip(self) -> None:
        with self._flipping:
            self._byte.value ^= 0xFF
        self._flipped = not self._flipped

    def _restore(self) -> None:
        if self._flipped:
            self._flip()


class LateWrite:
    """A write that is posted to the wrapped transport with a delay; nothing lands if it is released before."""

    def __init__(self, post: Callable[[], Write], nbytes: int, descriptors: int, pause_ns: int) -> None:
        self.bytes = nbytes
        self.descriptors = descriptors
        self._post = post
        self._due_ns = time.monotonic_ns() + pause_ns
        self._write: Write | None = None

    def poll(self) -> bool:
        return (write := self._posted()) is not None and write.poll()

    def release(self) -> bool:
        return self._write is None or self._write.release()

    def _posted(self) -> Write | None:
        """Returns the write, which it posts if that is due; None before."""
        if self._write is None and time.monotonic_ns() >= self._due_ns:
            self._write = self._post()
        return self._write


class DoubtfulWrite(LateWrite):
    """A write that is reported as failed although its bytes and tag land later, like a packet delivered after an error.

    The write is posted by the first call of `release` after a delay; `release` returns False until the post has
    completed. If `release` is not called again after the delay, nothing lands.
    """

    def poll(self) -> bool:
        raise TransportError("injected fault write-doubt: the engine failed the write, whose bytes may still land")

    def release(self) -> bool:
        try:
            return (write := self._posted()) is not None and write.release()
        except TransportError:  # this agent or the peer is closed: nothing lands any more
            return True


class SlowWrite:
    """A write that is reported complete no earlier than a certain time after its post."""

    def __init__(self, write: Write, pause_ns: int) -> None:
        self.bytes = write.bytes
        self.descriptors = write.descriptors
        self._write = write
        self._due_ns = time.monotonic_ns() + pause_ns

    def poll(self) -> bool:
        return self._write.poll() and time.monotonic_ns() >= self._due_ns

    def release(self) -> bool:
        return self._write.release() and time.monotonic_ns() >= self._due_ns
