"""The decode side: opens rooms as they come and as there is a place for them, decodes them, and checks what landed."""

from __future__ import annotations

import time

from kvctl.lab.ranks.measure import Samples
from kvctl.lab.ranks.messages import Prepare, Room, Run, Verify, VerifyReport
from kvctl.lab.ranks.open_schedule import Arrivals, Decoding, RoomVisit
from kvctl.lab.ranks.request import STAGED_PATHS
from kvctl.lab.ranks.verify import verify
from kvctl.lab.ranks.worker import Change, Outcome, Worker
from kvctl_agent.contract.states import RoomState
from kvctl_agent.runtime.handles import Receive


class DecodeWorker(Worker):
    """Opens the next room whenever there is a place for it; all ranks of a dp group in the same order."""

    _path = ""

    def bootstraps(self) -> tuple[str, ...]:
        return self.start.bootstraps

    def owns(self, room: Room) -> bool:
        return room.decode_dp == self.at.dp

    def prepare(self, command: Prepare) -> None:
        super().prepare(command)
        self._path = command.path
        if command.poison:
            self.content.poison()

    def drive(self, command: Run, deadline_ns: int) -> Outcome:
        samples = Samples(
            (lambda: self.agent.observe.statistics().ring_used_bytes) if self._path in STAGED_PATHS else None
        )
        run = _Run(self, samples, command.windows[self.at.dp], round(command.decode_ms * 1e6))
        run.until_done(deadline_ns)
        run.give_up()
        self.settle(run.receives.values())
        return Outcome(run.rows, run.failures, samples.taken)

    def verify(self, command: Verify) -> VerifyReport:
        return verify(self.content, command.mode, self.failed)

    def open(self, room: Room) -> Receive:
        """Ask the room's prefill instance for it."""
        cached = room.prefix_tokens // self.start.page_size
        return self.agent.receive(
            room.number,
            self.content.pages(room.number)[cached:],
            prefill=self.start.bootstraps[room.instance],
            prefix_tokens=room.prefix_tokens,
            aux_index=room.slot,
            state_indices=self.content.states(room.number),
        )


class _Run:
    """One run of a decode rank.

    Attributes:
        rows: of `RunReport.rooms`.
        failures: causes, by index.
        receives: every room that was opened, by number.
    """

    def __init__(self, worker: DecodeWorker, samples: Samples, window: int, step_ns: int) -> None:
        self._worker = worker
        self._samples = samples
        self._window = window
        self._arrivals = Arrivals(worker.content.rooms.values(), time.monotonic_ns())
        self._decoding = Decoding(step_ns)
        self._visits: dict[int, RoomVisit] = {}  # in flight: until decoded
        self.rows: list[list[int]] = []
        self.failures: dict[int, str] = {}
        self.receives: dict[int, Receive] = {}

    def until_done(self, deadline_ns: int) -> None:
        """Run until every room is decoded or has failed, or until the deadline."""
        while (now_ns := time.monotonic_ns()) < deadline_ns:
            self._leave(self._decoding.advance(now_ns), now_ns)
            if not self._arrivals and not self._visits:
                break
            while len(self._visits) < self._window and (visit := self._arrivals.take(now_ns)) is not None:
                self._visits[visit.room.number] = visit
                receive = self.receives[visit.room.number] = self._worker.open(visit.room)
                self._worker.aborts.begin(visit.room, receive, now_ns)
            self._worker.aborts.strike(now_ns)
            moments = [self._decoding.next_ns, self._samples.next_ns, self._worker.aborts.next_ns, deadline_ns]
            if len(self._visits) < self._window:
                moments.append(self._arrivals.next_ns)
            change = self._worker.next_change(min(at for at in moments if at is not None))
            if change is not None:
                self._changed(change)
            self._samples.look(time.monotonic_ns())

    def give_up(self) -> None:
        """Whatever is not over now has failed."""
        name = self._worker.start.name
        for number, visit in self._visits.items():
            receive = self.receives[number]
            doing = "decoding" if visit.success_ns else receive.state.label
            self.failures[visit.room.index] = f"still {doing} on {name} at the run's deadline"
            receive.abort("the bench's run is over")
        for room in self._arrivals.untaken():
            self.failures[room.index] = f"not opened on {name} before the run's deadline"

    def _changed(self, change: Change) -> None:
        visit = self._visits.get(change.handle.room)
        if visit is None or not change.state.finished:
            return
        now_ns = time.monotonic_ns()
        self._worker.aborts.over(visit.room.number, now_ns)
        if change.state is RoomState.SUCCESS:
            visit.success_ns = change.at_ns
            self._leave(self._decoding.join(visit, now_ns), now_ns)
            return
        error = self.receives[visit.room.number].error
        self.failures[visit.room.index] = self._worker.cause(visit.room, error)
        self._over(visit, now_ns)

    def _leave(self, decoded: list[RoomVisit], now_ns: int) -> None:
        for visit in decoded:
            self.rows.append(visit.row())
            self._over(visit, now_ns)

    def _over(self, visit: RoomVisit, now_ns: int) -> None:
        del self._visits[visit.room.number]
        self._arrivals.over(visit.room, now_ns)
