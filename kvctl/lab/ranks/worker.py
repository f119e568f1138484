"""The synthetic worker of a rank process: its pool, its agent, and the handlers of the parent's commands.

A rank of a batch fleet drives all rooms of a prepared batch during one Run command. A rank of a live fleet opens rooms
one by one as commands arrive. All of this code runs on the main thread of the process.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kvctl.lab.faults.agent import faulty_agent
from kvctl.lab.faults.batch_faults import BatchFaults
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_fault, parse_faults
from kvctl.lab.ranks import measure
from kvctl.lab.ranks.batch_run import DecodeRun, PrefillRun
from kvctl.lab.ranks.busy_loop import measure_idle
from kvctl.lab.ranks.content import Content, allocate_pool, own_coord, own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.gpu_engine import GpuEngine, layer_work
from kvctl.lab.ranks.live_rooms import LiveRooms
from kvctl.lab.ranks.messages import (
    Abort,
    FaultState,
    FloorMeasured,
    Floors,
    MeasureLoop,
    OpenRoom,
    Prepare,
    Ready,
    Room,
    Run,
    RunReport,
    SendRoom,
    Serving,
    SetFault,
    Start,
    Tell,
    Usage,
    Verify,
    VerifyReport,
)
from kvctl.lab.ranks.verify import verify
from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.paths.calibration import memcpy_gb_per_s
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import Handle

CLEAR = "clear"
"""Value of `SetFault.spec` that ends all faults."""

CLOSE_TIMEOUT_S = 3.0
_PROGRESS_INTERVAL_S = 1.0
_PEER_POLL_S = 0.02  # while peers are missing

SendMessage = Callable[[str, Mapping[str, Any]], None]
"""Function that sends a message to the parent; called with its kind and its data."""


class StateChange(NamedTuple):
    """State that a room's handle has reached, and when, on the monotonic clock."""

    handle: Handle
    state: RoomState
    at_ns: int


