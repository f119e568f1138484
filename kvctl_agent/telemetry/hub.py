"""The telemetry objects of one agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Metrics
from kvctl_agent.telemetry.rates import Latencies, SpanRate
from kvctl_agent.telemetry.room_records import RoomRecord, RoomRecords
from kvctl_agent.telemetry.stage_times import StageTimes

RATE_WINDOW_NS = 10_000_000_000


class Telemetry:
    """Telemetry of one agent; written by its threads, read by the admin thread.

    Attributes:
        copying_since_ns: decode, monotonic: start of the oldest running copy; 0: no copy runs.
        arrival_turn_ns: decode, monotonic: start of the arrival thread's latest iteration; 0: none yet.
        drain_began_ns, drain_ended_ns: monotonic: time of the last drain, and of the last resume; 0: never.
        on_finish: callback for every finished room; runs on the control thread, so it must only enqueue.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        history: int,
        timeline_events: int,
        recorder_events: int,
        failed: int = 256,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.metrics = Metrics()
        self.recorder = FlightRecorder(self.clock, name, recorder_events)
        self.rooms = RoomRecords(self.clock, name, role, history, timeline_events, failed)
        self.stages = StageTimes(name)
        self.rate = SpanRate(RATE_WINDOW_NS)
        self.latencies = Latencies()
        self.on_finish: Callable[[RoomRecord], None] | None = None
        self.copying_since_ns = self.arrival_turn_ns = 0
        self.drain_began_ns = self.drain_ended_ns = 0
        self._arrived_ns = 0  # decode: time at which the latest part was in its pages

    def drain(self, on: bool) -> None:
        """Records that the agent starts or stops draining; of repeated calls the first one counts."""
        draining, now = self.drain_began_ns > self.drain_ended_ns, time.monotonic_ns()
        if on and not draining:
            self.drain_began_ns = now
        elif draining and not on:
            self.drain_ended_ns = now

    def finish(self, record: RoomRecord, now_ns: int) -> None:
        """Counts a finished room and moves its record to the finished rooms."""
        record.finish(now_ns)
        self.metrics.add("kvctl_rooms_finished_total", 1, record.state_now.label)
        latency, overlap = record.latency_ns, record.overlap(now_ns)
        if latency is not None:
            self.latencies.add(latency)
            self.metrics.observe("kvctl_room_seconds", latency / 1e9)
            self.rate.room(now_ns)
            if overlap is not None:
                hidden, exposed = overlap
                self.metrics.observe("kvctl_transfer_hidden_seconds", hidden / 1e9)
                self.metrics.observe("kvctl_transfer_exposed_seconds", exposed / 1e9)
        self.rooms.close(record)
        if self.on_finish is not None:
            self.on_finish(record)

    def part(
        self,
        record: RoomRecord,
        key: tuple[int, int, tuple[int, int]],
        peer: str,
        path: str,
        nbytes: int,
        moments: Mapping[str, int],
        forward_done_ns: int | None = None,
    ) -> None:
        """Records a part that this rank has sent or received.

        Args:
            record: record of the part's room.
            key: writer, chunk and layers [lo, hi).
            peer: agent name at the other end.
            path: transfer path.
            nbytes: KV bytes of the part.
            moments: monotonic end of each stage by name, in order of the stages.
            forward_done_ns: prefill: end of the forward, or the current time while it runs; None on a decode rank.
        """
        record.part(path, nbytes, key, peer, moments)
        last = 0
        for stage, at in moments.items():
            if last:
                self.metrics.observe("kvctl_stage_seconds", (at - last) / 1e9, stage)
            last = at
        first_ready: int | None = None
        if (ready := moments.get("ready")) is not None:
            first_ready = record.chunks_ready[key[1]] = min(ready, record.chunks_ready.get(key[1], ready))
        self.stages.add(key[2], path, nbytes, moments, forward_done_ns, first_ready)
        self.metrics.add("kvctl_parts_total", 1, path)
        self.metrics.add("kvctl_part_bytes_total", nbytes, path)
        if forward_done_ns is not None:
            first = min(moments.values())
            record.moved.add(first, last)
        else:
            # A decode rank does not see the start of a write, and of a write directly into the pages only its end.
            # The part's bytes are spread over the time since the previous part, or since the room was opened.
            first = max(record.opened_at, self._arrived_ns)
            self._arrived_ns = max(last, self._arrived_ns)
        self.rate.add(min(first, last), last, nbytes)
