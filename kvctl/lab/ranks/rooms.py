"""The rooms of one rank: opens, computes and receives them, and reports their ends.

Rooms are opened one by one on commands of the parent (`Open`), or as a prepared batch (`Run`). A room opened by itself
is verified when it ends, and its pages are freed then. The rooms of a batch are opened by the rank itself, and their
pages are kept until the next batch; one report has the times of all of them.

Delayed work is kept in a heap ordered by time, and `poll` does what is due. It blocks only at the end of a batch, until
the pages of its rooms are free.

Under the fault `preempt` an engine takes the pages of a room back, fills them with poison as soon as the agent permits
their reuse, and goes on with the room in other pages: it computes the prompt again, or opens the room again.
"""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.busy_loop import BusyLoop
from kvctl.lab.ranks.compute import Forward, PipelineClock, scripted
from kvctl.lab.ranks.content import own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.messages import Abort, Ended, Mismatch, Open, Released, Room, Run, RunReport
from kvctl.lab.ranks.open_schedule import Arrivals, Decoding, RoomVisit
from kvctl.lab.ranks.verify import LiveVerifier
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.layout.parallel import local_shards
from kvctl_agent.protocol.machine import RECALLED
from kvctl_agent.runtime.handles import Handle, Receive, Send

if TYPE_CHECKING:
    from kvctl.lab.ranks.worker import StateChange, Worker

# The pages of a finished room are free a round trip later, those of a failed room when its writers have drained.
RELEASE_TIMEOUT_S = 10.0
_RELEASE_POLL_NS = 10_000_000  # the agent does not report when the pages of a finished room become free
_LONGEST_RUN_S = 0.5  # until a room is preempted; most are preempted early
_RUN_OVER = "the bench's run is over"


class Batch:
    """One run of a prepared batch of rooms: its limits, and the measurements that make its report.

    Attributes:
        failures: cause of each failed room as text, by room index.
        deadline_ns: time on the monotonic clock at which rooms that have not ended are aborted.
        release_ns: time until which the rank waits for the pages of ended rooms; None while rooms have not ended.
        busy: the loop that the rank's thread runs instead of waiting; None: it waits.
    """

    def __init__(self, worker: Worker, command: Run) -> None:
        self._worker = worker
        self.command = command
        self.rows: list[list[int]] = []
        self.failures: dict[int, str] = {}
        self.deadline_ns = time.monotonic_ns() + round(command.timeout_s * 1e9)
        self.release_ns: int | None = None
        self.busy = BusyLoop(command.busy) if command.busy else None
        self._counters = measure.counters(worker.agent.observe.metrics())
        self._cpu_ns = time.process_time_ns()

    def failed(self, room: Room, failure: Failure | None) -> None:
        """Records the cause of a failed room as one line of text."""
        name = self._worker.start.name
        self.failures[room.index] = (
            f"{failure['rank']}: {failure['text']} ({failure['code']})" if failure else f"{name}: unknown"
        )

    def report(self, held: list[int]) -> RunReport:
        """Returns the measurements of the run; `held` are the indices of rooms whose pages may still be written to."""
        cpu_ns = time.process_time_ns() - self._cpu_ns
        worker, agent = self._worker, self._worker.agent
        indices = {number: room.index for number, room in worker.content.rooms.items()}
        succeeded = {number: index for number, index in indices.items() if index not in self.failures}
        staging, find = agent.observe.staging(), agent.admin.worker.find
        prefill = worker.start.role == "prefill"
        shown = [number for number, index in succeeded.items() if prefill and index == self.command.show]
        report = RunReport(
            rooms=self.rows,
            hidden=measure.hidden(find, succeeded),
            groups=sum(measure.layer_groups(find(number), worker.start.shape["layers"]) for number in shown),
            failures=[[index, text] for index, text in self.failures.items()],
            held=held,
            counters=measure.growth(self._counters, measure.counters(agent.observe.metrics())),
            stages=measure.stages(find, list(succeeded)),
            ring_high_water_bytes=staging["ring"]["high_water_bytes"] if staging["ring"] else 0,
            cpu_ns=cpu_ns,
            peak_rss_bytes=measure.peak_rss_bytes(),
        )
        if self.busy is not None:
            report["loop"] = self.busy.times
            self.busy.close()
        return report


