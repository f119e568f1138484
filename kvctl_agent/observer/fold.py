"""Fold: everything that an agent's region tells about its rooms, transfers, counters and events, for readers.

The agent only writes records, values and counters (`telemetry.hub`). Rates, histograms, stage times, timelines and
finished rooms are computed here, in the observer's process, from the records in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvctl_agent.contract.health import FINISHED_NS
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.observer.flight_recorder import RecordedEvents
from kvctl_agent.observer.metrics import Metrics
from kvctl_agent.observer.rates import RecentEnds, SpanRate
from kvctl_agent.observer.room_records import FoldedRoom, Part, RoomRecords
from kvctl_agent.observer.stage_times import StageTimes
from kvctl_agent.observer.transfer_times import TransferTimes
from kvctl_agent.telemetry import records as rec
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.durations import Latencies
from kvctl_agent.telemetry.flight_recorder import Entry
from kvctl_agent.telemetry.metrics import Totals, whole
from kvctl_agent.telemetry.region import MOST_COUNTERS, Cell, Document, RegionReader

RATE_WINDOW_NS = 10_000_000_000
_MOST_ACTIVE = 1 << 17  # rooms: no agent has as many, and a damaged log must not exhaust the memory
_MOST_IN_BASE = 1 << 20  # rooms that were opened, ended or written during one answer
_MOST_PEERS = 1 << 14  # of one room
_MOST_PATHS = 32  # of one room
_MOST_RESUMED = 1 << 53  # positions and numbers of events; more is damage
_decode_series: Final = msgspec.msgpack.Decoder(list[tuple[str, tuple[str, ...]]]).decode


class Fold:
    """What the records of one agent amount to; one thread at a time uses it.

    Attributes:
        complete: whether it knows all active rooms.
        rooms, recorder, stages, rate, latencies, recent_ends, metrics, transfers: see their classes.
        replaying: whether an earlier observer has applied the same records: histograms, which begin anew with each
            observer, would count them twice, and spans would be exported twice.
        on_finish: called with each finished room.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        clock: Clock,
        *,
        history: int,
        failed: int,
        timeline_events: int,
        recorder_events: int,
    ) -> None:
        self.clock = clock
        self.metrics = Metrics()
        self.recorder = RecordedEvents(clock, name, recorder_events)
        self.rooms = RoomRecords(clock, name, role, history, timeline_events, failed)
        self.stages = StageTimes(name)
        self.rate = SpanRate(RATE_WINDOW_NS)
        self.latencies = Latencies()
        self.recent_ends = RecentEnds(FINISHED_NS)
        self.transfers = TransferTimes()
        self.complete = True
        self.replaying = False
        self.on_finish: Callable[[FoldedRoom], None] | None = None
        self._arrived_ns = 0  # decode: time at which the latest part was in its pages
        self._base: set[int] | None = None  # serials of rooms that were written, opened or ended since `BaseBegun`
        self._base_until = 0
        self._base_wanted = 0  # number of the latest request for the active rooms
        self._handlers: dict[int, Callable[..., None]] = {
            rec.OPENED: self._opened,
            rec.ROOM: self._updated,
            rec.PEERS: self._peers,
            rec.EVENT: self._event,
            rec.PART: self._part,
            rec.FAILED: self._failed,
            rec.FINISHED: self._finished,
            rec.NOTED: self._noted,
            rec.TRANSFER_BEGUN: self._transfer_begun,
            rec.TRANSFER_ARRIVED: self.transfers.arrived,
            rec.TRANSFER_CANCELLED: self.transfers.cancel,
            rec.BASE_BEGUN: self._base_begun,
            rec.BASE_ROOM: self._base_room,
            rec.BASE_ENDED: self._base_ended,
            rec.SEVERAL: self._several,
        }

    def apply(self, record: bytes) -> None:
        """Applies one record; one that is damaged, or of another version, is only counted."""
        try:
            kind, fields = rec.decode(record)
            self._handlers[kind](*fields)
        except Exception:  # nothing that a record holds may stop the fold
            self.metrics.add("kvctl_log_gaps_total", 1, "unreadable")

    def lose(self, wanted: int) -> None:
        """Notes that records were lost before or between those that are applied next.

        Args:
            wanted: number of the request for the active rooms; answers to earlier ones may lack records.
        """
        self._base, self._base_wanted = None, wanted
        self.complete = False

    # ---- parts and ends ----------------------------------------------------------------------------------------

    def _add_part(self, record: FoldedRoom, part: Part) -> None:
        """Adds a part to its room's timeline, the histograms, the stage times and the rate."""
        moments, last = part.moments, 0
        first_ready = record.part(part)
        observe = None if self.replaying else self.metrics.observe
        for stage, at in moments.items():
            if last and observe is not None:
                observe("kvctl_stage_seconds", (at - last) / 1e9, stage)
            last = at
        self.stages.add(part, first_ready)
        if part.forward_done_ns is not None:
            first = min(moments.values())
        else:
            # A decode rank does not see the start of a write, and of a write directly into the pages only its end.
            # The part's bytes are spread over the time since the previous part, or since the room was opened.
            first = max(record.opened_at, self._arrived_ns)
            self._arrived_ns = max(last, self._arrived_ns)
        self.rate.add(min(first, last), last, part.nbytes)

    def _end(self, record: FoldedRoom, now_ns: int) -> None:
        latency = record.finish(now_ns)
        if latency is None:
            self.transfers.cancel(record.room, now_ns)
        else:
            if record.sent is not None:
                path = max(record.paths, key=lambda path: record.paths[path], default="")
                self.transfers.end(record.room, record.peers, path, now_ns)
            self.latencies.add(latency)
            self.rate.room(now_ns)
            self._observe("kvctl_room_seconds", latency / 1e9)
            if (overlap := record.overlap(now_ns)) is not None:
                hidden, exposed = overlap
                self._observe("kvctl_transfer_hidden_seconds", hidden / 1e9)
                self._observe("kvctl_transfer_exposed_seconds", exposed / 1e9)
        self.recent_ends.add(record.state_now.label, now_ns)
        self.rooms.close(record)
        if self.on_finish is not None and not self.replaying:
            self.on_finish(record)

    def _observe(self, name: str, seconds: float, *labels: str) -> None:
        if not self.replaying:
            self.metrics.observe(name, seconds, *labels)

    # ---- records, with the fields that `records.FIELDS` lists --------------------------------------------------

    def _several(self, records: list[bytes]) -> None:
        for record in records:
            self.apply(record)

    def _opened(self, serial: int, room: int, nonce: int, at_ns: int) -> None:
        if len(self.rooms) < _MOST_ACTIVE:
            self.rooms.open(room, nonce, at_ns, serial)
            self._note_in_base(serial)  # it may be below `_base_until`, but not be in the answer

    def _updated(self, serial: int, *values: Any) -> None:
        if (room := self.rooms.get(serial)) is not None:
            room.update(serial, *values)

    def _peers(self, serial: int, first: int, peers: list[str], nonces: list[int]) -> None:
        room = self.rooms.get(serial)
        if room is not None and first <= len(room.peers) < _MOST_PEERS:
            room.peers[first:] = peers
            room.nonces[first:] = nonces

    def _event(self, serial: int, *event: Any) -> None:
        if (room := self.rooms.get(serial)) is not None:
            room.event(*event)

    def _part(self, serial: int, *fields: Any) -> None:
        room, part = self.rooms.get(serial), Part(*fields)
        if room is not None and (part.path in room.paths or len(room.paths) < _MOST_PATHS):
            self._add_part(room, part)

    def _failed(self, serial: int, rank: str, code: str, failed_ns: int, text: str, at_ns: int) -> None:
        if (room := self.rooms.get(serial)) is not None:
            room.fail({"rank": rank, "code": code, "at_ns": failed_ns, "text": text}, at_ns)

    def _finished(self, serial: int, *values: Any) -> None:
        *values, at_ns = values  # type: ignore[assignment]
        room = self.rooms.get(serial) or self._open_late(serial, *values)  # its opening was lost
        room.update(serial, *values)
        self._end(room, at_ns)
        self._note_in_base(serial)

    def _open_late(self, serial: int, room: int, nonce: int, opened_at: int, *_: Any) -> FoldedRoom:
        return self.rooms.open(room, nonce, opened_at, serial)

    def _noted(self, *entry: Any) -> None:
        self.recorder.add(Entry(*entry))

    def _transfer_begun(self, room: int, tokens: int, at_ns: int) -> None:
        if len(self.transfers) < _MOST_ACTIVE:
            self.transfers.begin(room, tokens, at_ns)

    def _base_begun(self, _: int, next_serial: int) -> None:
        self._base, self._base_until = set(), next_serial

    def _base_room(self, serial: int, *values: Any) -> None:
        room = self.rooms.get(serial)
        if room is None:
            if len(self.rooms) >= _MOST_ACTIVE or (self._base is not None and serial in self._base):
                return  # in the latter case the room ended while another thread wrote this record
            room = self._open_late(serial, *values)
        room.update(serial, *values)
        self._note_in_base(serial)

    def _note_in_base(self, serial: int) -> None:
        if self._base is not None and len(self._base) < _MOST_IN_BASE:
            self._base.add(serial)

    def _base_ended(self, number: int) -> None:
        if self._base is None or number < self._base_wanted:
            return
        for room in self.rooms.active():
            if room.serial < self._base_until and room.serial not in self._base:
                self.rooms.forget(room)  # its end was among the records that were lost
        self.transfers.keep({room.room for room in self.rooms.active()}, self.clock.now_ns())
        self._base = None
        self.complete = True


