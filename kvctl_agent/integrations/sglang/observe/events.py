"""Events in the life of SGLang's rooms, as the hooks record them: plain values, taken on SGLang's threads.

Times are monotonic ns. A `room` is SGLang's bootstrap room; an `endpoint` is `address:port` of the control socket of
the rank at the other end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec

MOST_UNREAD = 1 << 16
"""Events kept until the observer reads them; further ones are counted and dropped."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all events; a struct, because it is made in a seventh of the time of a named tuple."""


class StatusChanged(Event, frozen=True):
    at_ns: int
    room: int
    status: int  # a KVPoll; what SGLang makes of it depends on the room's state


class Failed(Event, frozen=True):
    at_ns: int
    room: int
    reason: str
    prefill_rank: int | None  # decode: the rank that reported it, counted over tp, pp and cp; None: this rank


class Cleared(Event, frozen=True):
    """The scheduler has given the room up, after its end."""

    at_ns: int
    room: int


class Begun(Event, frozen=True):
    """Prefill: the scheduler knows how many pages it will send."""

    at_ns: int
    room: int
    pages: int


class Accepted(Event, frozen=True):
    """Prefill: every decode rank of the room has announced its pages."""

    at_ns: int
    room: int
    endpoints: tuple[str, ...]  # without the ranks that receive nothing


class ChunkReady(Event, frozen=True):
    """Prefill: the scheduler handed a chunk over to a transfer worker."""

    at_ns: int
    room: int
    first_page: int
    pages: int
    last: bool


class PartSent(Event, frozen=True):
    """Prefill: a worker has written a chunk to one decode rank."""

    at_ns: int
    room: int
    first_page: int
    pages: int
    endpoint: str
    decode_tp_size: int
    path: str
    dequeued_ns: int
    gated: bool  # the chunk had waited for the decode rank's ring
    passed_ns: int  # start of the call that sends it: what it waited for is there
    posted_ns: int | None  # None: the engine writes synchronously


class WritersKnown(Event, frozen=True):
    """Decode: the receiver has looked up the prefill ranks of its room."""

    at_ns: int
    room: int
    writers: tuple[Writer, ...]
    staged: bool


class Writer(NamedTuple):
    """A prefill rank of a room.

    Attributes:
        rank: its number over tp, pp and cp, which its messages have.
        sends: whether it sends pages, or only counts as an answer.
    """

    rank: int
    endpoint: str
    name: str
    server: str
    sends: bool


class PagesAnnounced(Event, frozen=True):
    """Decode: the receiver has sent its page indices to all prefill ranks of the room."""

    at_ns: int
    room: int
    pages: int
    prefix_tokens: int


class WriterDone(Event, frozen=True):
    """Decode: a prefill rank has reported that everything it owes is written."""

    at_ns: int
    room: int
    prefill_rank: int


class ChunkLanded(Event, frozen=True):
    """Decode, staged: a prefill rank has written its share of a chunk into the ring."""

    at_ns: int
    room: int
    chunk: int
    pages: int
    prefill_rank: int | None


class RegionGranted(Event, frozen=True):
    """Decode, staged: a chunk has a region of the ring."""

    at_ns: int
    room: int
    chunk: int
    pages: int
    serial: int


class RegionRefused(Event, frozen=True):
    """Decode, staged: a chunk is larger than the whole ring."""

    at_ns: int
    room: int
    chunk: int
    pages: int


class RegionFreed(Event, frozen=True):
    at_ns: int
    serial: int


class ServerAnswered(Event, frozen=True):
    """Decode: the bootstrap server of a prefill instance answered a health request."""

    at_ns: int
    server: str


class ServerLost(Event, frozen=True):
    """Decode: SGLang has given up a prefill instance whose bootstrap server does not answer."""

    at_ns: int
    server: str


class GateWait(NamedTuple):
    """A chunk of a prefill rank that may not be written yet.

    Attributes:
        since_ns: first time that it was refused.
        round, end: of its region in the decode rank's ring, for whose watermark it waits; end -1: it has no region yet.
    """

    since_ns: int
    endpoint: str
    first_page: int
    pages: int
    round: int
    end: int


class EventBuffer:
    """What the hooks of one manager have recorded. Any thread writes; the observer empties `events`.

    Attributes:
        waits: chunks that wait for a ring, by room, chunk and the name of the decode rank's session.
        dropped: events dropped because nobody had read the earlier ones.
    """

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.waits: dict[tuple[int, int, str], GateWait] = {}
        self.dropped = 0
        self.writers: dict[tuple[Any, ...], tuple[Writer, ...]] = {}  # by what a receiver looks up

    def add(self, event: Event) -> None:
        # An append to a deque is atomic, so that SGLang's threads take no lock.
        if len(self.events) < MOST_UNREAD:
            self.events.append(event)
        else:
            self.dropped += 1


class WorkerState(threading.local):
    """Of a transfer worker's thread: the chunk that it works on, and what it has posted of it.

    Attributes:
        chunk: SGLang's TransferKVChunk; None outside a worker.
        dequeued_ns: time at which the worker took it from its queue.
        gated: whether the chunk had to wait for the ring.
        posted: writes whose end the worker has not seen.
    """

    chunk: Any = None
    dequeued_ns = 0
    gated = False

    def __init__(self) -> None:
        self.posted: list[PartSent] = []


now_ns = time.monotonic_ns
