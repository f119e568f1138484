"""Starts the rank processes of a fleet on this machine and leads them through the phases of a trial."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from kvctl.lab.faults.specification import Fault, parse_fault
from kvctl.lab.ranks.busy_loop import LoopTimes
from kvctl.lab.ranks.group import RankGroup, rank_names
from kvctl.lab.ranks.messages import (
    Command,
    FloorMeasured,
    Floors,
    MeasureLoop,
    Prepare,
    Ready,
    Room,
    Run,
    RunReport,
    Stop,
    Stopped,
    Verify,
    VerifyReport,
)
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import rank_start
from kvctl.lab.ranks.request import FloorKind, PlanRequest

# Engines take seconds of processor time to import, and ranks share the cores.
_READY_S = 60.0
_READY_S_PER_RANK = 2.0
_ROOFLINE_S = 30.0
_STOP_S = 15.0
# Time by which the deadline here is later than the rank's own deadline, whose error message has more details.
_MARGIN_S = 15.0
# A tenth of the rate of the slowest transport.
_SLOWEST_BYTES_PER_S = 10e6
_MIN_RUN_S = 30.0
# Three times the compute time of one layer of the largest models, for one chunk on one GPU.
_SLOWEST_LAYER_MS = 100.0
# A lost message is resent after a second, and may be lost again.
_FAULTS_S = 60.0
# Whole pools are poisoned and checked for stray writes, by ranks that share cores and memory bandwidth.
_SLOWEST_SWEEP_BYTES_PER_S = 50e6


class Fleet:
    """The rank processes of one plan.

    Args:
        request: The request that the plan was made from.
        label: Prefix of the ranks' names, to tell them from another fleet's ranks of the same bench; "" for none.
        on_tick: Called several times a second while the fleet waits for its ranks.
    """

    def __init__(
        self, plan: Plan, request: PlanRequest, label: str = "", on_tick: Callable[[], None] = lambda: None
    ) -> None:
        self._plan = plan
        self._request = request
        rank_labels = rank_names(plan["ranks"])
        self._faults = tuple(map(parse_fault, request.faults))
        self._stops = StopSchedule((), self._signal)
        self._on_tick = on_tick
        rooms = [room for load in plan["loads"] for room in load["rooms"]]
        self._bytes_of_token = max(room["bytes"] / room["tokens"] for room in rooms)
        self._sweep_s = max(rank["pool_bytes"] for rank in plan["ranks"]) / _SLOWEST_SWEEP_BYTES_PER_S
        self._group = RankGroup([f"{label}-{each}" if label else each for each in rank_labels], self._tick)
        self.names = dict(zip(self._group.names, plan["ranks"], strict=True))
        self._by_label = dict(zip(rank_labels, self.names, strict=True))

    @property
    def size(self) -> int:
        return len(self.names)

    def of_role(self, role: str) -> list[str]:
        """Returns the names of all prefill or all decode ranks, in rank order."""
        return [name for name, rank in self.names.items() if rank["role"] == role]

    def start(self) -> dict[str, Ready]:
        """Starts every rank and waits until all are connected.

        Raises:
            FleetError: A rank did not start.
        """
        for name in self.names:
            self._group.start(name)
        timeout_s = _READY_S + _READY_S_PER_RANK * self.size
        commands = {
            name: rank_start(self._plan, self._request, rank, name, self._group.directory, timeout_s)
            for name, rank in self.names.items()
        }
        return cast(dict[str, Ready], self._group.ask(commands, timeout_s + _MARGIN_S, "start"))

    def roofline(self, kind: FloorKind) -> float | None:
        """Measures one limit of this machine on the first prefill rank; nothing else may run meanwhile.

        Returns:
            The limit in GB/s, or None if it cannot be measured.
        """
        name = self.of_role("prefill")[0]
        answer = self._group.ask({name: Floors(kind)}, _ROOFLINE_S, f"{kind} roofline")[name]
        return cast(FloorMeasured, answer)["gb_per_s"]

    def prepare(
        self, batch: int, path: str, rooms: Sequence[Room], poison: bool, doing: str, pipeline: str = "off"
    ) -> None:
        """Has the prefill ranks fill the rooms' pages, and the decode ranks poison theirs; not timed.

        Args:
            batch: Number of the batch's content: prefill ranks skip the filling if they filled this number last.
            poison: Overwrites the decode pages, so that bytes that never arrive are detected.
            doing: Description of the trial, for error messages.
            pipeline: Pipeline setting that the following run uses.
        """
        command = Prepare(batch, path, tuple(rooms), poison, pipeline)
        self._all(command, self._limit_s(rooms) + self._sweep_s, f"filling for {doing}")

    def run(
        self,
        windows: Sequence[int],
        rooms: Sequence[Room],
        doing: str,
        layer_ms: float = 0.0,
        decode_ms: float = 0.0,
        show: int = -1,
        busy_engine: str = "off",
    ) -> dict[str, RunReport]:
        """Transfers the prepared rooms and returns each rank's report; the ranks drive the rooms themselves.

        Args:
            windows: Most rooms in flight, for each decode dp rank.
            doing: Description of the trial, for error messages.
            layer_ms: Simulated compute time of one layer for one chunk.
            decode_ms: Simulated time of one decode step.
            show: Index of the room whose parts the reports list; -1 for none.
            busy_engine: Ranks whose engine thread runs Python between its calls, one of `BUSY_ENGINES`.
        """
        timeout_s = self._limit_s(rooms) + self._simulated_s(rooms, layer_ms, decode_ms)
        if self._faults:
            timeout_s += _FAULTS_S + last_ns(self._faults) / 1e9
        command = Run(tuple(windows), timeout_s, layer_ms, decode_ms, show, self._request.faults)
        commands = dict.fromkeys(self.names, command)
        commands |= dict.fromkeys(self.busy(busy_engine), replace(command, busy=True))
        self._stops = StopSchedule(self._faults, self._signal)
        try:
            answers = self._group.ask(commands, timeout_s + _MARGIN_S, doing)
        finally:
            self._stops.end()
        return cast(dict[str, RunReport], answers)

    def busy(self, busy_engine: str) -> list[str]:
        """Returns the names of the ranks with a busy engine; `busy_engine` is one of `BUSY_ENGINES`."""
        return [name for name, rank in self.names.items() if busy_engine in (rank["role"], "both")]

    def measure_loop(self, busy_engine: str, seconds: float) -> dict[str, LoopTimes]:
        """Runs the loop of a busy engine on the ranks that `busy_engine` names, all at once, while no rooms run."""
        commands = dict.fromkeys(self.busy(busy_engine), MeasureLoop(seconds))
        return cast(dict[str, LoopTimes], self._group.ask(commands, seconds + _MARGIN_S, "measuring the engine's loop"))

    def verify(self, mode: str, rooms: Sequence[Room], doing: str) -> dict[str, VerifyReport]:
        """Has every decode rank compare the received bytes with the expected ones; `mode` is one of `VERIFY_MODES`."""
        commands: dict[str, Command] = {name: Verify(mode) for name in self.of_role("decode")}
        answers = self._group.ask(commands, self._limit_s(rooms) + self._sweep_s, f"verifying {doing}")
        return cast(dict[str, VerifyReport], answers)

    def idle(self, seconds: float) -> None:
        """Waits while the ranks do nothing.

        Raises:
            FleetError: A rank died meanwhile.
        """
        self._group.wait(seconds, "hold")

    def stop(self) -> dict[str, Stopped]:
        """Tells every rank to close its agent and exit, and returns their answers."""
        return cast(dict[str, Stopped], self._all(Stop(), _STOP_S, "stop"))

    def close(self) -> dict[str, int]:
        """Ends every process and removes every file of the fleet; returns the exit status of each rank by name."""
        return self._group.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all(self, command: Command, timeout_s: float, doing: str) -> dict[str, Mapping[str, Any]]:
        return self._group.ask(dict.fromkeys(self.names, command), timeout_s, doing)

    def _tick(self) -> None:
        self._stops.tick()
        self._on_tick()

    def _signal(self, label: str, number: signal.Signals) -> None:
        self._group.ranks[self._by_label[label]].signal(number)

    def _limit_s(self, rooms: Sequence[Room]) -> float:
        """Returns a time limit for transferring these rooms, in seconds, far above the time they need."""
        nbytes = sum(self._bytes_of_token * room.tokens for room in rooms)
        return _MIN_RUN_S + nbytes / _SLOWEST_BYTES_PER_S

    def _simulated_s(self, rooms: Sequence[Room], layer_ms: float, decode_ms: float) -> float:
        """Returns an upper bound of the seconds that arrivals, compute and decoding add to a run of these rooms."""
        chunks = sum(-(-room.tokens // self._plan["chunk_tokens"]) for room in rooms)
        layer_ms = _SLOWEST_LAYER_MS if self._plan["compute"] == "gpu" else layer_ms
        compute_ms = chunks * self._plan["shape"]["layers"] * layer_ms
        compute_ms += sum(room.output_tokens for room in rooms) * decode_ms
        return (max((room.arrival_ms or 0.0 for room in rooms), default=0.0) + compute_ms) / 1e3


class StopSchedule:
    """Stops and continues rank processes with signals, at the times given by `pause` faults.

    Times count from the creation of the schedule.

    Args:
        faults: Faults of a run; kinds other than `pause` are ignored.
        send: Sends a signal to the rank with this name.
    """

    def __init__(self, faults: Sequence[Fault], send: Callable[[str, signal.Signals], None]) -> None:
        self._send = send
        self._started_ns = time.monotonic_ns()
        self._waiting = [fault for fault in faults if fault.name == "pause"]
        self._stopped: list[Fault] = []

    def tick(self) -> None:
        """Sends the signals that are due; must be called several times a second."""
        ran_ns = time.monotonic_ns() - self._started_ns
        for fault in [each for each in self._waiting if each.at_ns <= ran_ns]:
            self._waiting.remove(fault)
            self._stopped.append(fault)
            self._send(fault.rank, signal.SIGSTOP)
        self._continue([each for each in self._stopped if each.at_ns + (each.for_ns or 0) <= ran_ns])

    def end(self) -> None:
        """Continues all stopped ranks and drops the stops that are not yet due."""
        self._waiting.clear()
        self._continue(self._stopped[:])

    def _continue(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._stopped.remove(fault)
            if all(each.rank != fault.rank for each in self._stopped):
                self._send(fault.rank, signal.SIGCONT)


def last_ns(faults: Sequence[Fault]) -> int:
    """Returns when the last `pause` fault ends, in nanoseconds after the start of the run; 0 without such a fault."""
    return max((fault.at_ns + (fault.for_ns or 0) for fault in faults if fault.name == "pause"), default=0)