def limits_of(settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the keyword arguments of `Fold` that an agent's configuration sets."""
    events = {key: settings[key] for key in ("timeline_events", "recorder_events")}
    return {"history": settings["history_rooms"], "failed": settings["failed_rooms"], **events}


class FoldedRegion:
    """A region's reader, and the fold of what it has read.

    Args:
        before: called before reading; for readers in the agent's process, which have it write what it has not yet.
        limits: keyword arguments of `Fold`.
    """

    def __init__(self, reader: RegionReader, before: Callable[[], None] = lambda: None, **limits: int) -> None:
        header = reader.header
        role: Role = "prefill" if header.role == "prefill" else "decode"
        self.reader = reader
        self.fold = Fold(header.name, role, Clock(header.clock_offset_ns), **limits)
        self._before = before
        self.fold.metrics.written = self._written
        self._places: dict[str, list[tuple[tuple[str, ...], int]]] = {}  # of the counters: labels and place, by name
        self._counter_count = 0
        self._series_number = self._places_number = 0  # of publications of the series: of the latest, and as in _places
        self._values: tuple[float, ...] | None = None  # of the counters; None: not read since `catch_up`
        self._placed = False  # whether the series were looked at since then, once: all counters are as of one moment
        self._resumed = False

    def catch_up(self) -> Fold:
        """Reads what was written since the last call, and returns the fold.

        If records were lost, it asks the agent for its active rooms; until they come, `complete` is false.

        Raises:
            RegionError: the region can no longer be read.
        """
        self._before()
        if self._read():
            self._before()  # an agent that is asked in its own process answers at once
            self._read()
        return self.fold

    def _read(self) -> bool:
        """Reads the region once; returns whether that has made it ask for the active rooms."""
        reader, fold = self.reader, self.fold
        cells, lost = reader.cells(), False
        if not self._resumed:
            self._resumed = True
            lost = self._replay(cells)
        if cells[Cell.WRITTEN] != reader.position:
            lost = self._apply() or lost
        self._series_number, self._values, self._placed = cells[Cell.PUBLISHED + Document.COUNTERS], None, False
        for cell, value in (
            (Cell.FOLDED, reader.position),
            (Cell.EVENTS_ADDED, fold.recorder.added),
            (Cell.EVENTS_END, fold.recorder.end),
        ):
            if cells[cell] < value <= _MOST_RESUMED:
                reader.set(cell, value)
        return lost

    def _replay(self, cells: Sequence[int]) -> bool:
        """Applies the records that an earlier observer has applied; returns whether some are lost."""
        fold, recorder = self.fold, self.fold.recorder
        recorder.resume(_resumed(cells[Cell.EVENTS_ADDED]))
        fold.replaying = True
        lost = self._apply(_resumed(cells[Cell.FOLDED]))
        fold.replaying = False
        recorder.skip(_resumed(cells[Cell.EVENTS_END]))
        return lost

    def _apply(self, until: int | None = None) -> bool:
        """Applies the records before a position; returns whether some are lost, and asks for the rooms in that case."""
        reader, fold = self.reader, self.fold
        first = reader.position == 0
        piece = reader.records(until)
        if piece.lost:
            if not first:
                fold.metrics.add("kvctl_log_gaps_total", 1, "lost")
            fold.lose(reader.ask(Cell.REBASE))
        for record in piece.records:
            fold.apply(record)
        return piece.lost

    def _written(self, name: str) -> Totals:
        """Returns the values of a counter of the agent by labels; all counters are as of one moment."""
        if not self._placed and self._places_number != self._series_number:
            self._placed = True
            self._place()
        if self._values is None:
            self._values = self.reader.counters(self._counter_count)
        values = ((labels, self._values[place]) for labels, place in self._places.get(name, ()))
        return {labels: whole(value) for labels, value in values if 0 <= value < float("inf")}

    def _place(self) -> None:
        """Reads which counters there are."""
        if (published := self.reader.document(Document.COUNTERS)) is None:
            return
        self._places_number, self._places = published.number, {}
        try:
            series = _decode_series(published.value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        self._counter_count = min(len(series), MOST_COUNTERS)
        for place, (name, labels) in enumerate(series[:MOST_COUNTERS]):
            if self.fold.metrics.declares(name, labels):
                self._places.setdefault(name, []).append((labels, place))


def _resumed(value: int) -> int:
    """Returns what an earlier observer has left in a cell; 0 if it is damaged."""
    return value if 0 <= value <= _MOST_RESUMED else 0
