"""The prefill side: computes one room after the other, each when the decode side waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvctl.lab.ranks.compute import Compute, Forward, Job, SleepingEngine
from kvctl.lab.ranks.content import own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.gpu_engine import GpuEngine, layer_work
from kvctl.lab.ranks.messages import Prepare, Room, Run, RunReport, Start, Verify, VerifyReport
from kvctl.lab.ranks.worker import Change, Outcome, Worker
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.parallel import local_shards
from kvctl_agent.runtime.handles import Send

_PLAIN = "off"
# How often it is looked whether a GPU that is busy takes another room.
_LOOK_NS = 200_000


class PrefillWorker(Worker):
    """Creates every room of the lot up front."""

    _pipeline = _PLAIN
    _gpu: GpuEngine | None = None

    def __init__(self, start: Start, progress: Callable[[str], None]) -> None:
        super().__init__(start, progress)
        if start.compute == "gpu":
            progress("getting its GPU ready to compute")
            self._gpu = self._gpu_engine()

    def bootstraps(self) -> tuple[str, ...]:
        return (self.start.bootstraps[self.start.instance],)

    def owns(self, room: Room) -> bool:
        return room.instance == self.start.instance and room.number % own_side(self.start).dp == self.at.dp

    def prepare(self, command: Prepare) -> None:
        super().prepare(command)
        self._pipeline = command.pipeline
        self.agent.set_pipeline(command.pipeline)
        self.content.fill(command.lot)
        if self._gpu is not None:
            self._gpu.prepare(room.tokens for room in self.content.rooms.values())

    def run(self, command: Run) -> RunReport:
        report = super().run(command)
        if self._gpu is not None:
            tokens = {room.index: room.tokens for room in self.content.rooms.values()}
            report["compute_alone"] = [[row[0], self._gpu.alone_ns(tokens[row[0]])] for row in report["rooms"]]
        return report

    def drive(self, command: Run, deadline_ns: int) -> Outcome:
        compute = self._compute(round(command.layer_ms * 1e6))
        engine = self._gpu or SleepingEngine(compute, len(self.agent.layers))
        # A forward that takes no time is about to start whenever its room opens.
        at_once = self._gpu is None and not compute.layer_ns and self._pipeline == _PLAIN
        run = _Run(self, Forward(self.agent, self.content, engine, deadline_ns), at_once)
        run.until_done(deadline_ns)
        run.give_up()
        self.settle(run.sends.values())
        return Outcome(run.rows, run.failures, [])

    def verify(self, command: Verify) -> VerifyReport:
        return VerifyReport(rooms=0, bytes=0, mismatches=[], bad_rooms=[])

    def _compute(self, layer_ns: int) -> Compute:
        side, shape = own_side(self.start), model_shape(self.start.shape, self.start.page_size)
        stages = [
            local_shards(shape, self.start.page_size, side, self.at._replace(pp=stage)) for stage in range(side.pp)
        ]
        layers = [sum(each.num_layers for each in stage if not each.segment.state) for stage in stages]
        return Compute(layers, self.at.pp, layer_ns)

    def _gpu_engine(self) -> GpuEngine:
        start, side = self.start, own_side(self.start)
        return GpuEngine(
            layer_work(start.shape, side),
            f"cuda:{start.device}",
            len(self.agent.layers),
            chunk_pages(int(start.config["chunk_tokens"]), start.page_size) * start.page_size,
            side.cp,
        )


class _Run:
    """One run of a prefill rank.

    Attributes:
        rows: of `RunReport.rooms`.
        failures: causes, by index.
        sends: every room, by number.
    """

    def __init__(self, worker: PrefillWorker, forward: Forward, prefetch: bool) -> None:
        """`prefetch`: ask for staging of all rooms now."""
        self._worker = worker
        self._forward = forward
        self._prefetched = prefetch
        self._rooms = worker.content.rooms
        self._asked_ns: dict[int, int] = {}  # rooms that wait for their forward, since when
        self._jobs: dict[int, Job] = {}
        self.rows: list[list[int]] = []
        self.failures: dict[int, str] = {}
        self.sends: dict[int, Send] = {number: worker.agent.send(number) for number in self._rooms}
        self._pending = set(self.sends)
        if prefetch:
            for send in self.sends.values():
                send.prefetch()

    def until_done(self, deadline_ns: int) -> None:
        """Run until every room is sent or has failed, or until the deadline."""
        aborts = self._worker.aborts
        while self._pending:
            # All news first: what waits is chosen from by its order, not by when this rank heard of it, so that the
            # tp ranks of an instance, which do not talk, mostly compute the same room.
            now_ns = time.monotonic_ns()
            aborts.strike(now_ns)
            able = bool(self._asked_ns) and self._forward.ready
            until_ns = min(deadline_ns, aborts.next_ns or deadline_ns)
            if self._asked_ns:
                until_ns = 0 if able else min(until_ns, now_ns + _LOOK_NS)
            change = self._worker.next_change(until_ns)
            if change is not None:
                self._changed(change)
            elif able:
                self._compute(min(self._asked_ns, key=lambda number: self._rooms[number].index))
            elif now_ns >= deadline_ns:
                break

    def give_up(self) -> None:
        """Whatever is not over now has failed."""
        for number in self._pending:
            send, name = self.sends[number], self._worker.start.name
            self.failures[self._rooms[number].index] = f"still {send.state.label} on {name} at the run's deadline"
            send.abort("the bench's run is over")

    def _compute(self, number: int) -> None:
        room, send, asked_ns = self._rooms[number], self.sends[number], self._asked_ns.pop(number)
        try:
            self._jobs[number] = self._forward.run(room, send, asked_ns, self._prefetched)
        except KvctlError as error:
            send.abort(str(error))

    def _changed(self, change: Change) -> None:
        number = change.handle.room
        if number not in self._pending:
            return
        if change.state is RoomState.WAITING_FOR_INPUT:
            self._asked_ns[number] = change.at_ns
            self._worker.aborts.begin(self._rooms[number], self.sends[number], change.at_ns)
        elif change.state.finished:
            self._pending.remove(number)
            self._asked_ns.pop(number, None)
            self._worker.aborts.over(number, change.at_ns)
            index = self._rooms[number].index
            if change.state is RoomState.SUCCESS:
                started_ns, done_ns, compute_ns = self._jobs.pop(number).computed()
                self.rows.append([index, started_ns, done_ns, change.at_ns, compute_ns])
            else:
                self.failures[index] = self._worker.cause(self._rooms[number], self.sends[number].error)
