"""What a fleet that lives on is made of: its ranks, the model's shape, its timings, and how much fits into it.

Layouts are the agent's side of the house, so the shape and the ranks come from the same planner that a bench asks; how
many rooms a rank can have at once is decided here, because it is the router that keeps to it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from types import TracebackType
from typing import cast

from kvctl.lab.ranks.group import TICK_S, Event, FleetError, RankGroup, rank_names
from kvctl.lab.ranks.messages import Command, Serving, SetFault, Start, Stop, Tell, Usage
from kvctl.lab.ranks.plan import Plan, PlannedRank
from kvctl.lab.ranks.planner import plan, rank_start
from kvctl.lab.ranks.process import RankProcess
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens
from kvctl_agent.contract.admin import SOCKET_DIR_VARIABLE

Setting = str | int | float | bool

SHORT_TIMINGS: Mapping[str, Setting] = {
    "heartbeat_s": 0.2,
    "suspect_s": 0.6,
    "lost_s": 3.0,
    "resend_s": 0.3,
    "bootstrap_timeout_s": 12.0,
    "waiting_timeout_s": 12.0,
}
"""So short that loss and quarantine happen often, and that nothing can hang for long without being noticed."""

CALM_TIMINGS: Mapping[str, Setting] = {
    "heartbeat_s": 1.0,
    "suspect_s": 3.0,
    "lost_s": 15.0,
    "resend_s": 1.0,
    "bootstrap_timeout_s": 60.0,
    "waiting_timeout_s": 60.0,
}
"""An agent's own, with deadlines that somebody who looks on lives to see."""

_TRANSFER_WORKERS = {"copy_threads": 1, "workers": 1, "staging_buffer_mb": 16}
# Rooms that wait for a dead or silent peer keep their pages, besides those in flight.
_SPARE = 3