class Rooms(ABC):
    """The rooms of a rank.

    Attributes:
        handles: the agent's handle of every open room, by room number, until its pages are free.
        failed: numbers of the rooms that failed in the last run.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.content = worker.content
        self.handles: dict[int, Send | Receive] = {}
        self.verifier = LiveVerifier(worker.content, worker.start.verify)
        self.batch: Batch | None = None
        self.failed: set[int] = set()
        self._ended: set[int] = set()
        self._commands: dict[int, Open] = {}  # of rooms opened one by one, while they have handles
        self._recalled: dict[int, Send | Receive] = {}  # rooms whose pages the engine has taken back, not reused yet
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def busy(self) -> BusyLoop | None:
        """The loop that the rank's thread runs instead of waiting; None: it waits."""
        return self.batch.busy if self.batch is not None and self.batch.release_ns is None else None

    # ---- commands ---------------------------------------------------------------------------------------------------

    def open(self, command: Open) -> None:
        """Opens a room; reports the room as failed and released if the agent refuses it."""
        room = command.room
        try:
            self.content.add(room)
            self.verifier.opened(room.number)
            self._commands[room.number] = command
            self._begin(room)
            if draw := self.worker.faults.should_fire("preempt"):
                after_ns = round(_LONGEST_RUN_S * draw.random() ** 2 * 1e9)
                self._at(time.monotonic_ns() + after_ns, partial(self._recall, self.handles[room.number]))
        except KvctlError as error:
            code, text = type(error).__name__, str(error)
            cause = Failure(rank=self.worker.start.name, code=code, at_ns=time.time_ns(), text=text)
            self._report(room.number, RoomState.FAILED, cause, time.monotonic_ns(), 0, None)
            self._release(room.number)

    def abort(self, command: Abort) -> None:
        """Aborts a room; no effect if the room has ended or is unknown."""
        if handle := self.handles.get(command.room):
            handle.abort(command.reason)

    def run(self, command: Run) -> None:
        """Begins to transfer the prepared rooms; the answer is sent when all have ended, or at `Run.timeout_s`."""
        self.batch = Batch(self.worker, command)
        self._begin_batch(self.batch)

    # ---- events -----------------------------------------------------------------------------------------------------

    def changed(self, change: StateChange) -> None:
        """Handles the end of a room."""
        handle = change.handle
        number = handle.room
        if self.handles.get(number) is not handle or number in self._ended:
            return
        if number in self._recalled and _was_recalled(handle):
            return
        self._ended.add(number)
        if self.batch is not None:
            if change.state is not RoomState.SUCCESS:
                self.batch.failed(self.content.rooms[number], handle.error)
            self._end_in_batch(self.batch, number, change)
            return
        nbytes, mismatch = 0, None
        if change.state is RoomState.SUCCESS and self.worker.start.role == "decode":
            nbytes, mismatch = self.verifier.verify(number)
        self._report(number, change.state, handle.error, change.at_ns, nbytes, mismatch)

    def poll(self) -> int | None:
        """Does the work that is due; returns the time on the monotonic clock at which more is due, None if unknown."""
        while self._due and self._due[0][0] <= time.monotonic_ns():
            heapq.heappop(self._due)[2]()
        now_ns = time.monotonic_ns()
        times = [self._turn(now_ns), self._due[0][0] if self._due else None]
        if self.batch is not None:
            times.append(self._turn_batch(self.batch, now_ns))
        else:
            for number in [number for number in self._ended if self.handles[number].released]:
                self._release(number)
            for number in [number for number, handle in self._recalled.items() if handle.recalled]:
                self._go_on(self._recalled.pop(number))
            times.append(now_ns + _RELEASE_POLL_NS if self._ended or self._recalled else None)
        return min((at for at in times if at is not None), default=None)

    def _turn_batch(self, batch: Batch, now_ns: int) -> int | None:
        """Ends the run when all rooms have ended and their pages are free; returns when more is due."""
        if batch.release_ns is None:
            if now_ns < batch.deadline_ns and self._unfinished():
                return batch.deadline_ns
            self._give_up(batch)
            batch.release_ns = now_ns + round(RELEASE_TIMEOUT_S * 1e9)
        held = [number for number, handle in self.handles.items() if not handle.released]
        if held and now_ns < batch.release_ns:
            # The time until the report counts as time of the run, so the release itself ends the wait.
            self.handles[held[0]].wait(min(_RELEASE_POLL_NS, batch.release_ns - now_ns) / 1e9)
            return now_ns
        report = batch.report([self.content.rooms[number].index for number in held])
        self.batch = None
        self.handles.clear()  # the pages belong to the batch until the next one
        self._ended.clear()
        self.failed = {number for number, room in self.content.rooms.items() if room.index in batch.failures}
        self.worker.send("answer", report)
        return None

    # ---- what prefill and decode ranks do differently ---------------------------------------------------------------

    @abstractmethod
    def _begin(self, room: Room) -> None:
        """Opens a room at the agent and adds its handle."""

    @abstractmethod
    def _begin_batch(self, batch: Batch) -> None:
        """Opens the rooms of a batch, or plans to."""

    @abstractmethod
    def _turn(self, now_ns: int) -> int | None:
        """Does the work that is due at a rank of this role; returns when more is due."""

    @abstractmethod
    def _unfinished(self) -> bool:
        """Whether rooms of the batch have not ended."""

    @abstractmethod
    def _give_up(self, batch: Batch) -> None:
        """Aborts the rooms of a batch that have not ended and records them as failed."""

    @abstractmethod
    def _end_in_batch(self, batch: Batch, number: int, change: StateChange) -> None:
        """Handles the end of a room of a batch."""

    # ---- pages ------------------------------------------------------------------------------------------------------

    def _recall(self, handle: Send | Receive) -> None:
        """Takes the pages of a room back; `_go_on` follows once they may be reused."""
        if self.handles.get(handle.room) is handle and not handle.state.finished and not handle.released:
            handle.recall()
            self._recalled[handle.room] = handle

    def _go_on(self, handle: Send | Receive) -> None:
        """Gives a recalled room other pages and opens it again."""
        del self.handles[handle.room]
        self.content.remove(handle.room)
        self.open(self._commands[handle.room])

    def _release(self, number: int) -> None:
        """Frees the pages of a room that has ended and reports it."""
        self._ended.discard(number)
        self._recalled.pop(number, None)
        self.handles.pop(number, None)
        self._commands.pop(number, None)
        self.content.remove(number)
        self.worker.send("released", Released(room=number, at_ns=time.monotonic_ns()))

    def _report(
        self, room: int, state: RoomState, cause: Failure | None, at_ns: int, nbytes: int, mismatch: Mismatch | None
    ) -> None:
        ended = Ended(room=room, state=state.label, cause=cause, at_ns=at_ns, verified_bytes=nbytes, mismatch=mismatch)
        self.worker.send("ended", ended)

    def _at(self, at_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_ns, next(self._order), action))


