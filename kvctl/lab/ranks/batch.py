"""One run of a prepared batch of rooms on one rank: its limits, and the measurements that make its report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.busy_loop import BusyLoop
from kvctl.lab.ranks.messages import Room, Run, RunReport
from kvctl_agent.contract.snapshots import Failure

if TYPE_CHECKING:
    from kvctl.lab.ranks.worker import Worker


class Batch:
    """A run of a batch.

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
