"""Documents of an agent as the observer reads them: what is, besides the records of what has happened.

An agent publishes each document as MessagePack: a map of the fields of its class here, in which rows are arrays whose
`keys` are written once. Rows are those of the admin commands; their ages are as of the time of the document.
Content that cannot be decoded, or has another type, is unknown: every field has a default.
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import msgspec

from kvctl_agent.contract.snapshots import (
    Bootstrap,
    ConfigRow,
    GatedPart,
    Integration,
    OwedParts,
    PeerRow,
    PipelineUse,
    RingAllocation,
    RingState,
    RingUse,
    StagingBuffers,
)
from kvctl_agent.errors import RegionError
from kvctl_agent.telemetry.region import Cell, Document, Published, RegionReader

_ASK_AGAIN_NS = 250_000_000  # a publication takes the control loop 0.3 to 0.5 ms
_AGES = frozenset({"age_ns", "asked_age_ns", "last_heard_ns", "unheard_ns", "oldest_write_ns", "lane_measured_age_ns"})

Builder = Callable[[], Iterator[Mapping[str, Any]]]
"""Yields the fields of a document without its rows, and then its rows, all with the same keys."""


class AnyDocument(msgspec.Struct, frozen=True):
    """A document."""


Kind = TypeVar("Kind", bound=AnyDocument)
Row = TypeVar("Row")


class Identity(AnyDocument, frozen=True):
    """Properties of a rank that do not change, or rarely do; most are fields of `Status`.

    Attributes:
        environment: variables that choose its network devices.
        staging: whether staging is enabled.
        calls: names of the engine's calls, indexed by `Cell.CALL`.
        suspect_s, lost_s: these settings.
    """

    version: str = ""
    host: str = ""
    incarnation: str = ""
    rank: dict[str, int] = {}
    sizes: dict[str, int] = {}
    transport: dict[str, str | list[str]] = {}
    device: str = ""
    gpu_pci: str | None = None
    pool: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    integration: Integration | None = None
    environment: dict[str, str] = {}
    staging: bool = False
    calls: list[str] = []
    suspect_s: float = 0.0
    lost_s: float = 0.0


class State(AnyDocument, frozen=True):
    """Small values that change at any time; most are fields of `Status`.

    Attributes:
        state: of the life cycle, such as "running"; "" if it is unknown.
        not_connected: why it has no prefill instance for a new room; None: it has one, or is registered.
        serving, instances: numbers of prefill instances, whose ranks are all connected and in all.
        lanes: kinds of interconnect in use.
        peers: peers by state.
        gated: number of gated parts.
        engine_rooms: rooms that the engine has begun and that have not ended; None: unknown.
    """

    state: str = ""
    accepting: bool = False
    draining: bool = False
    not_ready: str | None = None
    not_connected: str | None = None
    waiting_for: str | None = None
    registry: str | None = None
    serving: int = 0
    instances: int = 0
    lanes: list[str] = []
    memory_gb_per_s: float | None = None
    quarantined_bytes: int | None = None
    ring: RingUse | None = None
    buffers: StagingBuffers | None = None
    pipeline: PipelineUse | None = None
    peers: dict[str, int] = {}
    gated: int = 0
    engine_rooms: int | None = None


class Rows(AnyDocument, Generic[Row], frozen=True):
    """Rows of one kind: configuration keys, answers of registries, peers, gated parts, diagnoses or costs."""

    rows: list[Row] = []


class Ring(Rows[RingAllocation], frozen=True):
    """Staging ring of a decode rank; the observer computes the age of its watermark."""

    ring: RingState | None = None


class Diagnosis(TypedDict):
    """What an active room waits for, as its state machine knows it; see `RoomRow` and `RoomDetail`."""

    room: str
    nonce: str
    missing: list[str]
    owed: dict[str, int]
    owed_parts: list[OwedParts]


class PeerCost(TypedDict):
    """Sizes of transfers from a prefill rank to one decode rank."""

    peer: str
    incarnation: str | None
    rank: dict[str, int] | None
    state: str
    reason: str | None  # why nothing can be predicted; None: it can be
    page_tokens: int  # tokens of a transfer page; 0: unknown
    page_bytes: int | None  # bytes of a page from the prefill instance to the decode rank's dp group; None: no plan
    own_page_bytes: int  # those of this rank, in a room for which it is elected


class Stack(AnyDocument, frozen=True):
    """Stack of the engine's thread that called last, sampled while it does not call.

    Attributes:
        call_ns: monotonic begin of the call after which it was sampled.
        frames: innermost last.
    """

    call_ns: int = 0
    frames: list[str] = []


Configuration = Rows[ConfigRow]
Registries = Rows[Bootstrap]
Peers = Rows[PeerRow]
GatedParts = Rows[GatedPart]
Diagnoses = Rows[Diagnosis]
Costs = Rows[PeerCost]

KINDS: tuple[type[AnyDocument], ...] = (
    Identity,
    State,
    Configuration,
    Registries,
    Peers,
    GatedParts,
    Ring,
    Diagnoses,
    Costs,
    Stack,
)
"""All kinds of documents."""

for _kind in KINDS:
    # msgspec prepares a type when it is first used; two threads that do so at once can crash the process.
    msgspec.convert({}, _kind)


class RegionDocuments:
    """Documents in a region, for one thread at a time.

    Args:
        builders: of an agent in this process, as for the publisher: its documents are built when they are read.

    Attributes:
        wake: eventfd of the agent's control loop; None: it publishes what it is asked for within 0.1 s.
        cells: returns the region's cells, from which `read` sees what was published anew.
    """

    def __init__(
        self, reader: RegionReader, wake: int | None = None, builders: Mapping[Document, Builder] | None = None
    ) -> None:
        self._reader = reader
        self.wake = wake
        self._builders = builders
        self.cells: Callable[[], Sequence[int]] = reader.cells
        self._asked = 0
        self._asked_ns = 0
        self.expired = False  # whether an action may have changed what was published
        self._published: dict[Document, Published] = {}  # as last read
        self._decoded: dict[Document, tuple[bytes, Any]] = {}

    def read(self, document: Document, kind: type[Kind]) -> Kind:
        """Returns a document as of `at_ns`; each document is always read as one kind. Unknown fields have defaults."""
        if self._builders and (build := self._builders.get(document)) is not None:
            fields, *rows = build()
            return msgspec.convert({**fields, "rows": rows}, kind)
        published = self._latest(document)
        if published is None:
            return kind()
        encoded_value, value = self._decoded.get(document, (None, None))
        if encoded_value != published.value:  # most are published again without a change, and decoding takes up to 1 ms
            value = decoded(published.value, kind)
            self._decoded[document] = published.value, value
        return kind() if value is None else value

    def _latest(self, document: Document) -> Published | None:
        known = self._published.get(document)
        try:
            number = self.cells()[Cell.PUBLISHED + document]
            if known is None or known.number != number:
                known = self._reader.document(document, number) or known
                if known is not None:
                    self._published[document] = known
        except RegionError:  # the file was cut short
            pass
        return known

    def are_recent(self, documents: Iterable[Document], within_ns: int) -> bool:
        """Returns whether any of these documents was published, and none of them longer than `within_ns` ago."""
        published = [found for found in map(self._latest, documents) if found is not None]
        return bool(published) and min(found.at_ns for found in published) >= time.monotonic_ns() - within_ns

    def at_ns(self, document: Document) -> int | None:
        """Returns the monotonic time as of which a document was published; None: it was not."""
        if self._builders and document in self._builders:
            return time.monotonic_ns()
        known = self._published.get(document)
        return None if known is None else known.at_ns

    def ask(self) -> bool:
        """Asks the agent to publish its documents anew; returns whether `served` will tell when it has."""
        now_ns = time.monotonic_ns()
        if self._builders is not None or (now_ns - self._asked_ns < _ASK_AGAIN_NS and not self.expired):
            return not self.served()
        try:
            self._asked, self._asked_ns = self._reader.ask(Cell.WANTED), now_ns
            self.expired = False
        except RegionError:
            return False
        if self.wake is not None:
            with contextlib.suppress(OSError):  # the agent has closed it, or it is full
                os.eventfd_write(self.wake, 1)
        return True

    def served(self) -> bool:
        """Returns whether the agent has published its documents since the latest `ask`."""
        try:
            return self._reader.cell(Cell.SERVED) >= self._asked
        except RegionError:
            return True

    def expire(self) -> None:
        """Makes the next `ask` ask, however early: an action may have changed what was published."""
        self.expired = True


def encoded(fields: Mapping[str, Any], keys: Sequence[str], rows: Sequence[msgspec.Raw]) -> bytes:
    """Returns a document as it is published; `rows` are the encoded values of its rows, in the order of `keys`."""
    whole = {**fields, "keys": keys, "rows": rows} if keys else fields
    return msgspec.msgpack.encode(whole, enc_hook=operator.index)


def decoded(value: bytes, kind: type[Kind]) -> Kind | None:
    """Returns a published document; None if it cannot be decoded, or does not have the fields' types."""
    try:
        fields = msgspec.msgpack.decode(value)
        if keys := fields.pop("keys", None):
            fields["rows"] = [dict(zip(keys, row, strict=True)) for row in fields["rows"]]
        return msgspec.convert(fields, kind)
    except Exception:  # whatever a region may contain
        return None


def grown(rows: Sequence[Any], by_ns: int) -> list[Any]:
    """Returns copies of rows of a document, which have the same keys, with their ages `by_ns` later."""
    ages = _AGES.intersection(rows[0]) if rows else ()
    found = [row.copy() for row in rows]
    for row in found:
        for key in ages:
            if row[key] is not None:
                row[key] += by_ns
    return found
