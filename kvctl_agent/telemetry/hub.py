"""Everything one agent remembers about itself, under one name."""

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
    """Built once per agent; written by its threads, read by the admin thread.

    Attributes:
        copying_since_ns, arrival_turn_ns: decode, monotonic: when the oldest copy that runs was begun, and when the
            arrival thread last began to look for work; 0: no copy runs, or it has not looked.
        drain_began_ns, drain_ended_ns: monotonic: when the agent was last told to take no new rooms, and when it was
            told to take them again; 0: never, or not yet.
        on_finish: told of every room that has ended, on the control thread: it must only enqueue.
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
        self._arrived_ns = 0  # reader: when the last part was in its pages

    def drain(self, on: bool) -> None:
        """The agent was told to take no new rooms, or to take them again; told twice, the first time counts."""
        draining, now = self.drain_began_ns > self.drain_ended_ns, time.monotonic_ns()
        if on and not draining:
            self.drain_began_ns = now
        elif draining and not on:
            self.drain_ended_ns = now

    def finish(self, record: RoomRecord, now_ns: int) -> None:
        """A room has ended: count it, and move its record to the finished ones."""
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
        """A part is through this rank: its stages, its bytes, its place on the room's timeline.

        Args:
            key: writer, chunk and layers [lo, hi).
            moments: stage name to the monotonic ns at which it ended, in the order of the stages.
            forward_done_ns: prefill: when the forward was done, or now while it still runs.
        """
        record.part(path, nbytes)
        last = 0
        for stage, at in moments.items():
            if last:
                record.event(stage, at, *key, peer)
                self.metrics.observe("kvctl_stage_seconds", (at - last) / 1e9, stage)
            else:
                record.event(stage, at, *key, peer, path=path, nbytes=nbytes)
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
            # A reader does not see a write begin, and of one into the pages it sees a single moment: its bytes are
            # those of the time since the part before, or since nobody waited for any.
            first = max(record.opened_at, self._arrived_ns)
            self._arrived_ns = max(last, self._arrived_ns)
        self.rate.add(min(first, last), last, nbytes)
