"""Active and finished rooms: the data behind the commands `rooms`, `room`, `history`, `slow` and `failed`.

One thread at a time uses them.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvctl_agent.contract.snapshots import FailedRooms, Failure, Role, RoomDetail, RoomRow, TimelineEvent
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.durations import BusyTime
from kvctl_agent.telemetry.records import ROOM_FIELDS, PartKey
from kvctl_agent.telemetry.room_records import RoomValues

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


class Part(NamedTuple):
    """A part that was sent or received, as `Telemetry.part` has recorded it.

    Attributes:
        key: writer, chunk and layers [lo, hi).
        peer: agent name at the other end; None: unknown.
        path: bulk, slice, staged, direct; on a decode rank staged, or in-place for all others.
        nbytes: KV bytes.
        moments: monotonic end of each stage by name; stages not observed are absent.
        forward_done_ns: prefill: end of the forward, or the end of the part while it ran; None on a decode rank.
    """

    key: PartKey
    peer: str | None
    path: str
    nbytes: int
    moments: Mapping[str, int]
    forward_done_ns: int | None = None

    def events(self) -> Iterator[Event]:
        """Yields an event for each moment; the first one has path and size."""
        path, nbytes = self.path, self.nbytes
        for stage, at in self.moments.items():
            yield Event(stage, at, *self.key, self.peer, "", path, nbytes)
            path, nbytes = "", 0


_BareEvent = tuple[str, int, int | None, int | None, tuple[int, int] | None, str | None, str, str, int]


class FoldedRoom(RoomValues):
    """What is known of one room on this rank, from the records that `RoomRecord` has written.

    Attributes:
        moved: prefill: times at which parts of the room were under way.
        paths: number of parts by path.
        planned: None: its cells are unknown, as of a room that SGLang's own backend transfers.
    """

    def __init__(self, serial: int, room: int, nonce: int, role: Role, opened_at: int, event_limit: int) -> None:
        super().__init__(serial, room, nonce, role, opened_at)
        self.paths: dict[str, int] = {}
        self.chunks_ready: dict[int, int] = {}
        self.moved = BusyTime()
        self._events: list[_BareEvent | Part | Event] = []  # an `Event` is the failure, which is not counted
        self._event_count = 0  # with those that were dropped
        self._event_limit = event_limit

    def update(self, *values: Any) -> None:
        """Takes over the values of a record, in the order of `records.ROOM_FIELDS`."""
        self.__dict__.update(zip(ROOM_FIELDS, values, strict=True))

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
        if self._event_count < self._event_limit:
            # A plain tuple costs half as much as a named tuple; the property `events` converts them.
            self._events.append((stage, at, writer, chunk, layers, peer, detail, path, nbytes))
        self._event_count += 1

    def part(self, part: Part) -> int | None:
        """Counts one part that was sent (prefill) or landed (decode), and adds its moments to the timeline.

        Returns:
            Monotonic ns at which the first layer group of the part's chunk was ready; None if unknown.
        """
        moments = part.moments
        if moments and self._event_count < self._event_limit:
            self._events.append(part)
        self._event_count += len(moments)
        self.parts += 1
        self.bytes += part.nbytes
        self.paths[part.path] = self.paths.get(part.path, 0) + 1
        if part.forward_done_ns is not None and moments:
            times = list(moments.values())
            self.moved.add(min(times), times[-1])
        if (ready := moments.get("ready")) is None:
            return None
        if self.first_ready_at is None:
            self.first_ready_at = ready
        chunk = part.key[1]
        first_ready = self.chunks_ready[chunk] = min(ready, self.chunks_ready.get(chunk, ready))
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
            self._events.append(Event("fail", at, None, None, None, None, text, "", 0))

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
        found: list[Event] = []
        left = self._event_limit
        for each in self._events:
            if isinstance(each, Part):
                found += itertools.islice(each.events(), left)
                left -= len(each.moments)
            elif isinstance(each, Event):
                found.append(each)
            else:
                found.append(Event._make(each))
                left -= 1
        return found

    @property
    def events_dropped(self) -> int:
        """Number of events that the timeline had no room for."""
        return max(0, self._event_count - self._event_limit)

    @property
    def nbytes(self) -> int:
        """Upper bound of the room's memory in bytes."""
        events = min(self._event_count, self._event_limit) + 1  # of a failure, which is stored beyond the limit
        items = events + len(self.chunks_ready) + len(self.peers) + len(self.moved) + len(self.paths)
        text = len(self.request_id) + (len(self.failure["text"]) if self.failure is not None else 0)
        return _RECORD_BYTES + _ITEM_BYTES * items + 8 * text


