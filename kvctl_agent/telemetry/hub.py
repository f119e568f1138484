"""Telemetry of one agent: what its components call to record rooms, parts, counters and events in its region."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.values import all_encodable
from kvctl_agent.telemetry import records as rec
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.durations import InterpreterWaits
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Counters, Sample
from kvctl_agent.telemetry.nvtx_ranges import NvtxRanges
from kvctl_agent.telemetry.region import MOST_RECORD_BYTES, Cell, Document, Header, RegionWriter
from kvctl_agent.telemetry.room_records import RoomRecord, RoomRecords

_MOST_AT_ONCE = 64  # records of at most 500 bytes fit into one
_BASE_ROOMS = 64  # written at once, at 5 µs each
_encode = msgspec.msgpack.Encoder(enc_hook=operator.index).encode  # some integers are NumPy's
_NO_SERIES = _encode(("", ()))


class Telemetry:
    """Telemetry of one agent; any thread may write it.

    Counters, single values and the active rooms can also be read here, by threads of this process. All else is in the
    region only, whose reader computes it (`kvctl_agent.observer.fold`). Decisions never read telemetry.

    Attributes:
        region: where everything is written.
        rooms: records of the active rooms.
        transfers: prefill: begin and end of the transfers of rooms.
        ranges: NVTX ranges of rooms and of what is done for them; None, which is the default: none are marked.
        collected: records that `flush` will write together; None, which is the default: each is written at once. With a
            list, one thread at a time calls the methods.
    """

    def __init__(self, name: str, role: Role, region: RegionWriter | None = None, clock: Clock | None = None) -> None:
        """Creates the telemetry of an agent.

        Args:
            region: None: memory that only this process sees.
            clock: None: a new one.
        """
        self.clock = clock or Clock()
        self.region = region or RegionWriter(Header.of_this_process(role, name, clock_offset_ns=self.clock.wall_ns(0)))
        self.collected: list[tuple[Any, ...]] | None = None
        self.ranges: NvtxRanges | None = None
        self._role = role
        self.metrics = Counters(self.region)
        self.recorder = FlightRecorder(self.clock, lambda entry: self._append((rec.NOTED, *entry)))
        self.rooms = RoomRecords(self._append, role)
        self.transfers = TransferLog(self._append)
        self._interpreter = InterpreterWaits()
        self._flushing = threading.RLock()  # a signal handler that closes the agent may interrupt its owner
        self._series_published = 0
        self._base = _Base(self.region, self.rooms, self._append)

    def count(self, samples: Sequence[Sample]) -> None:
        """Adds to counters, by values of at least 0."""
        for name, value, labels in samples:
            self.metrics.add(name, value, *labels)

    def waited(self, asked_ns: int, took_ns: int) -> None:
        """Notes a wait of the control loop for `InterpreterWaits.note`."""
        if self._interpreter.note(asked_ns, took_ns):
            wait_ns = self._interpreter.wait_ns
            self.region.cells[Cell.INTERPRETER_WAIT_NS] = -1 if wait_ns is None else round(wait_ns)

    def drain(self, on: bool) -> None:
        """Records the time at which draining starts (`on`) or stops; does nothing if that has happened already."""
        cells, now = self.region.cells, time.monotonic_ns()
        draining = cells[Cell.DRAIN_BEGAN_NS] > cells[Cell.DRAIN_ENDED_NS]
        if on and not draining:
            cells[Cell.DRAIN_BEGAN_NS] = now
        elif draining and not on:
            cells[Cell.DRAIN_ENDED_NS] = now

    def open(self, room: int, nonce: int, at_ns: int | None = None) -> RoomRecord:
        """Counts a room that was opened at monotonic `at_ns`, or now; else as `RoomRecords.open`."""
        record = self.rooms.open(room, nonce, self.clock.now_ns() if at_ns is None else at_ns)
        self.metrics.add("kvctl_rooms_opened_total", 1)
        if self.ranges is not None:
            self.ranges.begin(record, f"kv {self._role} room {room}")
        return record

    def finish(self, record: RoomRecord, now_ns: int) -> None:
        """Records that a room ended at monotonic `now_ns`, and counts it; does nothing if it has ended before."""
        if not self.rooms.close(record):
            return
        if self.ranges is not None:
            self.ranges.end(record)
        record.finish(now_ns)
        record.write(rec.FINISHED, now_ns)
        self.metrics.add("kvctl_rooms_finished_total", 1, record.state_now.label)

    def part(
        self,
        record: RoomRecord,
        key: rec.PartKey,
        peer: str | None,
        path: str,
        nbytes: int,
        moments: Mapping[str, int],
        forward_done_ns: int | None = None,
    ) -> None:
        """Records a part that this rank has sent or received.

        Args:
            record: record of the part's room.
            key: writer, chunk and layers [lo, hi).
            peer: agent name at the other end; None if it is unknown.
            path: transfer path.
            nbytes: KV bytes of the part.
            moments: monotonic end of each observed stage by name, in order of the stages.
            forward_done_ns: prefill: end of the forward, or the current time while it runs; None on a decode rank.
        """
        record.part(key, peer, path, nbytes, moments, forward_done_ns)
        self.metrics.add("kvctl_parts_total", 1, path)
        self.metrics.add("kvctl_part_bytes_total", nbytes, path)

    def flush(self, *, wait: bool = False) -> None:
        """Writes the values of the rooms that have changed, new series of counters, and what a reader asks for.

        The control loop calls it once a turn.

        Args:
            wait: for readers in this process: waits until another thread that flushes has ended.
        """
        rooms, counters, region = self.rooms, self.metrics, self.region
        cells = region.cells
        rebases = cells[Cell.REBASE] != cells[Cell.REBASED]
        if not (rooms.changed or self.collected or len(counters.series) != self._series_published or rebases):
            return
        if not self._flushing.acquire(wait):
            return
        try:
            changed = rooms.changed
            while changed:
                record = changed.popleft()
                if record.changed:
                    record.write(rec.ROOM)
            if (count := len(counters.series)) != self._series_published:
                self._series_published = count
                region.publish(Document.COUNTERS, self._encoded_series(count), time.monotonic_ns())
            if rebases:
                self._base.write()
            if self.collected:
                collected, self.collected = self.collected, None
                self._write_collected(collected)
                self.collected = []
        finally:
            self._flushing.release()

    def _encoded_series(self, count: int) -> bytes:
        """Encodes the first series of the counters; one that MessagePack has no form for is left without a name."""
        series = self.metrics.series[:count]
        try:
            return _encode(series)
        except Exception:
            encoded = [_escaped(each) for each in series]
            self.region.cells[Cell.TOO_LARGE] += encoded.count(None)
            return _encode([msgspec.Raw(_NO_SERIES if each is None else each) for each in encoded])

    def _append(self, record: tuple[Any, ...]) -> None:
        if self.collected is not None:
            self.collected.append(record)
            return
        try:
            encoded = _encode(record)
        except Exception:
            encoded = _escaped(record) or b""
        self.region.append(encoded)  # which counts an empty one

    def _write_collected(self, collected: list[tuple[Any, ...]]) -> None:
        for at in range(0, len(collected), _MOST_AT_ONCE):
            records = collected[at : at + _MOST_AT_ONCE]
            try:
                encoded = _encode((rec.SEVERAL, records))
            except Exception:
                encoded = b""
            if 0 < len(encoded) <= MOST_RECORD_BYTES:
                self.region.append(encoded)
            else:  # one of them is too large, or has no form in MessagePack
                for record in records:
                    self._append(record)


class TransferLog:
    """Appends begin and end of the transfers of a prefill rank's rooms to the log; see `observer.transfer_times`."""

    def __init__(self, append: Any) -> None:
        self._append = append

    def begin(self, room: int, tokens: int, at_ns: int) -> None:
        """Records that the transfer of a room begins at monotonic `at_ns`."""
        self._append((rec.TRANSFER_BEGUN, room, tokens, at_ns))

    def arrived(self, room: int, peer: str, sent_ns: int, rtt_ns: int | None) -> None:
        """Records that a decode rank has all of a room.

        Args:
            sent_ns: monotonic time at which its message came, less the time for which it was kept there.
            rtt_ns: latest round trip to it.
        """
        self._append((rec.TRANSFER_ARRIVED, room, peer, sent_ns, rtt_ns))

    def cancel(self, room: int, at_ns: int) -> None:
        """Records that the pages of a room were recalled."""
        self._append((rec.TRANSFER_CANCELLED, room, at_ns))