@dataclass(frozen=True)
class SteadyPlan:
    """A fleet to start.

    Args:
        prefill: the prefill instances; all serve the one decode instance.
        tokens: shortest and longest prompt.
        concurrency: rooms in flight over the whole fleet that its pools are sized for.
        ring_mb: each decode rank's ring; 0: a little smaller than its share of the rooms in flight.
        config: of every agent, over `SHORT_TIMINGS`.
        layers, kv_heads, head_dim: a small model, so that rooms are many rather than large.
        verify: compare every byte and watch the free pages.
        odd_pages: page sizes of ranks that were set up wrongly, by name.
        odd_rings: MiB of rings that were set up wrongly, by name.
        absent: ranks that nobody starts.
    """

    prefill: tuple[Sizes, ...] = (Sizes(tp=2),)
    decode: Sizes = field(default_factory=lambda: Sizes(dp=2))
    transport: str = "nixl"
    seed: int = 0
    concurrency: int = 16
    tokens: tuple[int, int] = (16, 1024)
    ring_mb: int = 0
    page_size: int = 16
    chunk_tokens: int = 256
    layers: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    config: Mapping[str, Setting] = field(default_factory=dict)
    verify: bool = True
    odd_pages: Mapping[str, int] = field(default_factory=dict)
    odd_rings: Mapping[str, int] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()

    @property
    def bytes_of_token(self) -> int:
        """KV bytes of one token over the whole model: K and V, two bytes an element."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    @property
    def ring(self) -> int:
        """MiB of each decode rank's ring."""
        if self.ring_mb:
            return self.ring_mb
        share = self.concurrency / self.decode.dp * sum(self.tokens) / 2 * self.bytes_of_token / self.decode.tp
        part = min(self.tokens[1], self.chunk_tokens) * self.bytes_of_token / self.decode.tp
        return max(1, ceil(part / (1 << 20)), int(share * 0.8) >> 20)

    @property
    def slots(self) -> int:
        """Rooms that any one rank can have at once, those included whose pages are not free yet."""
        return self.concurrency * _SPARE

    @property
    def timings(self) -> dict[str, float]:
        """Every period and deadline that the agents are given, in seconds."""
        return {name: float(value) for name, value in {**SHORT_TIMINGS, **self.config}.items() if name.endswith("_s")}

    @property
    def patience_s(self) -> float:
        """Longest time that a room can take at a rank that lives: every state's deadline, silence, and some load."""
        times = self.timings
        return times["bootstrap_timeout_s"] + 2 * times["waiting_timeout_s"] + times["lost_s"] + 5

    @property
    def request(self) -> PlanRequest:
        """The request for shape and ranks; pools are sized by `start`."""
        return PlanRequest(
            prefill=self.prefill,
            decode=self.decode,
            loads=(Load(1, Tokens(values=(self.tokens[1],))),),
            memory_bytes=1 << 40,
            seed=self.seed,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bf16",
            kind="mha",
            page_size=self.page_size,
            rooms=1,
            transport=self.transport,
            ring_mb=self.ring,
            chunk_tokens=self.chunk_tokens,
        )

    def resolve(self) -> Plan:
        """Shape and ranks from the planner.

        Raises:
            CliError: it cannot be, with the arithmetic; or the agent's side is not installed.
        """
        return plan(self.request)

    def prefixed(self, prefix: str) -> SteadyPlan:
        """The same fleet whose ranks' names begin like this."""
        return replace(
            self,
            odd_pages={prefix + name: size for name, size in self.odd_pages.items()},
            odd_rings={prefix + name: mib for name, mib in self.odd_rings.items()},
            absent=frozenset(prefix + name for name in self.absent),
        )

    def start(
        self, name: str, rank: PlannedRank, planned: Plan, directory: Path, timeout_s: float, faults: str
    ) -> Start:
        """What one rank is told of itself; `faults` are in force there from the first moment."""
        pages = -(-self.tokens[1] // self.page_size)
        ring = self.odd_rings.get(name, self.ring)
        return replace(
            rank_start(planned, self.request, rank, name, directory, timeout_s),
            page_size=self.odd_pages.get(name, self.page_size),
            pool_pages=1 + self.slots * pages,
            aux_slots=self.slots,
            config={**planned["config"], **_TRANSFER_WORKERS, **SHORT_TIMINGS, **self.config, "staging_ring_mb": ring},
            live=True,
            faulty=True,
            faults=faults,
            verify=self.verify,
        )


# Engines take seconds of processor time to import, and ranks share the cores.
_START_S = 60.0
_START_S_PER_RANK = 3.0


class SteadyRank:
    """A rank over all its lives.

    Attributes:
        planned: its place.
        running: its process is there, paused or not.
        paused: it was stopped by `SteadyFleet.pause`.
        instances: prefill instances that it can exchange rooms with, by what it said last; empty until it serves.
        lives: processes started so far.
        started_ns, met_ns: when this life began, and when it said that it can serve (0: not yet).
        former: the process that was replaced, until it has ended; nothing that it says counts any more.
    """

    def __init__(self, name: str, planned: PlannedRank) -> None:
        self.name = name
        self.planned = planned
        self.process: RankProcess | None = None
        self.former: RankProcess | None = None
        self.paused = False
        self.instances: list[int] = []
        self.incarnation = ""
        self.lives = 0
        self.started_ns = 0
        self.met_ns = 0

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def serving(self) -> bool:
        """It runs, is not paused, and has said in this life that it can serve."""
        return self.running and not self.paused and bool(self.instances)

    @property
    def pid(self) -> int:
        """Of its process; 0 while it has none."""
        return self.process.pid if self.process is not None else 0


class SteadyFleet:
    """Real processes, one per rank.

    Attributes:
        plan: what it is made of.
        ranks: by name, prefill first.
        directory: where its sockets are; gone when it is closed.
    """

    def __init__(self, plan: SteadyPlan) -> None:
        """Plan it; nothing is started yet.

        Raises:
            CliError: it cannot be, or the agent's side is not installed.
        """
        self._planned = plan.resolve()
        planned = self._planned["ranks"]
        self._group = RankGroup(rank_names(planned))
        self.plan = plan.prefixed(self._group.prefix)
        self.ranks = {name: SteadyRank(name, rank) for name, rank in zip(self._group.names, planned, strict=True)}
        self.directory = self._group.directory
        self._waiting: list[Event] = []
        self._tokens = 0

    def of_role(self, role: str) -> list[str]:
        """Names of the ranks of a role."""
        return [name for name, rank in self.ranks.items() if rank.planned["role"] == role]

    # ---- lives --------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float | None = None) -> None:
        """Start the ranks and wait until all have met that can.

        Raises:
            FleetError: one did not come up; says what it waited for.
        """
        if timeout_s is None:
            timeout_s = _START_S + _START_S_PER_RANK * len(self.ranks)
        for name in self.ranks:
            if name not in self.plan.absent:
                self.restart(name)
        deadline = time.monotonic() + timeout_s
        able = self._able()
        instances = {rank.planned["instance"] for rank in able if rank.planned["role"] == "prefill"}
        while missing := [rank for rank in able if not _complete(rank, instances)]:
            for event in self._listen(TICK_S):
                self._waiting.append(event)
                if event.kind in ("died", "fatal"):
                    raise FleetError(f'rank "{event.rank}" did not come up: {_words(event)}')
            if time.monotonic() > deadline:
                first = missing[0]
                waits = f": {first.process.doing}" if first.process and first.process.doing else ""
                raise FleetError(f'rank "{first.name}" was not ready within {timeout_s:g} s{waits}')

    def _able(self) -> list[SteadyRank]:
        """Ranks that will serve: they are started and set up like the others, and so is their whole instance."""
        unable = self.plan.absent | self.plan.odd_pages.keys()
        planned = [self.ranks[name].planned for name in unable]
        broken = {rank["instance"] for rank in planned if rank["role"] == "prefill"}
        return [
            rank
            for rank in self.ranks.values()
            if rank.name not in unable and (rank.planned["role"] == "decode" or rank.planned["instance"] not in broken)
        ]

    def restart(self, name: str, faults: str = "") -> None:
        """Start a rank that is not running: the same name and endpoints, a new process. Returns at once.

        Args:
            faults: specs in force from the first moment of the new life, such as `clock-jump=-1h`.

        Raises:
            ValueError: it runs.
        """
        rank = self.ranks[name]
        if rank.process is not None:
            raise ValueError(f"{name} is running; kill it first")
        environment = {}
        start = self.plan.start(name, rank.planned, self._planned, self.directory, _START_S, faults)
        if rank.former is not None:  # it still has its sockets
            elsewhere = self._elsewhere()
            environment[SOCKET_DIR_VARIABLE] = str(elsewhere)
            bootstraps = tuple(f"ipc://{elsewhere / Path(each).name}" for each in start.bootstraps)
            start = replace(start, bootstraps=bootstraps)
        rank.process = self._group.start(name, environment)
        rank.lives += 1
        rank.started_ns, rank.met_ns = time.monotonic_ns(), 0
        rank.paused, rank.instances = False, []
        rank.process.send(start)

    def _elsewhere(self) -> Path:
        """A new directory for a process, with links to the registries: its control socket will be beside them."""
        directory = Path(tempfile.mkdtemp(prefix="", dir=self.directory))
        for instance in range(len(self.plan.prefill)):
            (directory / f"bootstrap-{instance}").symlink_to(self.directory / f"bootstrap-{instance}")
        return directory

    def kill(self, name: str) -> None:
        """SIGKILL; `running` turns False when `poll` has seen its end."""
        self._signal(name, SIGKILL)

    def pause(self, name: str) -> None:
        """SIGSTOP: it lives and is silent."""
        self._signal(name, SIGSTOP)
        self.ranks[name].paused = True

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.ranks[name].paused = False
        self._signal(name, SIGCONT)

    def replace(self, name: str) -> None:
        """Start another process in the place of a paused one, which stays as it is. Returns at once.

        The new one has a socket directory and a control endpoint of its own, as on another host.

        Raises:
            ValueError: the rank is not paused, serves the registry, or its process before is there still.
        """
        rank = self.ranks[name]
        if not replaceable(rank.planned) or not rank.paused or rank.former is not None:
            raise ValueError(
                f"{name} cannot be replaced: it has to be paused, to have been replaced by none, and no registry"
            )
        rank.former, rank.process = rank.process, None
        self.restart(name)

    def thaw(self, name: str) -> None:
        """SIGCONT to the process that was replaced."""
        if (former := self.ranks[name].former) is not None:
            former.signal(SIGCONT)

    def end_former(self, name: str, *, kill: bool) -> None:
        """End the process that was replaced, by SIGKILL or by closing its agent."""
        if (former := self.ranks[name].former) is not None:
            former.stopping = True
            if kill:
                former.signal(SIGKILL)
            else:
                former.send(Stop())

    def _signal(self, name: str, number: Signals) -> None:
        process = self.ranks[name].process
        if process is not None:
            process.signal(number)

    # ---- talk ---------------------------------------------------------------------------------------------------

    def tell(self, name: str, command: Command) -> None:
        """Hand a command to a rank without waiting; nothing where it is not running."""
        process = self.ranks[name].process
        if process is not None:
            process.send(command)

    def fault(self, name: str, spec: str, seconds: float | None = None) -> None:
        """Put a fault of `contract.faults` in force at a rank; `clear` ends all."""
        self.tell(name, SetFault(spec, seconds))

    def poll(self, timeout_s: float) -> list[Event]:
        """What has happened, waiting for it for so long at most; also what came while `start` or `usage` waited."""
        waiting, self._waiting = self._waiting, []
        return waiting or self._listen(timeout_s)

    def _listen(self, timeout_s: float) -> list[Event]:
        """What happens from now on."""
        return [found for event in self._group.poll(timeout_s) if (found := self._take(event)) is not None]

    def _take(self, event: Event) -> Event | None:
        """Note what an event says of its rank; None: it is of no interest to anybody else."""
        rank, process = self.ranks[event.rank], event.process
        former = process is rank.former
        if event.kind == "exited":
            if former:
                rank.former = None
            else:
                rank.process, rank.instances, rank.paused = None, [], False
            if process.stopping and event.data["returncode"] in ((0, -SIGKILL) if former else (0,)):
                return None
            return event._replace(kind="former-died" if former else "died")
        if former:
            return None
        if event.kind == "serving":
            met = cast(Serving, event.data)
            rank.instances, rank.incarnation = met["instances"], met["incarnation"]
            rank.met_ns = rank.met_ns or event.at_ns
        return event

    def usage(self, timeout_s: float = 10.0, sweep: bool = False) -> dict[str, Usage]:
        """What every serving rank holds.

        Args:
            sweep: search all free pages for strays, too.

        Raises:
            FleetError: one did not answer in time.
        """
        self._tokens += 1
        token = self._tokens
        asked = {name for name, rank in self.ranks.items() if rank.serving}
        for name in asked:
            self.tell(name, Tell(token, sweep))
        found: dict[str, Usage] = {}
        deadline = time.monotonic() + timeout_s
        while missing := {name for name in asked - found.keys() if self.ranks[name].running}:
            for event in self._listen(TICK_S):
                if event.kind == "usage" and event.data["token"] == token:
                    found[event.rank] = cast(Usage, event.data)
                else:
                    self._waiting.append(event)
            if time.monotonic() > deadline:
                raise FleetError(f"{', '.join(sorted(missing))} did not say within {timeout_s:g} s what they hold")
        return found

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self) -> dict[str, int]:
        """End every process and remove every file of the fleet; the exit status of each rank that did not end well."""
        running = list(self._group.running)
        try:
            for process in running:
                process.signal(SIGCONT)
                process.send(Stop())
        finally:  # a second Ctrl-C must not leave anything behind
            self._group.close()
        for rank in self.ranks.values():
            rank.process = rank.former = None
        return {process.name: process.returncode for process in running if process.returncode}

    def __enter__(self) -> SteadyFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _complete(rank: SteadyRank, instances: set[int]) -> bool:
    return bool(rank.instances) and (rank.planned["role"] == "prefill" or instances.issubset(rank.instances))


def _words(event: Event) -> str:
    if event.kind == "fatal":
        return f"{event.data.get('message')} ({event.data.get('code')})"
    return f"it ended with status {event.data['returncode']}; its last output:\n{event.data['output']}"


def replaceable(rank: PlannedRank) -> bool:
    """Whether a second process can take a rank's place while the first one is there: one without the registry."""
    return rank["role"] == "prefill" and rank["unique"] > 0