class _FailedRecords:
    """Records of failed rooms, bounded in number and bytes.

    A full store drops the oldest room of the most frequent failure code, so that a burst of one cause does not evict
    rooms that failed for another.

    Attributes:
        dropped: number of rooms dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_code: dict[str, deque[tuple[FoldedRoom, int]]] = {}
        self._count = self._bytes = 0
        self.dropped = 0

    def add(self, record: FoldedRoom, code: str) -> None:
        nbytes = record.nbytes
        self._by_code.setdefault(code, deque()).append((record, nbytes))
        self._count += 1
        self._bytes += nbytes
        while self._count > self._limit or (self._bytes > FAILED_BYTES and self._count > 1):
            most = max(self._by_code, key=lambda code: len(self._by_code[code]))
            _, nbytes = self._by_code[most].popleft()
            if not self._by_code[most]:
                del self._by_code[most]
            self._count -= 1
            self._bytes -= nbytes
            self.dropped += 1

    def records(self) -> list[FoldedRoom]:
        """Returns the stored records, latest first."""
        kept = [record for ring in self._by_code.values() for record, _ in ring]
        return sorted(kept, key=lambda record: record.state_at, reverse=True)


class RoomRecords:
    """The active rooms, and limited numbers of the latest, slowest and failed finished rooms.

    A room number may be reused, so several rooms may have the same number and different nonces.
    """

    def __init__(
        self, clock: Clock, agent_name: str, role: Role, history: int, timeline_events: int, failed: int
    ) -> None:
        self._clock = clock
        self._agent = agent_name
        self._role: Role = role
        self._timeline_events = timeline_events
        self._active: dict[int, FoldedRoom] = {}  # by serial
        self._latest: deque[FoldedRoom] = deque(maxlen=history)
        self._slowest: list[tuple[int, int, FoldedRoom]] = []  # latency, number of the room, record; fastest first
        self._failed = _FailedRecords(failed)
        self._history = history
        self._order = itertools.count()
        self._next_serial = 1

    def open(self, room: int, nonce: int, at_ns: int | None = None, serial: int | None = None) -> FoldedRoom:
        """Creates the record of a new active room; a prefill rank, which does not know the nonce yet, passes 0.

        Args:
            at_ns: monotonic time; None: now.
            serial: of the room; None: the next one. An active room with this serial is replaced.
        """
        if serial is None:
            serial = self._next_serial
        self._next_serial = max(serial + 1, self._next_serial)
        if (former := self._active.get(serial)) is not None:
            self.forget(former)
        opened_at = self._clock.now_ns() if at_ns is None else at_ns
        record = FoldedRoom(serial, room, nonce, self._role, opened_at, self._timeline_events)
        self._active[serial] = record
        return record

    def close(self, record: FoldedRoom) -> None:
        """Moves a record from the active to the finished rooms, and sets its end time if it has none. Idempotent."""
        if self._active.get(record.serial) is not record:
            return
        record.finish(self._clock.now_ns())
        del self._active[record.serial]
        self._latest.append(record)
        if record.failure is not None:
            self._failed.add(record, record.failure["code"])
        if (latency := record.latency_ns) is not None:
            insort(self._slowest, (latency, next(self._order), record))
            del self._slowest[: -self._history or None]

    def forget(self, record: FoldedRoom) -> None:
        """Removes an active room whose end is unknown."""
        del self._active[record.serial]

    def get(self, serial: int) -> FoldedRoom | None:
        """Returns the active room with this serial."""
        return self._active.get(serial)

    def __len__(self) -> int:
        return len(self._active)

    def active(self) -> list[FoldedRoom]:
        """Returns the active records, oldest first."""
        return list(self._active.values())

    def find(self, room: int) -> list[FoldedRoom]:
        """Returns all stored records with this room number: active ones first, then finished ones, latest first."""
        slowest = [record for _, _, record in self._slowest]
        stored = [*self._active.values(), *self._latest, *self._failed.records(), *slowest]
        return sorted({each: None for each in stored if each.room == room}, key=_end_order)

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
        return [self.row(record) for record in itertools.islice(reversed(self._latest), limit)]

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
        slowest = itertools.islice(reversed(self._slowest), limit)
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

    def row(self, record: FoldedRoom) -> RoomRow:
        """Returns the values of a record as a row for admin replies."""
        finished_at, done_at = record.finished_at, record.forward_done_at
        until = finished_at if finished_at is not None else self._clock.now_ns()
        hidden, exposed = record.overlap(until) or (None, None)
        return {
            "room": str(record.room),
            "nonce": str(record.nonce),
            "nonces": [str(nonce) for nonce in record.nonces],
            "request_id": record.request_id or None,
            "agent": self._agent,
            "role": self._role,
            "state": record.state_now.label,
            "state_age_ns": max(0, until - record.state_at),
            "age_ns": max(0, until - record.opened_at),
            "opened_at_ns": self._clock.wall_ns(record.opened_at),
            "finished_at_ns": None if finished_at is None else self._clock.wall_ns(finished_at),
            "peers": record.peers.copy(),
            "coverage": None
            if record.planned is None
            else {
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
            "unscattered": None
            if record.planned is None or record.landed is None
            else record.landed - (record.scattered or 0),
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


def _end_order(record: FoldedRoom) -> float:
    """Sort key: active records first, then finished ones, latest first."""
    return -math.inf if record.finished_at is None else -record.finished_at
