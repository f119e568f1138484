"""Handlers of the read-only admin commands.

They run on the admin thread, copy data and take no lock for which the hot path waits, so a value may be one update old.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvctl_agent.admin.health import health
from kvctl_agent.admin.machine_views import since
from kvctl_agent.admin.nics import NicQuery
from kvctl_agent.admin.observed_rank import ObservedRank
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.health import HEALTH_FAILED, HEALTH_ROOMS
from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.snapshots import (
    Bootstrap,
    ConfigRow,
    Cost,
    Events,
    FailedRooms,
    Health,
    Hello,
    LayerRow,
    MetricFamily,
    Nics,
    PeerRow,
    ProcessUse,
    RoomDetail,
    RoomRow,
    Staging,
    Stats,
    Status,
)
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RequestRefused
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.telemetry.hub import room_rows

_ROWS = 1000
_MOST_TOKENS = 1 << 24
_PROCESS_EVERY_NS = 5_000_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class AdminQueries:
    """Read-only admin commands: each command is a method of the same name, with its arguments as keyword arguments."""

    def __init__(self, rank: ObservedRank) -> None:
        self._rank = rank
        self._started_ns = time.monotonic_ns()
        self._process: ProcessUse | None = None
        self._process_due_ns = 0
        self._nics = NicQuery(rank)

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        """Returns the handlers by command name, for `AdminServer`; `hello` is passed to it separately."""
        reads: tuple[Callable[..., Any], ...] = (
            self.inputs,
            self.config,
            self.bootstrap,
            self.status,
            self.rooms,
            self.room,
            self.slow,
            self.history,
            self.failed,
            self.staging,
            self.layers,
            self.peers,
            self.nics,
            self.cost,
            self.events,
            self.metrics,
            self.health,
        )
        return {read.__name__: lambda args, read=read: read(**args) for read in reads}  # type: ignore[misc]

    def hello(self) -> Hello:
        rank = self._rank
        return {
            "name": rank.name,
            "role": rank.role,
            "host": rank.host,
            "pid": os.getpid(),
            "version": VERSION,
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "incarnation": f"{rank.incarnation:016x}",
            "level": "",
            "capabilities": sorted(command.name for command in COMMANDS),
            "uptime_ns": time.monotonic_ns() - self._started_ns,
            "draining": rank.draining,
            "now_ns": rank.telemetry.clock.wall_ns(time.monotonic_ns()),
        }

    def inputs(self, since: int | None = None, until: int | None = None) -> InputPage:
        """Returns a page of the state machine's recorded inputs, compressed on the admin thread.

        Args:
            since: number of the first blob; None: the oldest one stored.
            until: number after the last blob; None: up to now.
        """
        return self._rank.inputs(since, until)

    def config(self) -> list[ConfigRow]:
        return self._rank.config()

    def bootstrap(self) -> list[Bootstrap]:
        return self._rank.bootstrap()

    def status(self) -> Status:
        rank, telemetry = self._rank, self._rank.telemetry
        described, stats, now_ns = rank.describe(), self.stats(), time.monotonic_ns()
        return {
            "name": rank.name,
            "role": rank.role,
            "host": rank.host,
            "rank": described["rank"],
            "sizes": described["sizes"],
            "registry": described["registry"],
            "pid": os.getpid(),
            "incarnation": f"{rank.incarnation:016x}",
            "version": VERSION,
            "integration": described["integration"],
            "uptime_ns": now_ns - self._started_ns,
            "transport": described["transport"],
            "device": described["device"],
            "rooms": stats["rooms"],
            "rooms_finished_total": stats["rooms_finished_total"],
            "rooms_finished_5m": telemetry.recent_ends.counts(now_ns),
            "last_success_age_ns": since(telemetry.recent_ends.success_ns, now_ns),
            "bytes_total": sum(stats["bytes_total"].values()),
            "rate": telemetry.rate.window(now_ns),
            "latency": stats["latency"],
            "ring": stats["ring"],
            "peers": stats["peers"],
            "pipeline": rank.pipeline(),
            "pool": described["pool"],
            "dtypes": described["dtypes"],
            "waiting_for": rank.waiting_for(),
            "not_ready": rank.not_ready(),
            "accepting": rank.accepting,
            "draining": rank.draining,
            "draining_age_ns": since(telemetry.drain_began_ns, now_ns),
            "resumed_age_ns": None if rank.draining else since(telemetry.drain_ended_ns, now_ns),
            "memory_gb_per_s": rank.memory_gb_per_s,
            "process": self._process_use(),
            "metrics_url": described["metrics_url"],
        }

    def rooms(self, state: str | None = None, limit: int = _ROWS) -> list[RoomRow]:
        return self._completed(self._rank.telemetry.rooms.rows(state, limit))

    def room(self, room: int) -> list[RoomDetail]:
        found = self._rank.telemetry.rooms.detail(room)
        if not found:
            raise self._unknown(room)
        for row in found:
            self._rank.complete(row)
            row["owed_parts"] = self._rank.owed_parts(row)
        return found

    def slow(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._completed(self._rank.telemetry.rooms.slow(limit))

    def history(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._completed(self._rank.telemetry.rooms.history(limit))

    def failed(self, limit: int = _ROWS) -> FailedRooms:
        found = self._rank.telemetry.rooms.failed(limit)
        self._completed(found["rooms"])
        return found

    def staging(self) -> Staging:
        rank = self._rank
        return {
            "agent": rank.name,
            "role": rank.role,
            "enabled": rank.staging_enabled,
            "ring": rank.ring_view(),
            "buffers": rank.buffers(),
            "gated": rank.gated_parts(),
            "fallbacks_total": int(rank.telemetry.metrics.total("kvctl_fallbacks_total")),
        }

    def layers(self, room: int | None = None) -> list[LayerRow]:
        telemetry = self._rank.telemetry
        if room is None:
            return telemetry.stages.rows()
        records = telemetry.rooms.find(room)
        if not records:
            raise self._unknown(room)
        return room_rows(records, telemetry.clock, self._rank.name)

    def peers(self) -> list[PeerRow]:
        return self._rank.peers()

    def nics(self) -> Nics:
        return self._nics()

    def cost(self, tokens: int = 1024) -> Cost:
        rank = self._rank
        tokens = min(tokens, _MOST_TOKENS)
        ahead_ns, costs = rank.costs(tokens)
        return {
            "agent": rank.name,
            "role": rank.role,
            "rank": rank.describe()["rank"],
            "accepting": rank.accepting,
            "tokens": tokens,
            "rooms": len(rank.telemetry.rooms.active()),
            "ring": rank.ring_use(),
            "ahead_ns": ahead_ns,
            "costs": costs,
        }

    def events(self, since: int | None = None, limit: int = _ROWS) -> Events:
        return self._rank.telemetry.recorder.since(since, limit)

    def metrics(self) -> list[MetricFamily]:
        """Updates the gauges, which no other method reads, and returns all metrics."""
        rank, metrics = self._rank, self._rank.telemetry.metrics
        states = rank.telemetry.rooms.states()
        for state in RoomState:
            metrics.set("kvctl_rooms_active", states.get(state.label, 0), state.label)
        peers = rank.peer_states()
        for peer_state in PeerState:
            metrics.set("kvctl_peers", peers.count(peer_state), peer_state.value)
        wait_ns = rank.telemetry.interpreter.wait_ns
        metrics.set("kvctl_interpreter_wait_seconds", None if wait_ns is None else wait_ns / 1e9)
        if rank.role == "prefill":
            metrics.set("kvctl_parts_parked", len(rank.gated_parts()))
        use = rank.ring_use()
        if use is not None:
            metrics.set("kvctl_ring_size_bytes", use["size_bytes"])
            metrics.set("kvctl_ring_used_bytes", use["used_bytes"])
            metrics.set("kvctl_ring_high_water_bytes", use["high_water_bytes"])
            metrics.set("kvctl_quarantined_bytes", rank.quarantined_bytes)
        return metrics.snapshot()

    def health(self) -> Health:
        return health(
            self.status(),
            self.rooms(limit=HEALTH_ROOMS),
            self.failed(HEALTH_FAILED),
            self.staging(),
            self.peers(),
            self.metrics(),
            self.config(),
            self._rank.telemetry.clock.wall_ns(time.monotonic_ns()),
        )

    def stats(self) -> Stats:
        """Returns the result of `Agent.stats`; not an admin command."""
        rank, telemetry = self._rank, self._rank.telemetry
        peers = rank.peer_states()

        def totals(name: str) -> dict[str, int]:
            return {label: int(value) for (label,), value in telemetry.metrics.counted(name).items()}

        latencies, ended = telemetry.counted_latencies, totals("kvctl_rooms_finished_total")
        return {
            "rooms": telemetry.rooms.states(),
            "rooms_finished_total": {
                state.label: ended.get(state.label, 0) for state in (RoomState.SUCCESS, RoomState.FAILED)
            },
            "failures_total": totals("kvctl_room_failures_total"),
            "parts_total": totals("kvctl_parts_total"),
            "bytes_total": totals("kvctl_part_bytes_total"),
            "latency": latencies.summary(),
            "ring": rank.ring_use(),
            "buffers": rank.buffers(),
            "quarantined_bytes": rank.quarantined_bytes or 0,
            "peers": {state: peers.count(state) for state in dict.fromkeys(peers)},
        }

    # ---- parts ------------------------------------------------------------------------------------------------

    def _completed(self, rows: list[RoomRow]) -> list[RoomRow]:
        for row in rows:
            self._rank.complete(row)
        return rows

    def _unknown(self, room: int) -> RequestRefused:
        return RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self._rank.name} knows no room {room}, active or recent")

    def _process_use(self) -> ProcessUse:
        """Returns `process_use`; numbers of descriptors and threads, and memory, may be five seconds old.

        Counting them lists directories of /proc, which beside busy engines takes longer than the rest of `status`.
        """
        now = time.monotonic_ns()
        if self._process is None or now >= self._process_due_ns:
            self._process, self._process_due_ns = process_use(), now + _PROCESS_EVERY_NS
        return {**self._process, "fds_limit": _fds_limit(), "cpu_ns": time.process_time_ns()}


def process_use() -> ProcessUse:
    """Returns the current use of descriptors, threads, memory and CPU by this process."""
    try:
        used = _entries("/proc/self/fd") - 1  # without the descriptor that lists them
        threads = _entries("/proc/self/task")
        rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        used, threads = resource.getrlimit(resource.RLIMIT_NOFILE)[0], threading.active_count()
        rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # the peak, as an approximation
    return {
        "fds": used,
        "fds_limit": _fds_limit(),
        "threads": threads,
        "rss_bytes": rss_bytes,
        "cpu_ns": time.process_time_ns(),
    }


def _fds_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _entries(directory: str) -> int:
    return len(os.listdir(directory))  # noqa: PTH208 -- half the time of Path.iterdir
