"""Runs one batch of rooms on one rank, driven by the agent's state changes, until all rooms have ended.

A prefill rank creates a Send for every room of the batch up front. It computes one room at a time, and a room only once
the decode side waits for it. A decode rank opens the next room whenever fewer rooms than its window are in flight; all
ranks of a dp group open the rooms in the same order.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvctl.lab.faults.batch_faults import Aborts, BatchFaults
from kvctl.lab.ranks.busy_loop import BusyLoop
from kvctl.lab.ranks.compute import Forward, Job, PipelineClock, SleepingEngine
from kvctl.lab.ranks.content import own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.measure import Samples
from kvctl.lab.ranks.messages import Room, Run
from kvctl.lab.ranks.open_schedule import Arrivals, Decoding, RoomVisit
from kvctl.lab.ranks.request import STAGED_PATHS
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.layout.parallel import local_shards
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.runtime.handles import Handle, Send

if TYPE_CHECKING:
    from kvctl.lab.ranks.worker import StateChange, Worker

# The pages of a finished room are free a round trip later, those of a failed room when its writers have drained.
RELEASE_TIMEOUT_S = 10.0
_PLAIN = "off"
# Poll interval while rooms wait for a busy GPU.
_GPU_POLL_NS = 200_000
_RUN_OVER = "the bench's run is over"


class BatchRun(ABC):
    """Base class of the runs of a prefill rank and of a decode rank.

    Attributes:
        rows: times of each successful room, as in `RunReport.rooms`.
        failures: cause of each failed room as text, by room index.
        handles: the agent's handle of every opened room, by room number.
        held: indices of ended rooms whose pages were not free at the end of the run.
        ring_samples: fill levels of the staging ring, as in `RunReport.ring_samples`.
        busy: the loop that this thread runs instead of waiting; None: it waits.
    """

    def __init__(self, worker: Worker, command: Run, faults: BatchFaults | None) -> None:
        self.worker = worker
        self.command = command
        self.faults = faults
        self.aborts = faults.aborts if faults is not None else Aborts(worker.start, 0.0)
        self.rooms = worker.content.rooms
        self.rows: list[list[int]] = []
        self.failures: dict[int, str] = {}
        self.handles: dict[int, Handle] = {}
        self.held: list[int] = []
        self.ring_samples: list[list[int]] = []
        self.busy = BusyLoop() if command.busy else None

    def drive(self, deadline_ns: int) -> None:
        """Runs until every room has ended, or until the deadline; then waits for the pages to become free.

        The wait lasts at most `RELEASE_TIMEOUT_S`. The rooms whose pages are not free by then are listed in `held`.
        """
        self.until_done(deadline_ns)
        self.give_up()
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        for number, handle in self.handles.items():
            handle.wait(max(0.0, deadline - time.monotonic()))
            if not handle.released:
                self.held.append(self.rooms[number].index)

    @abstractmethod
    def until_done(self, deadline_ns: int) -> None:
        """Drives the rooms until all have ended, or until `deadline_ns` on the monotonic clock."""

    @abstractmethod
    def give_up(self) -> None:
        """Aborts the rooms that have not ended and records them as failed."""

    def next_change(self, until_ns: int) -> StateChange | None:
        """Waits for the next state change of any room; returns None if none occurs before `until_ns`."""
        if self.busy is not None:
            self.busy.iterate()
            while self.worker.changes.empty() and time.monotonic_ns() < until_ns:
                self.busy.iterate()
            until_ns = 0
        left_s = (until_ns - time.monotonic_ns()) / 1e9
        try:
            change: StateChange = (
                self.worker.changes.get(timeout=left_s) if left_s > 0 else self.worker.changes.get_nowait()
            )
        except queue.Empty:
            return None
        return change

    def failed(self, room: Room, failure: Failure | None) -> None:
        """Records the cause of a failed room as one line of text."""
        if self.faults is not None:
            self.faults.failed(room.index, failure)
        name = self.worker.start.name
        self.failures[room.index] = (
            f"{failure['rank']}: {failure['text']} ({failure['code']})" if failure else f"{name}: unknown"
        )


class PrefillRun(BatchRun):
    """Computes and sends the rooms of a batch."""

    def __init__(self, worker: Worker, command: Run, faults: BatchFaults | None) -> None:
        super().__init__(worker, command, faults)
        layer_ns = round(command.layer_ms * 1e6)
        # A forward that takes no time starts as soon as its room opens, so staging is requested now.
        self._prefetched = worker.gpu is None and not layer_ns and worker.pipeline == _PLAIN
        self._layer_ns = layer_ns
        self._waiting_ns: dict[int, int] = {}  # for each room that waits for its forward, the time it began to wait
        self._jobs: dict[int, Job] = {}
        self._sends: dict[int, Send] = {number: worker.agent.send(number) for number in self.rooms}
        self.handles.update(self._sends)
        self._pending = set(self._sends)
        if self._prefetched:
            for send in self._sends.values():
                send.prefetch()

    def until_done(self, deadline_ns: int) -> None:
        worker = self.worker
        engine = worker.gpu or SleepingEngine(self._clock(), len(worker.agent.layers))
        forward = Forward(worker.agent, worker.content, engine, deadline_ns)
        while self._pending:
            # State changes are handled before the next forward starts, and rooms are computed in the order of the
            # batch, not in the order in which decode ranks opened them. So the tp ranks of an instance, which do not
            # communicate, mostly compute the same room at a time.
            now_ns = time.monotonic_ns()
            self.aborts.abort_due(now_ns)
            ready = bool(self._waiting_ns) and forward.ready
            until_ns = min(deadline_ns, self.aborts.next_ns or deadline_ns)
            if self._waiting_ns:
                until_ns = 0 if ready else min(until_ns, now_ns + _GPU_POLL_NS)
            change = self.next_change(until_ns)
            if change is not None:
                self._changed(change)
            elif ready:
                self._compute(forward, min(self._waiting_ns, key=lambda number: self.rooms[number].index))
            elif now_ns >= deadline_ns:
                break

    def give_up(self) -> None:
        for number in self._pending:
            send, name = self._sends[number], self.worker.start.name
            self.failures[self.rooms[number].index] = f"still {send.state.label} on {name} at the run's deadline"
            send.abort(_RUN_OVER)

    def _compute(self, forward: Forward, number: int) -> None:
        room, send, waiting_ns = self.rooms[number], self._sends[number], self._waiting_ns.pop(number)
        since_ns = time.monotonic_ns()
        try:
            self._jobs[number] = forward.run(room, send, waiting_ns, self._prefetched)
        except KvctlError as error:
            send.abort(str(error))
        if self.busy is not None:
            self.busy.called(since_ns)

    def _changed(self, change: StateChange) -> None:
        number = change.handle.room
        if number not in self._pending:
            return
        if change.state is RoomState.WAITING_FOR_INPUT:
            self._waiting_ns[number] = change.at_ns
            self.aborts.began(self.rooms[number], self._sends[number], change.at_ns)
        elif change.state.finished:
            self._pending.remove(number)
            self._waiting_ns.pop(number, None)
            self.aborts.ended(number, change.at_ns)
            if change.state is RoomState.SUCCESS:
                started_ns, done_ns, compute_ns = self._jobs.pop(number).computed()
                self.rows.append([self.rooms[number].index, started_ns, done_ns, change.at_ns, compute_ns])
            else:
                self.failed(self.rooms[number], self._sends[number].error)

    def _clock(self) -> PipelineClock:
        start = self.worker.start
        side, shape = own_side(start), model_shape(start.shape, start.state_page_size or start.page_size)
        stages = [
            local_shards(shape, start.page_size, side, self.worker.at._replace(pp=stage)) for stage in range(side.pp)
        ]
        # Layers of KV groups and state are computed with the KV layers beside which they run.
        layers = [sum(each.num_layers for each in stage if each.segment.table == 0) for stage in stages]
        return PipelineClock(layers, self.worker.at.pp, self._layer_ns)


class DecodeRun(BatchRun):
    """Opens, receives and decodes the rooms of a batch."""

    def __init__(self, worker: Worker, command: Run, faults: BatchFaults | None) -> None:
        super().__init__(worker, command, faults)
        machine = worker.agent.machine
        assert isinstance(machine, DecodeMachine)
        self._samples = Samples((lambda: machine.ring.used_bytes) if worker.path in STAGED_PATHS else None)
        self.ring_samples = self._samples.taken
        self._window = command.windows[worker.at.dp]
        self._arrivals = Arrivals(self.rooms.values(), time.monotonic_ns())
        self._decoding = Decoding(round(command.decode_ms * 1e6))
        self._visits: dict[int, RoomVisit] = {}  # in flight, until decoded

    def until_done(self, deadline_ns: int) -> None:
        while (now_ns := time.monotonic_ns()) < deadline_ns:
            self._decoded(self._decoding.advance(now_ns), now_ns)
            if not self._arrivals and not self._visits:
                break
            while len(self._visits) < self._window and (visit := self._arrivals.take(now_ns)) is not None:
                self._open(visit, now_ns)
            self.aborts.abort_due(now_ns)
            times = [self._decoding.next_ns, self._samples.next_ns, self.aborts.next_ns, deadline_ns]
            if len(self._visits) < self._window:
                times.append(self._arrivals.next_ns)
            change = self.next_change(min(at for at in times if at is not None))
            if change is not None:
                self._changed(change)
            self._samples.look(time.monotonic_ns())

    def give_up(self) -> None:
        name = self.worker.start.name
        for number, visit in self._visits.items():
            handle = self.handles[number]
            doing = "decoding" if visit.success_ns else handle.state.label
            self.failures[visit.room.index] = f"still {doing} on {name} at the run's deadline"
            handle.abort(_RUN_OVER)
        for room in self._arrivals.untaken():
            self.failures[room.index] = f"not opened on {name} before the run's deadline"

    def _open(self, visit: RoomVisit, now_ns: int) -> None:
        room, content, start = visit.room, self.worker.content, self.worker.start
        self._visits[room.number] = visit
        pages, *groups = content.wanted(room)
        handle = self.handles[room.number] = self.worker.agent.receive(
            room.number,
            pages,
            prefill=start.bootstraps[room.instance],
            prefix_tokens=room.prefix_tokens,
            aux_index=content.slots[room.number],
            state_indices=content.states(room.number),
            tokens=room.tokens,
            group_pages=groups,
        )
        self.aborts.began(room, handle, now_ns)

    def _changed(self, change: StateChange) -> None:
        visit = self._visits.get(change.handle.room)
        if visit is None or not change.state.finished:
            return
        now_ns = time.monotonic_ns()
        self.aborts.ended(visit.room.number, now_ns)
        if change.state is RoomState.SUCCESS:
            visit.success_ns = change.at_ns
            self._decoded(self._decoding.join(visit, now_ns), now_ns)
            return
        self.failed(visit.room, self.handles[visit.room.number].error)
        self._over(visit, now_ns)

    def _decoded(self, visits: list[RoomVisit], now_ns: int) -> None:
        for visit in visits:
            self.rows.append(visit.row())
            self._over(visit, now_ns)

    def _over(self, visit: RoomVisit, now_ns: int) -> None:
        del self._visits[visit.room.number]
        self._arrivals.over(visit.room, now_ns)
