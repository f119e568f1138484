"""A rank as the read-only admin commands see it: its documents, the fold of its log, its cells and its process."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode
from kvctl_agent.contract.health import HEALTH_FAILED, HEALTH_METRICS, HEALTH_ROOMS
from kvctl_agent.contract.snapshots import (
    ActionResult,
    Bootstrap,
    ConfigRow,
    Cost,
    EngineCall,
    Events,
    FailedRooms,
    GatedPart,
    Health,
    Hello,
    LayerRow,
    MetricFamily,
    Nics,
    ObserverKind,
    PeerRow,
    ProcessUse,
    RingAllocation,
    RingView,
    Role,
    RoomDetail,
    RoomRow,
    Staging,
    Status,
    WorkerFacts,
)
from kvctl_agent.contract.states import PeerState, RoomState
from kvctl_agent.errors import RequestRefused
from kvctl_agent.observer.documents import (
    Configuration,
    Costs,
    Diagnoses,
    Diagnosis,
    GatedParts,
    Identity,
    Peers,
    RegionDocuments,
    Registries,
    Ring,
    Stack,
    State,
    grown,
)
from kvctl_agent.observer.fold import FoldedRegion
from kvctl_agent.observer.health import health
from kvctl_agent.observer.nics import NicQuery
from kvctl_agent.observer.process_facts import ProcessFacts
from kvctl_agent.observer.tcp_connections import connections_to
from kvctl_agent.observer.transfer_costs import transfer_costs
from kvctl_agent.telemetry.clock import since
from kvctl_agent.telemetry.region import Cell, Document

_SILENT = (PeerState.CONNECTING, PeerState.SUSPECT, PeerState.LOST)
_ROWS = 1000
_MOST_TOKENS = 1 << 24
_PROCESS_EVERY_NS = 5_000_000_000


class ObservedRank:
    """One rank; one thread at a time uses it. Each reading admin command is a method, with keyword arguments.

    Attributes:
        header: of its region.
        observer: where this is: in a process of its own, or in a thread of the agent's.
        ended_ns: monotonic time at which its process ended; None: it has not.
        ended_why: how it ended, as far as that is known.
        catch_up: reads what was written to its log, and returns the fold.
        cells: returns the cells of its region.
        facts: returns what the kernel tells of its process.
    """

    def __init__(
        self,
        region: FoldedRegion,
        documents: RegionDocuments,
        facts: Callable[[], ProcessFacts],
        observer: ObserverKind,
        metrics_url: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Creates the rank that writes a region.

        Args:
            documents: its documents.
            metrics_url: returns the URL for Prometheus.
        """
        self.header = region.reader.header
        self.name = self.header.name
        self.role: Role = "prefill" if self.header.role == "prefill" else "decode"
        self.observer: ObserverKind = observer
        self.ended_ns: int | None = None
        self.ended_why: str | None = None
        self.catch_up = region.catch_up
        self.cells: Callable[[], Sequence[int]] = region.reader.cells
        self.facts = facts
        self._metrics_url = metrics_url
        self._documents = documents
        self._process: ProcessUse = {"fds": 0, "fds_limit": None, "threads": 0, "rss_bytes": 0, "cpu_ns": 0}
        self._process_due_ns = 0
        self.nics: Callable[..., Nics] = NicQuery(self.header, self.identity, self.peers, facts)

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        """Returns the handlers by command name, for `AdminService`; `hello` is passed to it separately."""
        reads = (
            *(self.config, self.bootstrap, self.status, self.rooms, self.room, self.slow, self.history, self.failed),
            *(self.staging, self.layers, self.peers, self.cost, self.events, self.metrics, self.health),
        )
        by_name: dict[str, Callable[..., Any]] = {"nics": self.nics, **{read.__name__: read for read in reads}}
        return {name: partial(_with_arguments, read) for name, read in by_name.items()}

    def now_ns(self) -> int:
        """Returns the monotonic time as of which ages are; once its process has ended, that of its end."""
        return time.monotonic_ns() if self.ended_ns is None else self.ended_ns

    def end(self, at_ns: int, why: str | None) -> None:
        """Notes that its process ended at monotonic `at_ns`: all ages are as of then."""
        self.ended_ns, self.ended_why = at_ns, why
        self.catch_up().clock.stop(at_ns)

    def identity(self) -> Identity:
        return self._documents.read(Document.IDENTITY, Identity)

    def state(self) -> State:
        return self._documents.read(Document.STATE, State)

    def turn_age_ns(self, state: State) -> int | None:
        """Returns the time since the control loop last began a turn; None: it need not, or has not begun one."""
        return None if state.state == "unregistered" else since(self.cells()[Cell.TURN_NS], self.now_ns())

    # ---- identity and state ------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        cells = self.cells()
        return {
            **self._worker_facts(self.identity(), self.state()),
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "level": "",
            "capabilities": [],  # and the level: `AdminService` knows them
            "draining": cells[Cell.DRAIN_BEGAN_NS] > cells[Cell.DRAIN_ENDED_NS],
            "now_ns": time.monotonic_ns() + self.header.clock_offset_ns,
        }

    def _worker_facts(self, identity: Identity, state: State) -> WorkerFacts:
        now_ns = time.monotonic_ns()
        return {
            "name": self.name,
            "role": self.role,
            "host": identity.host,
            "pid": self.header.pid,
            "version": identity.version or VERSION,
            "incarnation": identity.incarnation,
            "uptime_ns": max(0, self.now_ns() - self.header.created_ns),
            "ended_age_ns": None if self.ended_ns is None else max(0, now_ns - self.ended_ns),
            "ended_why": self.ended_why,
            "process_state": self.facts().state,
            "turn_age_ns": self.turn_age_ns(state),
            "observer": self.observer,
        }

    def status(self) -> Status:
        fold, identity, state = self.catch_up(), self.identity(), self.state()
        now_ns, cells = self.now_ns(), self.cells()
        finished = fold.metrics.totals("kvctl_rooms_finished_total")
        return {  # type: ignore[typeddict-item]  # of the documents
            **_shared(identity),
            **_shared(state),
            **self._worker_facts(identity, state),
            **self._engine_call(identity, state),
            "transport": {**identity.transport, "lanes": [*identity.transport.get("lanes", ()), *state.lanes]},
            "rooms": fold.rooms.states(),
            "rooms_finished_total": {
                ended.label: int(finished.get((ended.label,), 0)) for ended in (RoomState.SUCCESS, RoomState.FAILED)
            },
            "rooms_finished_5m": fold.recent_ends.counts(now_ns),
            "last_success_age_ns": since(fold.recent_ends.success_ns, now_ns),
            "bytes_total": int(sum(fold.metrics.totals("kvctl_part_bytes_total").values())),
            "rate": fold.rate.window(now_ns),
            "latency": fold.latencies.summary(),
            "draining_age_ns": since(cells[Cell.DRAIN_BEGAN_NS], now_ns),
            "resumed_age_ns": None if state.draining else since(cells[Cell.DRAIN_ENDED_NS], now_ns),
            "process": self._process_use(),
            "metrics_url": self._metrics_url(),
            "published_age_ns": self._published_age_ns(),
        }

    def _engine_call(self, identity: Identity, state: State) -> EngineCall:
        """Returns the engine's latest call of the agent; none while the engine has no reason to call."""
        cells, calls = self.cells(), identity.calls
        began_ns, ended_ns, number = cells[Cell.CALL_NS], cells[Cell.CALL_ENDED_NS], cells[Cell.CALL]
        if not began_ns or state.state == "unregistered" or state.engine_rooms == 0:
            number, began_ns, ended_ns = -1, 0, 0
        stack = self._documents.read(Document.STACK, Stack)
        return {
            "engine_call": calls[number] if 0 <= number < len(calls) else None,
            "engine_call_age_ns": since(max(began_ns, ended_ns), self.now_ns()),
            "engine_in_call": ended_ns < began_ns,
            "engine_stack": stack.frames if stack.frames and stack.call_ns == began_ns else None,
        }

    def _published_age_ns(self) -> int | None:
        """Returns the age of its state; None: it is read from the agent itself, or was never published."""
        at_ns = self._documents.at_ns(Document.STATE) if self.observer == "process" else None
        return None if at_ns is None else max(0, self.now_ns() - at_ns)

    def _process_use(self) -> ProcessUse:
        """Returns the resources of the worker's process, as last known.

        Before Linux 6.2, which tells the number of descriptors, it may be five seconds old: counting them takes longer
        than the rest of `status`.
        """
        facts, pid, use, now_ns = self.facts(), self.header.pid, self._process, time.monotonic_ns()
        if facts.cpu_ns is None:  # in another PID namespace, or it has ended
            return use
        use["threads"], use["rss_bytes"], use["cpu_ns"] = facts.threads or 0, facts.rss_bytes or 0, facts.cpu_ns
        try:
            limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
            use["fds_limit"] = None if limit == resource.RLIM_INFINITY else limit
            if known := os.stat(f"/proc/{pid}/fd").st_size:  # noqa: PTH116
                use["fds"] = known
            elif now_ns >= self._process_due_ns:
                self._process_due_ns = now_ns + _PROCESS_EVERY_NS
                use["fds"] = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 -- half the time of Path.iterdir
        except OSError as error:
            if error.errno == errno.EMFILE and pid == os.getpid():
                use["fds"] = use["fds_limit"] or 0
        return use

    def config(self) -> list[ConfigRow]:
        return self._documents.read(Document.CONFIG, Configuration).rows

    def bootstrap(self) -> list[Bootstrap]:
        return self._documents.read(Document.BOOTSTRAP, Registries).rows

    # ---- rooms -------------------------------------------------------------------------------------------------

    def rooms(self, state: str | None = None, limit: int = _ROWS) -> list[RoomRow]:
        return self._completed(self.catch_up().rooms.rows(state, limit))

    def slow(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._completed(self.catch_up().rooms.slow(limit))

    def history(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._completed(self.catch_up().rooms.history(limit))

    def failed(self, limit: int = _ROWS) -> FailedRooms:
        found = self.catch_up().rooms.failed(limit)
        self._completed(found["rooms"])
        return found

    def room(self, room: int) -> list[RoomDetail]:
        found = self.catch_up().rooms.detail(room)
        if not found:
            raise self._unknown(room)
        diagnoses, later_ns = self._diagnose(found), self._since(Document.ROOMS)
        for row, diagnosis in zip(found, diagnoses, strict=True):
            # Otherwise it has ended since the document was published.
            if diagnosis is not None and row["failure"] is None and row["finished_at_ns"] is None:
                row["owed_parts"] = grown(diagnosis["owed_parts"], later_ns)
        return found

    def layers(self) -> list[LayerRow]:
        return self.catch_up().stages.rows()

    def ended_room(self, room: int) -> ActionResult | None:
        """Returns the result of an action on a room that has ended; None if there is no such room."""
        for record in self.catch_up().rooms.find(room):
            if record.finished_at is not None:
                ago_s = (self.now_ns() - record.finished_at) / 1e9
                text = f"room {room} ended {ago_s:.1f} s ago as {record.state_now.label}"
                return {"agent": self.name, "subject": f"room {room}", "result": "unchanged", "text": text}
        return None

    def _completed(self, rows: list[RoomRow]) -> list[RoomRow]:
        self._diagnose(rows)
        return rows

    def _diagnose(self, rows: Sequence[RoomRow]) -> list[Diagnosis | None]:
        """Fills in what the log does not tell of active rooms: `missing`, and on a decode rank `owed`.

        Returns:
            what is known of each row.
        """
        published = self._documents.read(Document.ROOMS, Diagnoses).rows if rows else ()
        known = {(diagnosis["room"], diagnosis["nonce"]): diagnosis for diagnosis in published}
        diagnoses = [known.get((row["room"], row["nonce"])) for row in rows]
        for row, diagnosis in zip(rows, diagnoses, strict=True):
            if diagnosis is not None:
                row["missing"], row["owed"] = diagnosis["missing"], diagnosis["owed"]
        return diagnoses

    def _unknown(self, room: int) -> RequestRefused:
        return RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self.name} knows no room {room}, active or recent")

    # ---- staging, peers and costs ------------------------------------------------------------------------------

    def staging(self) -> Staging:
        return {
            "agent": self.name,
            "role": self.role,
            "enabled": self.identity().staging,
            "ring": self._ring() if self.role == "decode" else None,
            "buffers": self.state().buffers,
            "gated": self._gated_parts() if self.role == "prefill" else [],
            "fallbacks_total": int(self.catch_up().metrics.total("kvctl_fallbacks_total")),
        }

    def _ring(self) -> RingView | None:
        """Returns the state of a decode rank's staging ring and of its allocations; None without a ring."""
        published = self._documents.read(Document.STAGING, Ring)
        if (state := published.ring) is None:
            return None
        later_ns, cells, now_ns = self._since(Document.STAGING), self.cells(), self.now_ns()
        allocations: list[RingAllocation] = grown(published.rows, later_ns)
        oldest_ns = next((row["age_ns"] for row in allocations if not row["aside"]), 0)
        total = self.catch_up().metrics.total
        return {
            **state,
            "watermark": {**state["watermark"], "age_ns": oldest_ns},
            "allocations": allocations,
            "copies": {
                "waiting": sum(row["state"] == "landed" for row in allocations),
                "copying_age_ns": since(cells[Cell.COPYING_SINCE_NS], now_ns),
                "turn_age_ns": since(cells[Cell.ARRIVAL_TURN_NS], now_ns),
            },
            "granted_total": int(total("kvctl_ring_grants_total")),
            "refused_total": int(total("kvctl_ring_refusals_total")),
            "revoked_total": int(total("kvctl_ring_revokes_total")),
        }

    def _gated_parts(self) -> list[GatedPart]:
        """Returns the parts of a prefill rank that are ready but may not be sent yet."""
        published = self._documents.read(Document.STAGING, GatedParts)
        return grown(published.rows, self._since(Document.STAGING))

    def peers(self) -> list[PeerRow]:
        """Returns its peers, each with its rooms, and those that do not answer with the kernel's TCP connections."""
        published, later_ns = self._documents.read(Document.PEERS, Peers).rows, self._since(Document.PEERS)
        rooms: dict[str, int] = {}
        for record in self.catch_up().rooms.active():
            for name in record.peers:
                rooms[name] = rooms.get(name, 0) + 1
        rows = grown(published, later_ns)
        for row in rows:
            row["rooms"] = rooms.get(row["peer"], 0)
        suspect_ns = self.identity().suspect_s * 1e9
        troubled = [row for row in rows if row["address"] and _troubled(row, suspect_ns)] if not self.ended_ns else []
        if troubled:  # reading the kernel's tables takes a millisecond for each thousand connections of the host
            connections = connections_to({row["address"] or "" for row in troubled})
            for row in troubled:
                row["tcp"] = connections[row["address"] or ""]
        return rows

    def cost(self, tokens: int = 1024) -> Cost:
        fold, state, tokens = self.catch_up(), self.state(), min(tokens, _MOST_TOKENS)
        peers = self._documents.read(Document.COSTS, Costs).rows if self.role == "prefill" else []
        ahead_ns, costs = transfer_costs(self.name, peers, fold, tokens, self.now_ns())
        return {
            "agent": self.name,
            "role": self.role,
            "rank": self.identity().rank,
            "accepting": state.accepting and self.ended_ns is None,
            "tokens": tokens,
            "rooms": len(fold.rooms),
            "ring": state.ring,
            "ahead_ns": ahead_ns,
            "costs": costs,
        }

    def _since(self, document: Document) -> int:
        """Returns the time since a document was published."""
        at_ns = self._documents.at_ns(document)
        return 0 if at_ns is None else max(0, self.now_ns() - at_ns)

    # ---- events, metrics and health ----------------------------------------------------------------------------

    def events(self, since: int | None = None, limit: int = _ROWS) -> Events:
        return self.catch_up().recorder.since(since, limit)

    def metrics(self) -> list[MetricFamily]:
        return self._metrics()

    def _metrics(self, only: Collection[str] = ()) -> list[MetricFamily]:
        """Updates the gauges, which no other method reads, and returns the metrics named `only`; empty: all.

        `only` is `HEALTH_METRICS` or a part of it, without the gauges that `status` has.
        """
        fold, state, wait_ns = self.catch_up(), self.state(), self.cells()[Cell.INTERPRETER_WAIT_NS]
        metrics = fold.metrics
        metrics.set("kvctl_interpreter_wait_seconds", None if wait_ns < 0 else wait_ns / 1e9)
        if state.ring is not None:
            metrics.set("kvctl_quarantined_bytes", state.quarantined_bytes)
        if only:
            return metrics.snapshot(only)
        states = fold.rooms.states()
        for room_state in RoomState:
            metrics.set("kvctl_rooms_active", states.get(room_state.label, 0), room_state.label)
        for peer_state in PeerState:
            metrics.set("kvctl_peers", state.peers.get(peer_state, 0), peer_state.value)
        if self.role == "prefill":
            metrics.set("kvctl_parts_parked", state.gated)
        if (ring := state.ring) is not None:
            metrics.set("kvctl_ring_size_bytes", ring["size_bytes"])
            metrics.set("kvctl_ring_used_bytes", ring["used_bytes"])
            metrics.set("kvctl_ring_high_water_bytes", ring["high_water_bytes"])
        return metrics.snapshot()

    def health(self) -> Health:
        return health(
            self.status(),
            self.rooms(limit=HEALTH_ROOMS),
            self.failed(HEALTH_FAILED),
            self.staging(),
            self.peers(),
            self._metrics(HEALTH_METRICS),
            self.config(),
            self.now_ns() + self.header.clock_offset_ns,
        )


def _with_arguments(read: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return read(**arguments)


_SHARED: Mapping[type, Sequence[str]] = {
    kind: [name for name in kind.__struct_fields__ if name in Status.__annotations__] for kind in (Identity, State)
}


def _shared(document: Identity | State) -> Any:
    """Returns the fields of a document that `Status` has by the same names."""
    return {name: getattr(document, name) for name in _SHARED[type(document)]}


def _troubled(row: PeerRow, suspect_ns: float) -> bool:
    """Returns whether a peer is silent or does not hear this agent, or a write to it takes as long."""
    waits_ns = max(row["oldest_write_ns"] or 0, row["unheard_ns"] or 0)
    return row["state"] in _SILENT or waits_ns >= suspect_ns
