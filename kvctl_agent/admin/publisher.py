"""Publishes an agent's documents in its region, within a small share of the time of the thread that does it."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from kvctl_agent.observer.documents import Builder, encoded
from kvctl_agent.telemetry.region import DOCUMENT_BYTES, Cell, Document, RegionWriter

_EVERY_NS = 1_000_000_000
_AGAIN_NS = 60 * _EVERY_NS  # after a builder has raised
_UNASKED_SHARE = 0.001
_SHARE = 0.005
_MOST_SAVED_NS = 5_000_000
_SLICE_NS = 1_000_000  # a row, which is not divided, may take longer
_FIRST: Final = Document.STATE
_FIRST_EVERY_NS = 100_000_000  # at least, while no time is left
_FRAME_BYTES = 4096  # of a document's size, for what is not rows
_encode: Final = msgspec.msgpack.Encoder(enc_hook=operator.index).encode  # some integers of engines are NumPy's
_keep: Final = msgspec.Raw


class DocumentPublisher:
    """Publishes documents in turns of the control loop or of the thread for SGLang's events.

    It publishes all documents when a reader asks for them, and each once a second.

    It takes at most 0.5 % of the processor time of one core, of which it saves up to 5 ms, and at most 1 ms at once: a
    document with many rows is built in several turns. A document that nobody asks for takes at most 0.1 %, so a large
    one is published less often. The state, which is small, is published whatever the others have taken.

    Measured in ms: all documents of a rank with one peer and 20 rooms 0.5, another peer 0.02, another room 0.01. Times
    are processor times, and builders make no calls that release the interpreter: beside an engine that spins, each of
    them would cost a wait of 16 to 170 ms.

    Args:
        region: the agent's region.
        builders: by document, in the order of publication.
        versions: values of documents that seldom change; a document is not built again until its value has changed.

    Attributes:
        spent_ns: processor time that its turns have taken.
    """

    def __init__(
        self,
        region: RegionWriter,
        builders: Mapping[Document, Builder],
        versions: Mapping[Document, Callable[[], object]] | None = None,
    ) -> None:
        self._region = region
        self._builders = builders
        self._versions = versions or {}
        self._published: dict[Document, object] = {}
        self._due_ns = dict.fromkeys(builders, 0)
        self._next_due_ns = 0
        self._queue: deque[Document] = deque()
        self._current: _Building | None = None
        self._wanted = 0
        self._next_slice_ns = self._first_ns = 0
        self.spent_ns = 0
        self._saved_ns = float(_MOST_SAVED_NS)
        self._saved_at_ns = time.monotonic_ns()

    def turn(self) -> None:
        """Publishes what is due, as far as time is left."""
        wanted, now_ns = self._region.cells[Cell.WANTED], time.monotonic_ns()
        if now_ns < self._next_due_ns and wanted == self._wanted and not (self._queue or self._current):
            return
        if wanted != self._wanted:
            self._wanted = wanted
            self._queue = deque(self._builders)
        elif now_ns >= self._next_due_ns:
            self._next_due_ns = now_ns + _EVERY_NS // 4
            for document, due_ns in self._due_ns.items():
                if now_ns >= due_ns and document not in self._queue:
                    (self._queue.appendleft if document is _FIRST else self._queue.append)(document)
        self._saved_ns = min(_MOST_SAVED_NS, self._saved_ns + (now_ns - self._saved_at_ns) * _SHARE)
        self._saved_at_ns = now_ns
        began_ns = time.thread_time_ns()
        try:
            if self._saved_ns > 0:
                if now_ns >= self._next_slice_ns:
                    self._next_slice_ns = now_ns + 2 * _SLICE_NS
                    self._publish(began_ns + _SLICE_NS)
            elif self._first_waits and now_ns >= self._first_ns + _FIRST_EVERY_NS:
                self._go_on(began_ns + _SLICE_NS)
        finally:
            spent_ns = time.thread_time_ns() - began_ns
            self.spent_ns += spent_ns
            self._saved_ns -= spent_ns

    def wait_s(self) -> float:
        """Returns the seconds until the next turn can publish; infinity if the loop's own turns come early enough."""
        if not (self._queue or self._current):
            return float("inf")
        if self._saved_ns <= 0:
            return min(-self._saved_ns / _SHARE, _FIRST_EVERY_NS) * 1e-9
        return max(0, self._next_slice_ns - time.monotonic_ns()) * 1e-9

    def idle(self) -> bool:
        """Returns that the loop may end."""
        return True

    def publish_all(self) -> None:
        """Publishes all documents at once, before the loop runs or after it has ended."""
        self._wanted = self._region.cells[Cell.WANTED]
        self._queue, self._current = deque(self._builders), None
        self._publish(None)
        self._due_ns, self._next_due_ns = dict.fromkeys(self._builders, 0), 0

    @property
    def _first_waits(self) -> bool:
        return bool(self._queue) and self._queue[0] is _FIRST

    def _publish(self, until_ns: int | None) -> None:
        """Goes on until all that is pending is published, or until processor time `until_ns` of this thread."""
        while self._queue or self._current:
            self._go_on(until_ns)
            if until_ns is not None and time.thread_time_ns() >= until_ns:
                break
        if not (self._queue or self._current):
            self._region.cells[Cell.SERVED] = self._wanted

    def _go_on(self, until_ns: int | None) -> None:
        """Goes on with the document that is being built, or with the next one; the state goes before all others."""
        if self._current is not None and not self._first_waits:
            building, self._current = self._current, None  # dropped if its builder raises
        else:
            document = self._queue.popleft()
            if (version := self._versions.get(document)) is not None:
                if self._published.get(document, self) == version():
                    return
                self._published[document] = version()
            self._due_ns[document] = time.monotonic_ns() + _AGAIN_NS
            building = _Building(document, self._builders[document]())
        document, began_ns = building.document, time.thread_time_ns()
        complete = building.go_on(until_ns)
        building.cost_ns += time.thread_time_ns() - began_ns
        if not complete:
            self._current = building
            return
        self._region.publish(document, building.encoded(), building.at_ns)
        if document is _FIRST:
            self._first_ns = building.at_ns
            self._due_ns[document] = building.at_ns + _EVERY_NS
        else:
            self._due_ns[document] = building.at_ns + max(_EVERY_NS, round(building.cost_ns / _UNASKED_SHARE))


class _Building:
    """A document that is being built.

    Attributes:
        at_ns: monotonic time of its begin.
        cost_ns: processor time spent on it.
    """

    def __init__(self, document: Document, pieces: Iterator[Mapping[str, Any]]) -> None:
        self.document = document
        self.at_ns = time.monotonic_ns()
        self.cost_ns = 0
        self._pieces = pieces
        self._fields = next(pieces)
        self._keys: list[str] = []
        self._rows: list[msgspec.Raw] = []
        self._left = DOCUMENT_BYTES[document] - _FRAME_BYTES

    def go_on(self, until_ns: int | None) -> bool:
        """Builds further rows until processor time `until_ns`; returns whether all are there, or those that fit."""
        for row in self._pieces:
            value = _encode(list(row.values()))
            self._left -= len(value)
            if self._left < 0:
                return True
            self._keys = self._keys or list(row)
            self._rows.append(_keep(value))
            if until_ns is not None and time.thread_time_ns() >= until_ns:
                return False
        return True

    def encoded(self) -> bytes:
        return encoded(self._fields, self._keys, self._rows)
