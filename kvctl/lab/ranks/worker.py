"""The synthetic worker of a rank process: its pool, its agent, and the handlers of the parent's commands.

All of this code runs on the main thread of the process. The thread waits for the next command or state change of a room
and does the work that is due meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvctl.lab.faults.agent import faulty_agent
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_faults
from kvctl.lab.ranks import measure
from kvctl.lab.ranks.busy_loop import measure_idle
from kvctl.lab.ranks.content import Content, allocate_pool, own_coord, own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.messages import (
    Abort,
    Connect,
    FaultState,
    FloorMeasured,
    Measure,
    Open,
    Prepare,
    Ready,
    Room,
    Run,
    Serving,
    SetFault,
    Start,
    Tell,
    Usage,
    Verify,
    VerifyReport,
)
from kvctl.lab.ranks.rooms import DecodeRooms, PrefillRooms
from kvctl.lab.ranks.verify import verify
from kvctl_agent.admin.documents import quarantined_bytes
from kvctl_agent.admin.machine_views import ring_use
from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.calibration import memcpy_gb_per_s
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import Handle

CLEAR = "clear"
"""Value of `SetFault.spec` that ends all faults."""

CLOSE_TIMEOUT_S = 3.0
_PROGRESS_INTERVAL_S = 1.0
_IDLE_S = 0.5
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
        inbox: queue of the parent's commands and of the rooms' state changes that the rank acts on, in the order in
            which they occurred.
        path, pipeline: transfer path and pipeline mode of the prepared batch.
    """

    def __init__(self, start: Start, inbox: queue.SimpleQueue[Any], send: SendMessage) -> None:
        """Allocates the pool and builds the agent, without starting it."""
        self.start = start
        self.at = own_coord(start)
        self.inbox = inbox
        self.send = send
        self.path, self.pipeline = "", "off"
        self._serving: list[int] | None = None
        self._look_at = self._progress_at = 0.0
        self._report_progress("touching its KV pool")
        self._pool = allocate_pool(start)
        self.content = Content(self._pool, start)
        self._report_progress("starting its agent")
        self.faults = FaultInjector(start.name, start.seed)
        for fault in parse_faults(start.faults) if start.faults else ():
            self.faults.set(fault)
        make_agent: Callable[..., Agent] = partial(faulty_agent, self.faults) if start.faulty else Agent
        decode = start.role == "decode"
        self.agent = build_agent(start, self._pool, make_agent, on_state=self._queue_change)
        self.rooms = (DecodeRooms if decode else PrefillRooms)(self)
        if start.verify:
            self.content.poison()
        self._handlers: dict[type, Callable[[Any], Mapping[str, Any] | None]] = {
            StateChange: self._change_state,
            Connect: self._connect,
            Measure: self._measure,
            Prepare: self._prepare,
            Run: self.rooms.run,
            Verify: self._verify,
            Open: self.rooms.open,
            Abort: self.rooms.abort,
            SetFault: self._set_fault,
            Tell: self._report_usage,
        }

    def begin(self) -> None:
        """Starts the agent."""
        self.agent.start()

    def handle(self, item: Any) -> None:
        """Handles a command or a state change; sends the answer if the command has one.

        Raises:
            DeadlineExceeded: peers are missing at the end of `Connect.timeout_s`; the message names them.
        """
        answer = self._handlers[type(item)](item)
        if answer is not None:
            self.send("answer", answer)

    def next(self) -> Any:
        """Returns the next item of the inbox; does the work that is due meanwhile."""
        while True:
            wait_s = self._poll()
            if (busy := self.rooms.busy) is not None:
                until = time.monotonic() + wait_s
                busy.turn()
                while self.inbox.empty() and time.monotonic() < until:
                    busy.turn()
                wait_s = 0.0
            with contextlib.suppress(queue.Empty):
                return self.inbox.get(timeout=wait_s)

    def _poll(self) -> float:
        """Does the work that is due; returns the seconds after which more may be due."""
        due_ns = self.rooms.poll()
        now = time.monotonic()
        if now >= self._look_at:
            serving = self._instances()
            if serving != self._serving and (serving or self._serving):
                self._serving = serving
                self.send("serving", Serving(instances=serving, incarnation=f"{self.agent.incarnation:016x}"))
            wanted = len(self.start.bootstraps) if self.start.role == "decode" else 1
            self._look_at = now + (_IDLE_S if len(serving) >= wanted else _PEER_POLL_S)
        if now - self._progress_at >= _PROGRESS_INTERVAL_S:
            self._progress_at = now
            if missing := self.agent.waiting_for():
                self._report_progress(missing)
        wait_s = self._look_at - now
        return wait_s if due_ns is None else max(0.0, min(wait_s, (due_ns - time.monotonic_ns()) / 1e9))

    def close(self) -> None:
        """Closes the agent, then the pool, to which the agent can no longer write."""
        self.agent.close(CLOSE_TIMEOUT_S)
        self._pool.close()

    def _queue_change(self, handle: Handle, state: RoomState) -> None:
        """Queues a state change of a room; called on the agent's control thread.

        A change on which the rank does not act would only wake the main thread, which then has the interpreter while
        the agent needs it.
        """
        if state.finished or (state is RoomState.WAITING_FOR_INPUT and self.start.role == "prefill"):
            self.inbox.put(StateChange(handle, state, time.monotonic_ns()))

    # ---- handlers ---------------------------------------------------------------------------------------------------

    def _change_state(self, change: StateChange) -> None:
        self.rooms.changed(change)
        if change.state.finished and self.rooms.batch is None:
            self._look_at = 0.0  # it may have failed with the loss of an instance

    def _connect(self, command: Connect) -> Ready:
        self._report_progress("waiting for its peers")
        self.agent.wait_ready(command.timeout_s)
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

    def _prepare(self, command: Prepare) -> Mapping[str, Any]:
        """Allocates pages for those rooms of a batch in which this rank takes part, and sets up the pool's content.

        A prefill rank writes the test pattern; a decode rank fills its pool with poison if the command says so.
        """
        self.content.take([room for room in command.rooms if self._owns(room)])
        self.path = command.path
        self.agent.set_path(command.path)
        if self.start.role == "prefill":
            self.pipeline = command.pipeline
            self.agent.set_pipeline(command.pipeline)
            self.content.fill(command.batch)
        elif command.poison:
            self.content.poison()
        return {}

    def _verify(self, command: Verify) -> VerifyReport:
        """Compares a decode rank's pool with the expected content; returns an empty report on a prefill rank."""
        if self.start.role == "prefill":
            return VerifyReport(rooms=0, bytes=0, mismatches=[], bad_rooms=[])
        return verify(self.content, command.mode, self.rooms.failed)

    def _owns(self, room: Room) -> bool:
        """Whether this rank takes part in a room."""
        if self.start.role == "decode":
            return room.decode_dp == self.at.dp
        return room.instance == self.start.instance and room.number % own_side(self.start).dp == self.at.dp

    def _measure(self, command: Measure) -> Mapping[str, Any]:
        device = self._pool.device
        if command.kind == "loop":
            return measure_idle(command.busy, command.seconds)
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
        self.send("faults", FaultState(active=self.faults.active(), counts=self.faults.counts(), error=error))

    def _report_usage(self, command: Tell) -> None:
        """Sends a `Usage` report with all resources that could leak."""
        parts = self.agent.parts
        ring, buffers = ring_use(parts.machine), parts.buffers
        usage = Usage(
            token=command.token,
            at_ns=time.monotonic_ns(),
            rss_bytes=measure.rss_bytes(),
            fds=len([*Path("/proc/self/fd").iterdir()]),
            threads=len([*Path("/proc/self/task").iterdir()]),
            rooms=len(self.rooms.handles),
            records=len(self.agent.machine.rooms),
            ring_bytes=ring["size_bytes"] if ring else 0,
            ring_used_bytes=ring["used_bytes"] if ring else 0,
            quarantined_bytes=quarantined_bytes(parts),
            buffers_in_use=buffers.in_use if buffers else 0,
            strays=self.rooms.verifier.sweep() if command.sweep else [],
        )
        self.send("usage", usage)

    def _report_progress(self, doing: str) -> None:
        self.send("progress", {"doing": doing})


def build_agent(start: Start, pool: KVPool, make_agent: Callable[..., Agent] = Agent, **more: Any) -> Agent:
    """Builds the agent of a rank, without starting it.

    Args:
        make_agent: `Agent`, or a function that takes its arguments.
    """
    side = own_side(start)
    sizes = {f"{name}_size": getattr(side, name) for name in ("dp", "pp", "cp", "tp")}
    return make_agent(
        role=start.role,
        rank=Rank(**own_coord(start)._asdict(), **sizes, stages=side.stages),
        pool=pool,
        name=start.name,
        bootstrap=start.bootstraps if start.role == "decode" else (start.bootstraps[start.instance],),
        model=model_shape(start.shape, start.state_page_size or start.page_size),
        **start.config,
        **more,
    )
