"""One fleet on this machine: its names, its private directory, and the phases that all its ranks go through."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from kvctl.lab.bench.stop_schedule import StopSchedule, last_ns
from kvctl.lab.faults.specification import parse_fault
from kvctl.lab.ranks.group import RankGroup, rank_names
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
_FLOORS_S = 30.0
_STOP_S = 15.0
# A rank notices its own deadline first and says more about it.
_LATER_S = 15.0
# The slowest transport in use moves ten times this.
_SLOWEST_BYTES_PER_S = 10e6
_LEAST_RUN_S = 30.0
# A chunk's layer of the largest models takes a third of this on one GPU.
_SLOWEST_LAYER_MS = 100.0
# What was lost is said again after a second, and that may be lost too.
_FAULTS_S = 60.0
# Pools are poisoned, and searched for strays, as a whole, by ranks that share the cores and the memory's bandwidth.
_SLOWEST_SWEEP_BYTES_PER_S = 50e6


class Fleet:
    """The ranks of one plan, from start to end."""

    def __init__(
        self, plan: Plan, request: PlanRequest, label: str = "", on_tick: Callable[[], None] = lambda: None
    ) -> None:
        """`label` sets this fleet's names apart from those of others of the same bench."""
        self._plan = plan
        self._request = request
        places = rank_names(plan["ranks"])
        self._faults = tuple(map(parse_fault, request.faults))
        self._pauses = StopSchedule((), self._signal)
        self._on_tick = on_tick
        rooms = [room for load in plan["loads"] for room in load["rooms"]]
        self._bytes_of_token = max(room["bytes"] / room["tokens"] for room in rooms)
        self._sweep_s = max(rank["pool_bytes"] for rank in plan["ranks"]) / _SLOWEST_SWEEP_BYTES_PER_S
        self._group = RankGroup([f"{label}-{place}" if label else place for place in places], self._tick)
        self.names = dict(zip(self._group.names, plan["ranks"], strict=True))
        self._by_place = dict(zip(places, self.names, strict=True))

    @property
    def size(self) -> int:
        return len(self.names)

    def of_role(self, role: str) -> list[str]:
        """Names of the ranks of a role, in rank order."""
        return [name for name, rank in self.names.items() if rank["role"] == role]

    def start(self) -> dict[str, Ready]:
        """Start every rank and wait until all have met.

        Raises:
            FleetError: one did not come up.
        """
        for name in self.names:
            self._group.start(name)
        timeout_s = _READY_S + _READY_S_PER_RANK * self.size
        orders = {
            name: rank_start(self._plan, self._request, rank, name, self._group.directory, timeout_s)
            for name, rank in self.names.items()
        }
        return cast(dict[str, Ready], self._group.ask(orders, timeout_s + _LATER_S, "start"))

    def floor(self, kind: FloorKind) -> float | None:
        """Measure a limit of this machine on the first prefill rank, in GB/s; nothing else may run."""
        name = self.of_role("prefill")[0]
        answer = self._group.ask({name: Floors(kind)}, _FLOORS_S, f"{kind} floor")[name]
        return cast(FloorMeasured, answer)["gb_per_s"]

    def probe(self) -> Probed:
        """What writes and copies cost on the first prefill rank; nothing else may run."""
        name = self.of_role("prefill")[0]
        return cast(Probed, self._group.ask({name: Probe()}, _FLOORS_S, "probe")[name])

    def prepare(
        self, lot: int, path: str, rooms: Sequence[Room], poison: bool, doing: str, pipeline: str = "off"
    ) -> None:
        """Fill and poison pages; untimed."""
        command = Prepare(lot, path, tuple(rooms), poison, pipeline)
        self._all(command, self._patience(rooms) + self._sweep_s, f"filling for {doing}")

    def run(
        self,
        windows: Sequence[int],
        rooms: Sequence[Room],
        doing: str,
        layer_ms: float = 0.0,
        decode_ms: float = 0.0,
        show: int = -1,
    ) -> dict[str, RunReport]:
        """Drive the prepared rooms."""
        timeout_s = self._patience(rooms) + self._simulated_s(rooms, layer_ms, decode_ms)
        if self._faults:
            timeout_s += _FAULTS_S + last_ns(self._faults) / 1e9
        order = Run(tuple(windows), timeout_s, layer_ms, decode_ms, show, self._request.faults)
        self._pauses = StopSchedule(self._faults, self._signal)
        try:
            answers = self._all(order, timeout_s + _LATER_S, doing)
        finally:
            self._pauses.end()
        return cast(dict[str, RunReport], answers)

    def verify(self, mode: str, rooms: Sequence[Room], doing: str) -> dict[str, VerifyReport]:
        """Check what landed, on every decode rank."""
        orders: dict[str, Command] = {name: Verify(mode) for name in self.of_role("decode")}
        answers = self._group.ask(orders, self._patience(rooms) + self._sweep_s, f"verifying {doing}")
        return cast(dict[str, VerifyReport], answers)

    def idle(self, seconds: float) -> None:
        """Let time pass; a rank that dies meanwhile is an error."""
        self._group.wait(seconds, "hold")

    def stop(self) -> dict[str, Stopped]:
        """Have every rank close its agent."""
        return cast(dict[str, Stopped], self._all(Stop(), _STOP_S, "stop"))

    def close(self) -> dict[str, int]:
        """End every process and remove every file of the fleet; the exit status of each rank."""
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
        self._pauses.tick()
        self._on_tick()

    def _signal(self, place: str, number: signal.Signals) -> None:
        self._group.ranks[self._by_place[place]].signal(number)

    def _patience(self, rooms: Sequence[Room]) -> float:
        """Seconds that these rooms may take: far more than they do, and not for ever."""
        nbytes = sum(self._bytes_of_token * room.tokens for room in rooms)
        return _LEAST_RUN_S + nbytes / _SLOWEST_BYTES_PER_S

    def _simulated_s(self, rooms: Sequence[Room], layer_ms: float, decode_ms: float) -> float:
        """Seconds of waiting and computing in these rooms, were nothing done at the same time."""
        chunks = sum(-(-room.tokens // self._plan["chunk_tokens"]) for room in rooms)
        layer_ms = _SLOWEST_LAYER_MS if self._plan["compute"] == "gpu" else layer_ms
        compute_ms = chunks * self._plan["shape"]["layers"] * layer_ms
        compute_ms += sum(room.output_tokens for room in rooms) * decode_ms
        return (max((room.arrival_ms or 0.0 for room in rooms), default=0.0) + compute_ms) / 1e3
