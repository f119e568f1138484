"""One synthetic worker: pool, agent and the phases that both roles share.

Within a run a worker is driven only by its agent's state changes; the bench is not heard until the run is over.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvctl.lab.faults.agent import faulty_agent
from kvctl.lab.faults.batch_faults import Aborts, FaultRun
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import Fault, parse_fault
from kvctl.lab.ranks import measure
from kvctl.lab.ranks.content import Content, allocate_pool, own_coord, own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.measure import device_gb_per_s, peer_gb_per_s
from kvctl.lab.ranks.messages import (
    Command,
    FloorMeasured,
    Floors,
    Prepare,
    Probe,
    Probed,
    Ready,
    Room,
    Run,
    RunReport,
    Start,
    Verify,
    VerifyReport,
)
from kvctl_agent.agent import Agent
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.memory.allocations import HugePageMemory
from kvctl_agent.memory.memcpy_rate import memcpy_gb_per_s
from kvctl_agent.paths.calibration import measure_copies
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import Handle

CLOSE_TIMEOUT_S = 3.0
_COPIES_BYTES = 64 << 20  # larger than the caches
# A finished room's pages are free a round trip later; a failed one's when its writers have drained.
RELEASE_TIMEOUT_S = 10.0


class Change(NamedTuple):
    """A room's handle reached a state, on the monotonic clock."""

    handle: Handle
    state: RoomState
    at_ns: int


class Outcome(NamedTuple):
    """What became of a run's rooms.

    Attributes:
        rows: of `RunReport.rooms`, one per room that succeeded.
        failures: the cause of each that did not, by index.
        ring_samples: of `RunReport`.
    """

    rows: list[list[int]]
    failures: dict[int, str]
    ring_samples: list[list[int]]


