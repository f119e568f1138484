"""Records of active and finished rooms: the data behind `rooms`, `room`, `history`, `slow` and `failed`.

The control thread only stores values in a `RoomRecord`; the admin thread reads them and does all arithmetic and
formatting. A row may therefore be one update old, but no single value is torn.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from kvctl_agent.contract.snapshots import FailedRooms, Failure, Role, RoomDetail, RoomRow, TimelineEvent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.telemetry.clock import Clock

_T = TypeVar("_T")

FAILED_BYTES = 16 << 20
_RECORD_BYTES, _ITEM_BYTES = 4096, 512  # size of a record, and of one item of its lists; both above measured sizes


class Event(NamedTuple):
    """One timeline event of a room, or of one of its parts.

    Attributes:
        stage: name of the event, for example a stage of `contract.states.STAGES`.
        at_ns: monotonic time.
        writer, chunk, layers: index of the writer in its prefill instance, index of the chunk, and layers [lo, hi) of
            the part; None for an event of the whole room.
        peer: agent name at the other end; None if there is no single one.
        detail: further text.
        path, nbytes: path and size of a transferred part; "" and 0 for other events.
    """

    stage: str
    at_ns: int
    writer: int | None
    chunk: int | None
    layers: tuple[int, int] | None
    peer: str | None
    detail: str
    path: str
    nbytes: int


_BareEvent = tuple[str, int, int | None, int | None, tuple[int, int] | None, str | None, str, str, int]


class RoomRecord:
    """Progress of one room on this rank. Callers set single fields directly; the methods change several fields.

    Attributes:
        room, nonce: unsigned 64-bit numbers.
        nonces: prefill: one nonce for each decode rank that opened the room here.
        planned, sent, landed, scattered: numbers of coverage cells (writer, chunk, layer). `planned` is 0 until the
            plan is known. `sent` is None on a decode rank; `landed` and `scattered` are None on a prefill rank.
        bytes, parts: KV bytes and parts sent (prefill) or landed (decode).
        paths: number of parts by path.
        parked: number of parts that are gated now: they wait for a grant or the watermark.
        peers: agent names of the ranks at the other end.
        request_id, traceparent: the engine's id of the request and its W3C trace context; "" if it passed none.
        first_ready_at: prefill, monotonic: time of the first `ready`; the latency is measured from here.
        forward_begun_at, forward_done_at: prefill, monotonic: start and end of the forward; None if the engine did
            not report it.
    """

    __slots__ = (
        "_event_limit",
        "_events",
        "bytes",
        "chunks_ready",
        "events_dropped",
        "failure",
        "finished_at",
        "first_ready_at",
        "forward_begun_at",
        "forward_done_at",
        "key",
        "landed",
        "moved",
        "nonce",
        "nonces",
        "opened_at",
        "pages",
        "parked",
        "parts",
        "paths",
        "peers",
        "planned",
        "request_id",
        "room",
        "scattered",
        "sent",
        "state_at",
        "state_now",
        "stores",
        "tokens",
        "traceparent",
    )

    def __init__(self, room: int, nonce: int, role: Role, opened_at: int, event_limit: int) -> None:
        self.room = room
        self.nonce = nonce
        self.nonces: list[int] = []
        self.key = (room, nonce)  # key in RoomRecords; a prefill rank learns the nonce later
        self.stores = 0  # collections of RoomRecords that contain the record
        self.opened_at = opened_at
        self.finished_at: int | None = None
        self.state_now = RoomState.BOOTSTRAPPING
        self.state_at = opened_at
        self.first_ready_at: int | None = None
        self.forward_begun_at: int | None = None
        self.forward_done_at: int | None = None
        self.failure: Failure | None = None
        self.peers: list[str] = []
        self.request_id = self.traceparent = ""
        self.planned = 0
        self.sent: int | None = 0 if role == "prefill" else None
        self.landed: int | None = 0 if role == "decode" else None
        self.scattered: int | None = 0 if role == "decode" else None
        self.tokens: int | None = None
        self.pages: int | None = None
        self.bytes = 0
        self.parts = 0
        self.paths: dict[str, int] = {}
        self.parked = 0
        self.chunks_ready: dict[int, int] = {}
        self.moved = BusyTime()
        self._events: list[_BareEvent] = []
        self.events_dropped = 0
        self._event_limit = event_limit

    def state(self, new_state: RoomState, at: int) -> None:
        """Records that the room entered `new_state` at monotonic `at`."""
        self.state_now = new_state
        self.state_at = at

    def event(
        self,
        stage: str,
        at: int,
        writer: int | None = None,
        chunk: int | None = None,
        layers: tuple[int, int] | None = None,
        peer: str | None = None,
        detail: str = "",
        path: str = "",
        nbytes: int = 0,
    ) -> None:
        """Adds an `Event` to the timeline; a full timeline keeps its earliest events and only counts further ones."""
        if stage == "ready" and self.first_ready_at is None:
            self.first_ready_at = at
        if len(self._events) < self._event_limit:
            # A plain tuple costs half as much as a named tuple; the property `events` converts them.
            self._events.append((stage, at, writer, chunk, layers, peer, detail, path, nbytes))
        else:
            self.events_dropped += 1

    def part(
        self,
        path: str,
        nbytes: int,
        key: tuple[int, int, tuple[int, int]] = (0, 0, (0, 0)),
        peer: str | None = None,
        moments: Mapping[str, int] = MappingProxyType({}),
        moved: bool = False,
    ) -> int | None:
        """Counts one part that was sent (prefill) or landed (decode); arguments as for `Telemetry.part`.

        Args:
            moved: whether to add the time from the first to the last of `moments` to the room's transfer time.

        Returns:
            Monotonic ns at which the first layer group of the part's chunk was ready; None if unknown.
        """
        size: tuple[str, int] = (path, nbytes)  # in the first event only
        last = 0
        for stage, last in moments.items():
            self.event(stage, last, *key, peer, "", *size)
            size = "", 0
        self.parts += 1
        self.bytes += nbytes
        self.paths[path] = self.paths.get(path, 0) + 1
        if moved:
            self.moved.add(min(moments.values()), last)
        if (ready := moments.get("ready")) is None:
            return None
        first_ready = self.chunks_ready[key[1]] = min(ready, self.chunks_ready.get(key[1], ready))
        return first_ready

    def fail(self, failure: Failure, at: int) -> None:
        """Stores the cause of the room's failure, unless an earlier cause is stored: the first cause is reported.

        Args:
            failure: the cause.
            at: monotonic ns at which this rank learned of the failure.
        """
        if self.failure is not None:
            return
        self.failure = failure
        if self._event_limit:  # stored even beyond the limit: no other event of the room matters more
            text = f"{failure['rank']}: {failure['code']}: {failure['text']}"
            self._events.append(("fail", at, None, None, None, None, text, "", 0))

    def leave(self, peer: str, nonce: int) -> None:
        """Removes a decode rank that has recalled the room; it may open the room again, under another nonce."""
        if peer in self.peers:  # otherwise the record was rebuilt from a checkpoint, which has neither
            self.peers.remove(peer)
        if nonce in self.nonces:
            self.nonces.remove(nonce)
        self.nonce = self.nonces[0] if self.nonces else 0

    def finish(self, at: int) -> tuple[int | None, tuple[int, int] | None]:
        """Records that the room ended at monotonic `at`, unless its end is already recorded.

        Returns:
            (`latency_ns`, `overlap(at)`).
        """
        if self.finished_at is None:
            self.finished_at = at
        return self.latency_ns, self.overlap(at)

    def overlap(self, now: int) -> tuple[int, int] | None:
        """Returns the transfer time before (hidden) and after (exposed) the end of the forward, in ns.

        While the forward runs, all transfer time is hidden. Returns None on a decode rank, and if no part was sent.

        Args:
            now: monotonic time, taken as the end of the forward if that is not known yet.
        """
        if not self.moved:
            return None
        return self.moved.split(now if self.forward_done_at is None else self.forward_done_at)

    @property
    def events(self) -> list[Event]:
        """The timeline, in the order in which events were added."""
        return [Event._make(event) for event in self._events.copy()]

    @property
    def nbytes(self) -> int:
        """Upper bound of the record's memory in bytes."""
        items = len(self._events) + len(self.chunks_ready) + len(self.peers) + len(self.moved) + len(self.paths)
        text = len(self.request_id) + (len(self.failure["text"]) if self.failure is not None else 0)
        return _RECORD_BYTES + _ITEM_BYTES * items + 8 * text

    @property
    def latency_ns(self) -> int | None:
        """Time in ns from open to success (decode) or from first ready part to sent (prefill); None without success."""
        if self.finished_at is None or self.state_now is not RoomState.SUCCESS:
            return None
        begin = self.opened_at if self.sent is None else self.first_ready_at
        return None if begin is None else self.finished_at - begin