class Worker:
    """A prefill or decode rank: its KV pool, its agent and its rooms.

    Attributes:
        at: position of the rank in its instance.
        changes: queue of the rooms' state changes that the rank acts on, in the order in which they occurred; the
            server's inbox in a live fleet.
        path, pipeline: transfer path and pipeline mode of the prepared batch.
        gpu: engine that computes prompts on a GPU; None: computation is simulated by sleeping.
        held: indices of rooms whose pages may still be written to after the last run.
    """

    def __init__(self, start: Start, inbox: queue.SimpleQueue[Any], send: SendMessage) -> None:
        """Allocates the pool and builds the agent, without starting it.

        Args:
            inbox: queue of the main loop, which receives the state changes of a live rank.
            send: sends a message to the parent.
        """
        self.start = start
        self.at = own_coord(start)
        self.changes: queue.SimpleQueue[Any] = inbox if start.live else queue.SimpleQueue()
        self.path, self.pipeline = "", "off"
        self.gpu: GpuEngine | None = None
        self.held: list[int] = []
        self._send = send
        self._failed: set[int] = set()
        self._serving: list[int] | None = None
        self._progress_at = 0.0
        self._report_progress("touching its KV pool")
        self._pool = allocate_pool(start)
        self.content = Content(self._pool, start)
        self._report_progress("starting its agent")
        self.faults = FaultInjector(start.name, start.seed)
        for fault in parse_faults(start.faults) if start.faults else ():
            self.faults.set(fault)
        make_agent: Callable[..., Agent] = partial(faulty_agent, self.faults) if start.faulty else Agent
        side, decode = own_side(start), start.role == "decode"
        self.agent = make_agent(
            role=start.role,
            rank=Rank(
                **self.at._asdict(),
                dp_size=side.dp,
                pp_size=side.pp,
                cp_size=side.cp,
                tp_size=side.tp,
                stages=side.stages,
            ),
            pool=self._pool,
            name=start.name,
            bootstrap=start.bootstraps if decode else (start.bootstraps[start.instance],),
            model=model_shape(start.shape, start.state_page_size or start.page_size),
            on_state=self._queue_change,
            **start.config,
        )
        if start.compute == "gpu" and not decode:
            self._report_progress("getting its GPU ready to compute")
            self.gpu = self._gpu_engine()
        self._live = LiveRooms(start, self.agent, self.content, self.faults, send) if start.live else None
        self._handlers: dict[type, Callable[[Any], Mapping[str, Any] | None]] = (
            {
                Floors: self._floors,
                Prepare: self.prepare,
                MeasureLoop: lambda command: measure_idle(command.seconds),
                Run: self.run,
                Verify: self.verify,
            }
            if self._live is None
            else {
                StateChange: self._live.changed,
                OpenRoom: self._live.open,
                SendRoom: self._live.open,
                Abort: self._live.abort,
                SetFault: self._set_fault,
                Tell: self._report_usage,
            }
        )

    def begin(self) -> Ready | None:
        """Starts the agent; in a batch fleet, also waits until it is connected to all its peers.

        Returns:
            The answer to Start; None in a live fleet, where Start has no answer.

        Raises:
            DeadlineExceeded: peers are missing after `Start.timeout_s`; the message names them.
        """
        self.agent.start()
        if self._live is not None:
            return None
        self._report_progress("waiting for its peers")
        self.agent.wait_ready(self.start.timeout_s)
        staging = self.agent.observe.staging()
        ring, buffers = staging["ring"], staging["buffers"]
        ready = Ready(
            pool_bytes=self._pool.nbytes,
            ring_bytes=ring["size_bytes"] if ring else 0,
            staging_bytes=buffers["size_bytes"] if buffers else 0,
            peak_rss_bytes=measure.peak_rss_bytes(),
            transport=self.agent.observe.status()["transport"],
        )
        if self._pool.device is not None:
            ready["gpu"] = measure.gpu(self._pool.device)
        return ready

    def handle(self, item: Any) -> Mapping[str, Any] | None:
        """Handles a command or a state change; returns the answer to the command, or None if it has no answer.

        Raises:
            LocalProtocolError: the command belongs to the other kind of fleet.
        """
        handler = self._handlers.get(type(item))
        if handler is None:
            kind = "batch" if self._live is None else "live"
            raise LocalProtocolError(f"{self.start.name} is a {kind} rank, which has no command {item.do}")
        return handler(item)

    def poll(self) -> float | None:
        """Does the work of a live rank that is due and reports changes of the instances that it can reach.

        Returns:
            Seconds after which `poll` should be called again; None in a batch fleet, which needs no polling.
        """
        if self._live is None:
            return None
        wait_s = self._live.poll()
        serving = self._instances()
        if serving != self._serving and (serving or self._serving):
            self._serving = serving
            self._send("serving", Serving(instances=serving, incarnation=f"{self.agent.incarnation:016x}"))
        now = time.monotonic()
        if now - self._progress_at >= _PROGRESS_INTERVAL_S and (missing := self.agent.waiting_for()):
            self._progress_at = now
            self._report_progress(missing)
        wanted = len(self.start.bootstraps) if self.start.role == "decode" else 1
        return wait_s if len(self._serving or ()) >= wanted else min(wait_s, _PEER_POLL_S)

    def close(self) -> None:
        """Closes the agent, then the pool, to which the agent can no longer write."""
        self.agent.close(CLOSE_TIMEOUT_S)
        self._pool.close()

    def _queue_change(self, handle: Handle, state: RoomState) -> None:
        """Queues a state change of a room; called on the agent's control thread.

        A change that a batch run does not act on would only wake the main thread, which then has the interpreter while
        the agent needs it.
        """
        wanted = self.start.live or state.finished
        if wanted or (state is RoomState.WAITING_FOR_INPUT and self.start.role == "prefill"):
            self.changes.put(StateChange(handle, state, time.monotonic_ns()))

    # ---- batch fleets -----------------------------------------------------------------------------------------------

    def prepare(self, command: Prepare) -> Mapping[str, Any]:
        """Allocates pages for those rooms of a batch in which this rank takes part, and sets up the pool's content.

        A prefill rank writes the test pattern; a decode rank fills its pool with poison if the command says so.
        """
        self._failed.clear()
        self.content.take([room for room in command.rooms if self._owns(room)])
        self.path = command.path
        self.agent.set_path(command.path)
        if self.start.role == "prefill":
            self.pipeline = command.pipeline
            self.agent.set_pipeline(command.pipeline)
            self.content.fill(command.batch)
            if self.gpu is not None:
                self.gpu.prepare(room.tokens for room in self.content.rooms.values())
        elif command.poison:
            self.content.poison()
        return {}

    def run(self, command: Run) -> RunReport:
        """Transfers the prepared rooms until all have ended or `Run.timeout_s` has passed; returns the measurements."""
        before, cpu_before = measure.counters(self.agent.observe.metrics()), measure.cpu_ns()
        deadline_ns = time.monotonic_ns() + round(command.timeout_s * 1e9)
        faults = tuple(map(parse_fault, command.faults))
        in_force = BatchFaults(self.agent, self.start, self.faults, faults) if faults and self.start.faulty else None
        kind = PrefillRun if self.start.role == "prefill" else DecodeRun
        run = kind(self, command, in_force)
        run.drive(deadline_ns)
        cpu_ns = measure.cpu_ns() - cpu_before
        rooms = self.content.rooms
        self.held = run.held
        self._failed = {number for number in rooms if rooms[number].index in run.failures}
        staging = self.agent.observe.staging()
        succeeded = {number: room.index for number, room in rooms.items() if number not in self._failed}
        find = self.agent.telemetry.rooms.find
        report = RunReport(
            rooms=run.rows,
            hidden=measure.hidden(find, succeeded),
            waterfall=[
                part
                for number, index in succeeded.items()
                if index == command.show
                for part in measure.shown_parts(find(number))
            ],
            ring_samples=run.ring_samples,
            failures=[[index, text] for index, text in run.failures.items()],
            held=self.held,
            counters=measure.growth(before, measure.counters(self.agent.observe.metrics())),
            # Agents keep a limited number of rooms: the rooms of a long run that ended first may have been discarded.
            stages=measure.stages(self.agent.observe.layers, [number for number in succeeded if find(number)]),
            ring_high_water_bytes=staging["ring"]["high_water_bytes"] if staging["ring"] else 0,
            cpu_ns=cpu_ns,
            peak_rss_bytes=measure.peak_rss_bytes(),
        )
        if in_force is not None:
            report["faults"] = in_force.end(run.failures)
        if run.busy is not None:
            report["loop"] = run.busy.times
        if self.gpu is not None:
            tokens = {room.index: room.tokens for room in rooms.values()}
            report["compute_alone"] = [[row[0], self.gpu.alone_ns(tokens[row[0]])] for row in run.rows]
        return report

    def verify(self, command: Verify) -> VerifyReport:
        """Compares a decode rank's pool with the expected content; returns an empty report on a prefill rank."""
        if self.start.role == "prefill":
            return VerifyReport(rooms=0, bytes=0, mismatches=[], bad_rooms=[])
        return verify(self.content, command.mode, self._failed)

    def _owns(self, room: Room) -> bool:
        """Whether this rank takes part in a room."""
        if self.start.role == "decode":
            return room.decode_dp == self.at.dp
        return room.instance == self.start.instance and room.number % own_side(self.start).dp == self.at.dp

    def _floors(self, command: Floors) -> FloorMeasured:
        device = self._pool.device
        if command.kind == "memcpy":
            rate = memcpy_gb_per_s(seconds=0.2)
            measure.forget_peak_rss()
            return FloorMeasured(gb_per_s=rate)
        if command.kind == "write":
            return FloorMeasured(gb_per_s=self.agent.measure_connection().write_gb_per_s)
        if device is None:
            return FloorMeasured(gb_per_s=None)
        if command.kind == "device":
            return FloorMeasured(gb_per_s=measure.device_gb_per_s(device))
        first = next(iter(self.agent.parts.connections.by_peer.values()), None)
        return FloorMeasured(gb_per_s=measure.peer_gb_per_s(device, first))

    def _gpu_engine(self) -> GpuEngine:
        start, side = self.start, own_side(self.start)
        return GpuEngine(
            layer_work(start.shape, side),
            f"cuda:{start.device}",
            len(self.agent.layers),
            chunk_pages(int(start.config["chunk_tokens"]), start.page_size) * start.page_size,
            side.cp,
        )

    # ---- live fleets ------------------------------------------------------------------------------------------------

    def _instances(self) -> list[int]:
        """Returns the prefill instances with which this rank can exchange rooms now."""
        if self.start.role == "prefill":
            return [] if self.agent.waiting_for() else [self.start.instance]
        serving = set(self.agent.serving())
        return [number for number, bootstrap in enumerate(self.start.bootstraps) if bootstrap in serving]

    def _set_fault(self, command: SetFault) -> None:
        error = None
        try:
            if command.spec == CLEAR:
                self.faults.clear()
            else:
                for fault in parse_faults(command.spec):
                    self.faults.set(fault, command.seconds)
        except ValueError as refused:
            error = str(refused)
        self._send("faults", FaultState(active=self.faults.active(), counts=self.faults.counts(), error=error))

    def _report_usage(self, command: Tell) -> None:
        """Sends a `Usage` report with all resources that could leak."""
        assert self._live is not None
        stats = self.agent.stats()
        ring, buffers = stats["ring"], stats["buffers"]
        usage = Usage(
            token=command.token,
            at_ns=time.monotonic_ns(),
            rss_bytes=measure.rss_bytes(),
            fds=measure.open_files(),
            threads=measure.threads(),
            rooms=len(self._live.handles),
            records=len(self.agent.machine.rooms),
            ring_bytes=ring["size_bytes"] if ring else 0,
            ring_used_bytes=ring["used_bytes"] if ring else 0,
            quarantined_bytes=stats["quarantined_bytes"],
            buffers_in_use=(buffers["pieces_used"] or 0) if buffers else 0,
            strays=self._live.verifier.sweep() if command.sweep else [],
        )
        self._send("usage", usage)

    def _report_progress(self, doing: str) -> None:
        self._send("progress", {"doing": doing})