class Worker(ABC):
    """A rank of either role."""

    def __init__(self, start: Start, progress: Callable[[str], None]) -> None:
        """Allocate the pool and start the agent; `progress` is told what is being waited for."""
        self.start = start
        self.at = own_coord(start)
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        progress("touching its KV pool")
        self._pool = allocate_pool(start)
        self.content = Content(self._pool, start)
        progress("starting its agent")
        self.faults = FaultInjector(start.name, start.seed) if start.faulty else None
        kind: Callable[..., Agent] = partial(faulty_agent, self.faults) if self.faults is not None else Agent
        self.agent = kind(
            role=start.role,
            rank=_rank(start),
            pool=self._pool,
            name=start.name,
            bootstrap=self.bootstraps(),
            model=model_shape(start.shape, start.page_size),
            on_state=self._on_state,
            **start.config,
        )
        self.failed: set[int] = set()
        self.held: list[int] = []
        self.aborts = Aborts(start, 0.0)
        self._trial: FaultRun | None = None

    def meet(self, progress: Callable[[str], None]) -> Ready:
        """Start the agent and wait until it has met all its peers.

        Raises:
            DeadlineExceeded: names the peers that are missing.
        """
        self.agent.start()
        progress("waiting for its peers")
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

    def floors(self, command: Floors) -> FloorMeasured:
        """Measure one of this machine's limits; nothing else may run meanwhile."""
        if command.kind == "memcpy":
            floor = memcpy_gb_per_s(seconds=0.2)
            measure.forget_peak_rss()
            return FloorMeasured(gb_per_s=floor)
        if command.kind != "write":
            return FloorMeasured(gb_per_s=self._device_floor(command.kind))
        return FloorMeasured(gb_per_s=self.agent.measure_connection().write_gb_per_s)

    def probe(self) -> Probed:
        """What a write to the first decode rank costs, and what row copies do."""
        lane = self.agent.measure_connection()
        with HugePageMemory(_COPIES_BYTES) as memory:
            copies = measure_copies(memory.array)
        floor = memcpy_gb_per_s(seconds=0.2)
        measure.forget_peak_rss()
        return Probed(
            write_gb_per_s=lane.write_gb_per_s,
            us_per_write=lane.us_per_write,
            us_by_bytes=list(lane.us_by_bytes),
            gather=list(zip(copies.row_bytes, copies.gather_us_per_mib, strict=True)),
            scatter=list(zip(copies.row_bytes, copies.scatter_us_per_mib, strict=True)),
            memcpy_gb_per_s=floor,
        )

    def _device_floor(self, kind: str) -> float | None:
        device = self._pool.device
        if device is None:
            return None
        if kind == "device":
            return device_gb_per_s(device)
        return peer_gb_per_s(device, next(iter(self.agent.parts.connections.by_peer.values()), None))

    def look(self) -> float | None:
        """Nothing is due between two commands."""
        return None

    def handle(self, command: Command) -> Mapping[str, Any]:
        """Carry out a command; returns the answer.

        Raises:
            LocalProtocolError: it is none of a bench.
        """
        match command:
            case Floors():
                return self.floors(command)
            case Probe():
                return self.probe()
            case Prepare():
                self.prepare(command)
                return {}
            case Run():
                return self.run(command)
            case Verify():
                return self.verify(command)
        raise LocalProtocolError(f"{self.start.name} belongs to a bench, which has no {command.do}")

    @abstractmethod
    def bootstraps(self) -> tuple[str, ...]:
        """Endpoints of the prefill instances that this rank belongs to or is served by."""

    @abstractmethod
    def owns(self, room: Room) -> bool:
        """Whether this rank has to do with a room."""

    def prepare(self, command: Prepare) -> None:
        """Take a lot, and get the pool ready for it."""
        self.failed.clear()
        self.content.take([room for room in command.rooms if self.owns(room)])
        self.agent.set_path(command.path)

    def run(self, command: Run) -> RunReport:
        """Drive the prepared rooms until all have finished or `timeout_s` is over."""
        before, cpu_before = measure.counters(self.agent.observe.metrics()), measure.cpu_ns()
        deadline_ns = time.monotonic_ns() + round(command.timeout_s * 1e9)
        self._begin(tuple(map(parse_fault, command.faults)))
        outcome = self.drive(command, deadline_ns)
        cpu_ns = measure.cpu_ns() - cpu_before
        failures, rooms = outcome.failures, self.content.rooms
        self.failed = {number for number in rooms if rooms[number].index in failures}
        staging = self.agent.observe.staging()
        succeeded = {number: room.index for number, room in rooms.items() if number not in self.failed}
        find = self.agent.telemetry.rooms.find
        report = RunReport(
            rooms=outcome.rows,
            hidden=measure.hidden(find, succeeded),
            waterfall=[
                part
                for number, index in succeeded.items()
                if index == command.show
                for part in measure.shown_parts(find(number))
            ],
            ring_samples=outcome.ring_samples,
            failures=[[index, text] for index, text in failures.items()],
            held=self.held,
            counters=measure.growth(before, measure.counters(self.agent.observe.metrics())),
            # Agents forget: rooms of a long run that were over first may be gone, whatever their place in it.
            stages=measure.stages(self.agent.observe.layers, [number for number in succeeded if find(number)]),
            ring_high_water_bytes=staging["ring"]["high_water_bytes"] if staging["ring"] else 0,
            cpu_ns=cpu_ns,
            peak_rss_bytes=measure.peak_rss_bytes(),
        )
        if self._trial is not None:
            report["faults"] = self._trial.end(failures)
        return report

    def _begin(self, faults: Sequence[Fault]) -> None:
        """Bring the faults of a run into force; without any nothing is watched that needs not be."""
        self.aborts = Aborts(self.start, sum(fault.share for fault in faults if fault.name == "abort"))
        self._trial = FaultRun(self.agent, self.faults, faults) if faults and self.faults is not None else None

    @abstractmethod
    def drive(self, command: Run, deadline_ns: int) -> Outcome:
        """Drive the rooms until all are over or the deadline is."""

    @abstractmethod
    def verify(self, command: Verify) -> VerifyReport:
        """Check what landed here."""

    def close(self) -> None:
        """Close the agent, then the pool that it wrote to."""
        self.agent.close(CLOSE_TIMEOUT_S)
        self._pool.close()

    def next_change(self, until_ns: int) -> Change | None:
        """The next state change of any room, or None when there was none until then."""
        left_s = (until_ns - time.monotonic_ns()) / 1e9
        try:
            return self._changes.get(timeout=left_s) if left_s > 0 else self._changes.get_nowait()
        except queue.Empty:
            return None

    def settle(self, handles: Iterable[Handle]) -> None:
        """Wait until the pages of finished rooms are free, and remember those that stay held."""
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        self.held = []
        for handle in handles:
            handle.wait(max(0.0, deadline - time.monotonic()))
            if not handle.released:
                self.held.append(self.content.rooms[handle.room].index)

    def cause(self, room: Room, failure: Failure | None) -> str:
        """Why a room failed, in a line."""
        if self._trial is not None:
            self._trial.failed(room.index, failure)
        return f"{failure['rank']}: {failure['text']} ({failure['code']})" if failure else f"{self.start.name}: unknown"

    def _on_state(self, handle: Handle, state: RoomState) -> None:
        # On the agent's control thread: only note the time and pass it on.
        self._changes.put(Change(handle, state, time.monotonic_ns()))


def _rank(start: Start) -> Rank:
    side = own_side(start)
    return Rank(
        **own_coord(start)._asdict(),
        dp_size=side.dp,
        pp_size=side.pp,
        cp_size=side.cp,
        tp_size=side.tp,
        stages=side.stages,
    )