class PrefillRooms(Rooms):
    """Rooms that a prefill rank computes and sends.

    A room is computed when the decode side waits for it, or at once if its command says so. A room of a batch is
    computed by the engine, one room at a time.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._to_compute: set[int] = set()  # rooms that are computed once the decode side waits for them
        self._waiting_ns: dict[int, int] = {}  # rooms that wait for their forward: since when
        self._steps: dict[int, Iterator[int]] = {}  # forwards that have begun and not ended
        self._forward: Forward | None = None
        self._prefetched = False

    def _begin(self, room: Room) -> None:
        self.handles[room.number] = self.worker.agent.send(room.number)
        command = self._commands.get(room.number)
        if command is not None and command.at_once:
            self._compute(room.number, 0)
        else:
            self._to_compute.add(room.number)

    def _begin_batch(self, batch: Batch) -> None:
        worker = self.worker
        layer_ns = round(batch.command.layer_ms * 1e6)
        self._forward = Forward(worker.agent, self.content, self._clock(layer_ns))
        for room in self.content.rooms.values():
            self._begin(room)
        # A forward that takes no time starts as soon as its room opens, so staging is requested now.
        self._prefetched = not layer_ns and worker.pipeline == "off"
        for send in self.handles.values() if self._prefetched else ():
            assert isinstance(send, Send)
            send.prefetch()

    def changed(self, change: StateChange) -> None:
        """Handles the end of a room, or that decode waits for it."""
        number = change.handle.room
        if change.state.finished:
            super().changed(change)
        elif number in self._to_compute and self.handles[number] is change.handle:
            self._to_compute.discard(number)
            self._waiting_ns[number] = change.at_ns

    def _turn(self, now_ns: int) -> int | None:
        if not self._waiting_ns:
            return None
        if self.batch is None:
            for number in list(self._waiting_ns):
                self._compute(number, self._waiting_ns.pop(number))
            return None
        # State changes are handled before the next forward starts, and rooms are computed in the order of the batch,
        # not in the order in which decode ranks opened them. So the tp ranks of an instance, which do not communicate,
        # mostly compute the same room at a time.
        if self._steps or now_ns >= self.batch.deadline_ns:
            return None
        if self.worker.inbox.empty():
            number = min(self._waiting_ns, key=lambda number: self.content.rooms[number].index)
            self._compute(number, self._waiting_ns.pop(number))
        return now_ns

    def _compute(self, number: int, asked_ns: int) -> None:
        """Begins the forward of a room that has waited for it since `asked_ns`."""
        room, send, command = self.content.rooms[number], self.handles[number], self._commands.get(number)
        assert isinstance(send, Send)
        if command is not None:
            steps = scripted(command, self.worker.agent, self.content, send)
        else:
            assert self._forward is not None
            steps = self._forward.run(room, send, asked_ns, self._prefetched)
        self._steps[number] = steps
        self._advance(number, steps)

    def _advance(self, number: int, steps: Iterator[int]) -> None:
        """Continues a forward until it has to wait, or to its end."""
        if self._steps.get(number) is not steps:
            return  # the room was released or preempted, and another room may own its pages
        since_ns = time.monotonic_ns()
        try:
            for at_ns in steps:
                if at_ns > time.monotonic_ns():
                    self._at(at_ns, partial(self._advance, number, steps))
                    return
        except KvctlError as error:
            if self.batch is None:  # the agent refused a call that is valid: the rank ends, and counts as crashed
                raise
            self.handles[number].abort(str(error))
        finally:
            if self.batch is not None and self.batch.busy is not None:
                self.batch.busy.called(since_ns)
        del self._steps[number]

    def _unfinished(self) -> bool:
        return len(self._ended) < len(self.handles)

    def _give_up(self, batch: Batch) -> None:
        for number in self.handles.keys() - self._ended:
            send, name = self.handles[number], self.worker.start.name
            batch.failures[self.content.rooms[number].index] = (
                f"still {send.state.label} on {name} at the run's deadline"
            )
            self._ended.add(number)
            send.abort(_RUN_OVER)
        self._to_compute.clear()
        self._waiting_ns.clear()
        self._steps.clear()

    def _end_in_batch(self, batch: Batch, number: int, change: StateChange) -> None:
        self._forget(number)
        assert self._forward is not None
        job = self._forward.jobs.pop(number, None)
        if change.state is RoomState.SUCCESS and job is not None:
            index = self.content.rooms[number].index
            batch.rows.append([index, job.started_ns, job.done_ns, change.at_ns, job.compute_ns])

    def _recall(self, handle: Send | Receive) -> None:
        super()._recall(handle)
        if handle.room in self._recalled:
            self._forget(handle.room)

    def _go_on(self, handle: Send | Receive) -> None:
        if handle.released:  # all parts were sent, or the room has failed
            return
        room = self.content.rooms[handle.room]
        self.content.remove(handle.room)
        self.content.add(room)
        if self._commands[handle.room].at_once or handle.state is not RoomState.BOOTSTRAPPING:
            self._compute(handle.room, 0)
        else:
            self._to_compute.add(handle.room)

    def _release(self, number: int) -> None:
        self._forget(number)
        super()._release(number)

    def _forget(self, number: int) -> None:
        """Drops what is still to be computed of a room."""
        self._to_compute.discard(number)
        self._waiting_ns.pop(number, None)
        self._steps.pop(number, None)

    def _clock(self, layer_ns: int) -> PipelineClock:
        start = self.worker.start
        side, shape = own_side(start), model_shape(start.shape, start.state_page_size or start.page_size)
        stages = [
            local_shards(shape, start.page_size, side, self.worker.at._replace(pp=stage)) for stage in range(side.pp)
        ]
        # Layers of KV groups and state are computed with the KV layers beside which they run.
        layers = [sum(each.num_layers for each in stage if each.segment.table == 0) for stage in stages]
        return PipelineClock(layers, self.worker.at.pp, layer_ns)


class DecodeRooms(Rooms):
    """Rooms that a decode rank receives; it decodes those of a batch.

    The next room of a batch is opened whenever fewer rooms than the window are in flight; all ranks of a dp group open
    the rooms in the same order.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._visits: dict[int, RoomVisit] = {}  # rooms of the batch in flight, until decoded
        self._arrivals = Arrivals((), 0)
        self._decoding = Decoding(0)

    def _begin(self, room: Room) -> None:
        worker, content = self.worker, self.content
        pages, *groups = content.wanted(room)
        self.handles[room.number] = worker.agent.receive(
            room.number,
            pages,
            prefill=worker.start.bootstraps[room.instance],
            prefix_tokens=room.prefix_tokens,
            aux_index=content.slots[room.number],
            state_indices=content.states(room.number),
            tokens=room.tokens,
            group_pages=groups,
        )

    def _begin_batch(self, batch: Batch) -> None:
        self._arrivals = Arrivals(self.content.rooms.values(), time.monotonic_ns())
        self._decoding = Decoding(round(batch.command.decode_ms * 1e6))
        self._visits.clear()

    def _turn(self, now_ns: int) -> int | None:
        batch = self.batch
        if batch is None or batch.release_ns is not None or now_ns >= batch.deadline_ns:
            return None
        self._decoded(batch, self._decoding.advance(now_ns))
        window = batch.command.windows[self.worker.at.dp]
        while len(self._visits) < window and (visit := self._arrivals.take(now_ns)) is not None:
            self._visits[visit.room.number] = visit
            self._begin(visit.room)
        arrival_ns = self._arrivals.next_ns if len(self._visits) < window else None
        times = (self._decoding.next_ns, arrival_ns)
        return min((at for at in times if at is not None), default=None)

    def _unfinished(self) -> bool:
        return bool(self._arrivals or self._visits)

    def _give_up(self, batch: Batch) -> None:
        name = self.worker.start.name
        for number, visit in self._visits.items():
            handle = self.handles[number]
            doing = "decoding" if visit.success_ns else handle.state.label
            batch.failures[visit.room.index] = f"still {doing} on {name} at the run's deadline"
            self._ended.add(number)
            handle.abort(_RUN_OVER)
        for room in self._arrivals.untaken():
            batch.failures[room.index] = f"not opened on {name} before the run's deadline"

    def _end_in_batch(self, batch: Batch, number: int, change: StateChange) -> None:
        visit, now_ns = self._visits[number], time.monotonic_ns()
        if change.state is RoomState.SUCCESS:
            visit.success_ns = change.at_ns
            self._decoded(batch, self._decoding.join(visit, now_ns))
        else:
            del self._visits[number]

    def _decoded(self, batch: Batch, visits: list[RoomVisit]) -> None:
        for visit in visits:
            batch.rows.append(visit.row())
            del self._visits[visit.room.number]


def _was_recalled(handle: Handle) -> bool:
    """Whether a decode rank's room has ended because this engine took its pages back."""
    return isinstance(handle, Receive) and handle.error is not None and handle.error["code"] == RECALLED