class _Base:
    """Writes all active rooms when a reader asks for them: it is new, or has lost records."""

    def __init__(self, region: RegionWriter, rooms: RoomRecords, append: Any) -> None:
        self._region = region
        self._rooms = rooms
        self._append = append
        self._number = 0  # of the request that is being answered; 0: none is
        self._last_serial = 0
        self._until = 0

    def write(self) -> None:
        """Writes at most `_BASE_ROOMS` rooms."""
        cells = self._region.cells
        if not self._number:
            wanted = cells[Cell.REBASE]
            self._number, self._last_serial, self._until = wanted, 0, self._rooms.next_serial
            self._append((rec.BASE_BEGUN, wanted, self._until))
        rooms = self._rooms.after(self._last_serial, _BASE_ROOMS)
        for record in rooms:
            record.write_base()
            self._last_serial = record.serial
        if len(rooms) < _BASE_ROOMS or self._last_serial >= self._until:
            self._append((rec.BASE_ENDED, self._number))
            cells[Cell.REBASED], self._number = self._number, 0


def _escaped(value: Any) -> bytes | None:
    """Encodes a value whose texts may have lone surrogates.

    Returns None if MessagePack has no form for it: that must not stop the control loop.
    """
    try:
        return _encode(all_encodable(value))
    except Exception:
        return None
