"""Writes of the `mooncake` transport: each descriptor is one entry in the engine, posted through a bounded window.

Entries are posted one at a time because the engine's batches have no status call that returns immediately (it spins
until all entries are done or 30 s have passed), and a batch of more than about 2,048 entries fails, as do the small
batches after it. The status of a single entry can be queried without waiting. An entry costs 3 µs to post and 1 µs to
check, and with 64 or more in the window 512-byte descriptors take 19 µs each; in batches of 1,024 they take 29 µs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.transport.base import AbandonedWrites, Addresses, Sizes
from kvctl_agent.transport.checks import Ranges
from kvctl_agent.transport.mooncake.engine import Engine
from kvctl_agent.transport.mooncake.tags import TagLink

WRITE_WINDOW = 256
PEER_WINDOW = 1024
"""Maximum entries in flight of one write, and to one peer; the engine accepts about 2,048 to a peer."""

_ENDED = (1, -1)
_DRAIN_S = 0.2
_DIAGNOSIS_S = 0.1


class Peer:
    """One incarnation of a peer.

    Attributes:
        session: The engine's name of the peer.
        opened: Whether the engine has opened the session, so that a post does not wait for the peer.
        refused: Why the session could not be opened; "" if it was opened, or opening is still in progress.
    """

    def __init__(self, key: str, metadata: bytes, ident: str, session: str, ranges: Ranges, link: TagLink) -> None:
        self.key = key
        self.metadata = metadata
        self.ident = ident
        self.session = session
        self.ranges = ranges
        self.link = link
        self.opened = False
        self.refused = ""
        self.forgotten = False
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether the engine has ended all entries to the peer."""
        return not self._in_flight

    def take_room(self, wanted: int) -> int:
        """Reserves up to `wanted` entries of the peer's window and returns their number; `give_room` frees them."""
        with self._lock:
            granted = max(0, min(wanted, PEER_WINDOW - self._in_flight))
            self._in_flight += granted
        return granted

    def give_room(self, entries: int) -> None:
        with self._lock:
            self._in_flight -= entries


class MooncakeWrite:
    """State of a write: descriptors to post, entries in flight, and the tag to send after the last entry is done."""

    def __init__(
        self,
        in_flight: InFlight,
        peer: Peer,
        descriptors: int,
        arrays: tuple[Addresses, Addresses, Sizes],
        tag: bytes | None,
    ) -> None:
        self.bytes = int(arrays[2].sum())
        self.descriptors = descriptors
        self.peer = peer
        self.arrays = arrays
        self.posted = 0
        self.entries: deque[int] = deque()
        self.tag = tag
        self.number = 0
        self.done = False
        self.error: TransportError | None = None
        self.failed_at = 0.0
        self._in_flight = in_flight

    def poll(self) -> bool:
        if not self.done and not self._in_flight.advance(self):
            return False
        if self.error is not None:
            raise self.error
        return True

    def release(self) -> bool:
        return self.done or self._in_flight.drain(self)


class InFlight(AbandonedWrites[MooncakeWrite]):
    """Posts, polls and drains the writes of one engine that are not complete."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._open: set[MooncakeWrite] = set()

    def post(self, write: MooncakeWrite) -> None:
        """Starts a write: posts as many of its descriptors as the windows allow."""
        self._open.add(write)
        self.advance(write)

    def advance(self, write: MooncakeWrite) -> bool:
        """Polls a write without waiting and returns whether it has ended; a failure is stored in its `error`."""
        if write.done:
            return True
        self._reap(write)
        if write.error is None and not write.failed_at:
            self._fill(write)
        if write.entries:
            return False  # also for a failed write: the engine uses its memory until all entries have ended
        if write.error is None:
            ended = self._diagnosed(write) if write.failed_at else self._posted(write) and self._tag_sent(write)
            if not ended:
                return False
        write.done = True
        self._open.discard(write)
        return True

    def close(self) -> None:
        """Waits up to 0.2 s for the writes in flight, then abandons the rest, whose `error` is set."""
        deadline = time.monotonic() + _DRAIN_S
        while [write for write in list(self._open) if not self.advance(write)] and time.monotonic() < deadline:
            time.sleep(0.0005)
        for write in self._open:
            write.done = True
            write.error = TransportError(
                f"mooncake: a write to peer {write.peer.key!r} was still in flight when the transport was closed"
            )
        self._open.clear()
        self._draining.clear()

    def _fill(self, write: MooncakeWrite) -> None:
        """Posts further descriptors of a write, as entries of the engine, while both windows have room."""
        peer = write.peer
        if not peer.opened:
            if peer.refused:
                write.error = PeerDisconnected(f"mooncake: peer {peer.key!r} is gone: {peer.refused}")
            elif peer.forgotten:
                write.error = TransportError(f"mooncake: peer {peer.key!r} was disconnected before a write was posted")
            return
        wanted = min(WRITE_WINDOW - len(write.entries), len(write.arrays[2]) - write.posted)
        if wanted <= 0:
            return
        room = peer.take_room(wanted)
        batch = slice(write.posted, write.posted + room)
        here, there, sizes = (array[batch].tolist() for array in write.arrays)
        submit, session, entries = self._engine.submit, peer.session, write.entries
        posted = 0
        for local, remote, nbytes in zip(here, there, sizes, strict=True):
            entry = submit(session, local, remote, nbytes)
            if not entry:
                self._fail(write)
                break
            entries.append(entry)
            posted += 1
        write.posted += posted
        if posted < room:
            peer.give_room(room - posted)

    def _reap(self, write: MooncakeWrite) -> None:
        """Removes ended entries from the front; they end nearly in the order in which they were posted."""
        check, entries = self._engine.check, write.entries
        before = len(entries)
        while entries:
            status = check(entries[0])
            if status not in _ENDED:
                break
            entries.popleft()
            if status < 0:
                self._fail(write)
        if before != len(entries):
            write.peer.give_room(before - len(entries))

    @staticmethod
    def _posted(write: MooncakeWrite) -> bool:
        return write.posted == len(write.arrays[2])

    @staticmethod
    def _fail(write: MooncakeWrite) -> None:
        write.failed_at = write.failed_at or time.monotonic()

    @staticmethod
    def _diagnosed(write: MooncakeWrite) -> bool:
        """Sets the error of a failed write and returns True, or returns False if the cause is not known yet.

        A failure is attributed to a living peer only after 0.1 s, because a dying process closes its sockets late.
        """
        try:
            write.peer.link.check_alive()
        except PeerDisconnected as error:
            write.error = PeerDisconnected(f"{error} (a write of {write.descriptors} descriptors failed)")
            return True
        if time.monotonic() < write.failed_at + _DIAGNOSIS_S:
            return False
        write.error = TransportError(
            f"mooncake: the engine failed a write of {write.descriptors} descriptors to peer {write.peer.key!r}, which "
            f"is alive: is its memory still registered? MC_LOG_LEVEL=INFO logs the cause"
        )
        return True

    @staticmethod
    def _tag_sent(write: MooncakeWrite) -> bool:
        """Sends the tag of a write; returns True once the tag is sent or has failed, or if there is none."""
        if write.tag is None:
            return True
        link = write.peer.link
        try:
            if not write.number:
                write.number = link.enqueue(write.tag)
            elif link.sent < write.number:
                link.flush()
        except TransportError as error:
            write.error = error
            return True
        return link.sent >= write.number


def flush(link: TagLink) -> None:
    """Sends queued tags. Ignores a peer that is gone, because its loss is reported to the threads that write to it."""
    if link.pending:
        with contextlib.suppress(PeerDisconnected):
            link.flush()
