"""Starts the rank processes of a fleet on this machine and leads them through the phases of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from kvctl.lab.ranks.busy_loop import LoopTimes
from kvctl.lab.ranks.group import RankGroup, rank_names
from kvctl.lab.ranks.messages import (
    Command,
    Connect,
    FloorMeasured,
    Measure,
    Prepare,
    Ready,
    Room,
    Run,
    RunReport,
    Stop,
    Verify,
    VerifyReport,
)
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import rank_start
from kvctl.lab.ranks.request import FloorKind, PlanRequest, engine_kind

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
_ENGINE_TURNS_S = 0.2  # of busy engines for a room: each of its steps waits for a turn of up to 25 ms
# Whole pools are poisoned and checked for stray writes, by ranks that share cores and memory bandwidth.
_SLOWEST_SWEEP_BYTES_PER_S = 50e6


class Fleet(RankGroup):
    """The rank processes of one plan.

    Attributes:
        ranks: the planned ranks by name.

    Args:
        label: Prefix of the ranks' names, to tell them from another fleet's ranks of the same bench; "" for none.
    """

    def __init__(self, plan: Plan, request: PlanRequest, label: str = "") -> None:
        self._plan = plan
        self._request = request
        rank_labels = rank_names(plan["ranks"])
        rooms = [room for load in plan["loads"] for room in load["rooms"]]
        self._bytes_of_token = max(room["bytes"] / room["tokens"] for room in rooms)
        self._sweep_s = max(rank["pool_bytes"] for rank in plan["ranks"]) / _SLOWEST_SWEEP_BYTES_PER_S
        super().__init__([f"{label}-{each}" if label else each for each in rank_labels])
        self.ranks = dict(zip(self.names, plan["ranks"], strict=True))

    def of_role(self, role: str) -> list[str]:
        """Returns the names of all prefill or all decode ranks, in rank order."""
        return [name for name, rank in self.ranks.items() if rank["role"] == role]

    def start(self) -> dict[str, Ready]:
        """Starts every rank and waits until all are connected; raises FleetError if a rank did not start."""
        for name, rank in self.ranks.items():
            self.launch(name).send(rank_start(self._plan, self._request, rank, name, self.directory))
        timeout_s = _READY_S + _READY_S_PER_RANK * len(self.ranks)
        return cast(dict[str, Ready], self._all(Connect(timeout_s), timeout_s + _MARGIN_S, "start"))

    def roofline(self, kind: FloorKind) -> float | None:
        """Measures one limit of this machine on the first prefill rank; nothing else may run meanwhile.

        Returns:
            The limit in GB/s, or None if it cannot be measured.
        """
        name = self.of_role("prefill")[0]
        answer = self.ask({name: Measure(kind)}, _ROOFLINE_S, f"{kind} roofline")[name]
        return cast(FloorMeasured, answer)["gb_per_s"]

    def prepare(self, command: Prepare, doing: str) -> None:
        """Has the ranks prepare a batch; not timed. `doing` describes the trial, for error messages."""
        self._all(command, self._limit_s(command.rooms) + self._sweep_s, f"filling for {doing}")

    def run(self, command: Run, rooms: Sequence[Room], doing: str, busy_engine: str = "off") -> dict[str, RunReport]:
        """Transfers the prepared rooms and returns each rank's report; the ranks drive the rooms themselves.

        Args:
            command: What to run; its time limit and `busy` are set here.
            busy_engine: Ranks whose engine is busy between its calls, one of `BUSY_ENGINES`.
        """
        turns_s = len(rooms) * _ENGINE_TURNS_S if busy_engine != "off" else 0.0
        timeout_s = self._limit_s(rooms) + self._simulated_s(rooms, command) + turns_s
        commands = {
            name: replace(command, timeout_s=timeout_s, busy=engine_kind(busy_engine, rank["role"]))
            for name, rank in self.ranks.items()
        }
        return cast(dict[str, RunReport], self.ask(commands, timeout_s + _MARGIN_S, doing))

    def measure_loop(self, busy_engine: str, seconds: float) -> dict[str, LoopTimes]:
        """Runs the loop of a busy engine on the ranks that `busy_engine` names, all at once, while no rooms run."""
        kinds = {name: engine_kind(busy_engine, rank["role"]) for name, rank in self.ranks.items()}
        commands = {name: Measure("loop", seconds, kind) for name, kind in kinds.items() if kind}
        return cast(dict[str, LoopTimes], self.ask(commands, seconds + _MARGIN_S, "measuring the engine's loop"))

    def verify(self, mode: str, rooms: Sequence[Room], doing: str) -> dict[str, VerifyReport]:
        """Has every decode rank compare the received bytes with the expected ones; `mode` is one of `VERIFY_MODES`."""
        commands = dict.fromkeys(self.of_role("decode"), Verify(mode))
        answers = self.ask(commands, self._limit_s(rooms) + self._sweep_s, f"verifying {doing}")
        return cast(dict[str, VerifyReport], answers)

    def stop(self) -> None:
        """Tells every rank to close its agent and exit, and waits for their answers."""
        self._all(Stop(), _STOP_S, "stop")

    def _all(self, command: Command, timeout_s: float, doing: str) -> dict[str, Mapping[str, Any]]:
        return self.ask(dict.fromkeys(self.ranks, command), timeout_s, doing)

    def _limit_s(self, rooms: Sequence[Room]) -> float:
        """Returns a time limit for transferring these rooms, in seconds, far above the time they need."""
        nbytes = sum(self._bytes_of_token * room.tokens for room in rooms)
        return _MIN_RUN_S + nbytes / _SLOWEST_BYTES_PER_S

    def _simulated_s(self, rooms: Sequence[Room], run: Run) -> float:
        """Returns an upper bound of the seconds that arrivals, compute and decoding add to a run of these rooms."""
        chunks = sum(-(-room.tokens // self._plan["chunk_tokens"]) for room in rooms)
        compute_ms = chunks * self._plan["shape"]["layers"] * run.layer_ms
        compute_ms += sum(room.output_tokens for room in rooms) * run.decode_ms
        return (max((room.arrival_ms or 0.0 for room in rooms), default=0.0) + compute_ms) / 1e3