class BusyTime:
    """Union of time intervals in monotonic ns; one thread calls `add`, any thread may call the other methods.

    `add` replaces the tuple of intervals as a whole, so that readers always get a consistent tuple.
    """

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: tuple[tuple[int, int], ...] = ()

    def add(self, start: int, end: int) -> None:
        """Adds the interval from `start` to `end`; fast if intervals are added roughly in order of time."""
        spans = self._spans
        index = len(spans)
        later: tuple[tuple[int, int], ...] = ()
        while index and spans[index - 1][1] >= start:
            index -= 1
            first, last = spans[index]
            if first > end:
                later = (spans[index], *later)
            else:
                start, end = min(start, first), max(end, last)
        self._spans = (*spans[:index], (start, end), *later)

    def __len__(self) -> int:
        return len(self._spans)

    def split(self, moment: int) -> tuple[int, int]:
        """Returns the total length of the union before and after the time `moment`, in ns."""
        before = after = 0
        for start, end in self._spans:
            before += max(0, min(end, moment) - start)
            after += max(0, end - max(start, moment))
        return before, after


class _FailedRecords:
    """Records of failed rooms, bounded in number and bytes.

    A full store drops the oldest room of the most frequent failure code, so that a burst of one cause does not evict
    rooms that failed for another. One thread calls `add`; any thread may call the other methods.

    Attributes:
        dropped: number of rooms dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_code: dict[str, deque[tuple[RoomRecord, int]]] = {}
        self._count = self._bytes = 0
        self.dropped = 0

    def add(self, record: RoomRecord, code: str) -> list[RoomRecord]:
        """Adds a record; returns the records that it displaces."""
        nbytes = record.nbytes
        displaced: list[RoomRecord] = []
        self._by_code.setdefault(code, deque()).append((record, nbytes))
        self._count += 1
        self._bytes += nbytes
        while self._count > self._limit or (self._bytes > FAILED_BYTES and self._count > 1):
            most = max(self._by_code, key=lambda code: len(self._by_code[code]))
            oldest, nbytes = self._by_code[most].popleft()
            displaced.append(oldest)
            if not self._by_code[most]:
                del self._by_code[most]
            self._count -= 1
            self._bytes -= nbytes
            self.dropped += 1
        return displaced

    def records(self) -> list[RoomRecord]:
        """Returns the stored records, latest first."""
        kept = [record for ring in _copy(self._by_code.values()) for record, _ in _copy(ring)]
        return sorted(kept, key=lambda record: record.state_at, reverse=True)


class RoomRecords:
    """Records of the active rooms, and of limited numbers of the latest, slowest and failed finished rooms.

    A room number may be reused, so several records may have the same number and different nonces. One thread calls
    `open` and `close`; any thread may call the other methods.
    """

    def __init__(
        self, clock: Clock, agent_name: str, role: Role, history: int, timeline_events: int, failed: int
    ) -> None:
        self._clock = clock
        self._agent = agent_name
        self._role: Role = role
        self._timeline_events = timeline_events
        self._active: dict[tuple[int, int], RoomRecord] = {}
        self._latest: deque[RoomRecord] = deque()
        self._slowest: list[tuple[int, int, RoomRecord]] = []  # latency, number of the room, record; fastest first
        self._failed = _FailedRecords(failed)
        self._history = history
        self._by_room: dict[int, dict[RoomRecord, None]] = {}  # every stored record, in the order of opening
        self._order = itertools.count()

    def open(self, room: int, nonce: int) -> RoomRecord:
        """Creates the record of a new active room; a prefill rank, which does not know the nonce yet, passes 0.

        Raises:
            ValueError: a room with this number and nonce is already active.
        """
        key = (room, nonce)
        if key in self._active:
            raise ValueError(f"room {room} with nonce {nonce} is already open")
        record = RoomRecord(room, nonce, self._role, self._clock.now_ns(), self._timeline_events)
        record.stores = 1
        self._by_room.setdefault(room, {})[record] = None
        self._active[key] = record
        return record

    def close(self, record: RoomRecord) -> None:
        """Moves a record from the active to the finished rooms, and sets its end time if it has none. Idempotent."""
        if self._active.get(record.key) is not record:
            return
        record.finish(self._clock.now_ns())
        # Added to the finished rooms before it is removed: a concurrent reader may see it twice but never misses it.
        displaced = [record]  # from the active rooms
        record.stores += 1
        self._latest.append(record)
        if len(self._latest) > self._history:
            displaced.append(self._latest.popleft())
        if record.failure is not None:
            record.stores += 1
            displaced += self._failed.add(record, record.failure["code"])
        latency, slowest = record.latency_ns, self._slowest
        if latency is not None and (len(slowest) < self._history or (slowest and latency >= slowest[0][0])):
            record.stores += 1
            insort(slowest, (latency, next(self._order), record))
            if len(slowest) > self._history:
                displaced.append(slowest.pop(0)[2])
        del self._active[record.key]
        for each in displaced:
            each.stores -= 1
            if not each.stores:
                self._remove(each)

    def _remove(self, record: RoomRecord) -> None:
        """Removes a record that no collection contains any more from the index."""
        same_number = self._by_room[record.room]
        del same_number[record]
        if not same_number:
            del self._by_room[record.room]

    def active(self) -> list[RoomRecord]:
        """Returns the active records, oldest first."""
        return list(self._active.copy().values())

    def find(self, room: int) -> list[RoomRecord]:
        """Returns all stored records with this room number: active ones first, then finished ones, latest first."""
        return sorted(_copy(self._by_room.get(room, ())), key=_end_order)

    def states(self) -> dict[str, int]:
        """Returns the number of active rooms by state label."""
        states = [record.state_now for record in self.active()]
        return {state.label: states.count(state) for state in dict.fromkeys(states)}

    def rows(self, state: str | None, limit: int) -> list[RoomRow]:
        """Returns rows of active rooms, oldest first; `state` is a state label, or None for all."""
        chosen = (record for record in self.active() if state is None or record.state_now.label == state)
        return [self.row(record) for record in itertools.islice(chosen, limit)]

    def history(self, limit: int) -> list[RoomRow]:
        """Returns rows of finished rooms, latest first."""
        return [self.row(record) for record in itertools.islice(reversed(_copy(self._latest)), limit)]

    def failed(self, limit: int) -> FailedRooms:
        """Returns rows of failed rooms, latest first, including active ones, and how many were dropped."""
        dropped, kept = self._failed.dropped, self._failed.records()
        active = [record for record in self.active() if record.failure is not None]
        found = list(dict.fromkeys([*active, *kept]))
        found.sort(key=lambda record: record.state_at, reverse=True)
        return {
            "rooms": [self.row(record) for record in found[:limit]],
            "kept": len(found),
            "dropped_total": dropped,
        }

    def slow(self, limit: int) -> list[RoomRow]:
        """Returns rows of the rooms with the highest latency, slowest first; failed rooms have no latency."""
        slowest = itertools.islice(reversed(self._slowest.copy()), limit)
        return [self.row(record) for _, _, record in slowest]

    def detail(self, room: int) -> list[RoomDetail]:
        """Returns the row and timeline of every record with this room number, in the order of `find`."""
        return [
            {
                **self.row(record),
                "timeline": [self._timeline_event(event) for event in record.events],
                "timeline_dropped": record.events_dropped,
                "owed_parts": [],
            }
            for record in self.find(room)
        ]

    def row(self, record: RoomRecord) -> RoomRow:
        """Returns the values of a record as a row for admin replies."""
        finished_at, done_at = record.finished_at, record.forward_done_at
        until = finished_at if finished_at is not None else self._clock.now_ns()
        hidden, exposed = record.overlap(until) or (None, None)
        return {
            "room": str(record.room),
            "nonce": str(record.nonce),
            "nonces": [str(nonce) for nonce in record.nonces.copy()],
            "request_id": record.request_id or None,
            "agent": self._agent,
            "role": self._role,
            "state": record.state_now.label,
            "state_age_ns": max(0, until - record.state_at),
            "age_ns": max(0, until - record.opened_at),
            "opened_at_ns": self._clock.wall_ns(record.opened_at),
            "finished_at_ns": None if finished_at is None else self._clock.wall_ns(finished_at),
            "peers": record.peers.copy(),
            "coverage": {
                "planned": record.planned,
                "sent": record.sent,
                "landed": record.landed,
                "scattered": record.scattered,
            },
            "tokens": record.tokens,
            "pages": record.pages,
            "bytes": record.bytes,
            "parts": record.parts,
            "paths": record.paths.copy(),
            "parked": record.parked,
            "latency_ns": record.latency_ns,
            "forward_done_at_ns": None if done_at is None else self._clock.wall_ns(done_at),
            "hidden_ns": hidden,
            "exposed_ns": exposed,
            "missing": [],
            "owed": {},
            "unscattered": None if record.landed is None else record.landed - (record.scattered or 0),
            "failure": record.failure,
        }

    def _timeline_event(self, event: Event) -> TimelineEvent:
        moved = f"{event.path} {event.nbytes} bytes" if event.nbytes else event.path
        return {
            "at_ns": self._clock.wall_ns(event.at_ns),
            "agent": self._agent,
            "stage": event.stage,
            "writer": event.writer,
            "chunk": event.chunk,
            "layers": None if event.layers is None else list(event.layers),
            "peer": event.peer,
            "detail": ", ".join(text for text in (event.detail, moved) if text),
        }


def _end_order(record: RoomRecord) -> float:
    """Sort key: active records first, then finished ones, latest first."""
    return -math.inf if record.finished_at is None else -record.finished_at


def _copy(items: Collection[_T]) -> list[_T]:
    """Copies a collection that another thread may change; starts over if it changes during the copy."""
    while True:
        try:
            return list(items)
        except RuntimeError:
            continue
