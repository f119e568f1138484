"""A live fleet: its plan, and its rank processes, which can be killed, paused, replaced and restarted one by one.

Model shape and ranks come from the planner that the bench uses; the pools are sized here for the number of rooms that
the router allows at a rank. A bench ends when a rank dies; here the unexpected exit of a process is an event of kind
"died", or "replaced-died" if another process had replaced it. Call everything from the thread that started the fleet:
the kernel ends the ranks when that thread ends.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
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
"""Timings of the agents for soak runs, so short that peers are often lost and hangs are noticed soon."""

CALM_TIMINGS: Mapping[str, Setting] = {
    "heartbeat_s": 1.0,
    "suspect_s": 3.0,
    "lost_s": 15.0,
    "resend_s": 1.0,
    "bootstrap_timeout_s": 60.0,
    "waiting_timeout_s": 60.0,
}
"""The agents' default timings, with deadlines short enough for a user to watch them expire."""

_SMALL_AGENT = {"copy_threads": 0, "staging_buffer_mb": 16}
# Rooms that wait for a dead or silent peer keep their pages, in addition to the rooms in flight.
_SPARE = 3
# Transfer engines take seconds of CPU time to import, and the ranks share the cores.
_START_S = 60.0
_START_S_PER_RANK = 3.0


@dataclass(frozen=True)
class FleetPlan:
    """Parameters of a live fleet.

    Args:
        concurrency: number of rooms in flight over the whole fleet, for which the pools are sized.
        ring_mb: size in MiB of each decode rank's staging ring; 0: slightly less than its rooms in flight need.
        layers, kv_heads, head_dim: size of the model, small so that many rooms fit.
        config: configuration of every agent, which overrides `SHORT_TIMINGS`.
        verify: whether to compare every received byte and to watch free pages for stray writes.
        odd_pages: page sizes of misconfigured ranks, by name.
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
    def token_bytes(self) -> int:
        """KV bytes of one token over the whole model: K and V, two bytes per element."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    @property
    def ring(self) -> int:
        """Size of each decode rank's staging ring in MiB."""
        if self.ring_mb:
            return self.ring_mb
        share = self.concurrency / self.decode.dp * sum(self.tokens) / 2 * self.token_bytes / self.decode.tp
        part = min(self.tokens[1], self.chunk_tokens) * self.token_bytes / self.decode.tp
        return max(1, ceil(part / (1 << 20)), int(share * 0.8) >> 20)

    @property
    def slots(self) -> int:
        """Maximum number of rooms at one rank, including rooms that have ended but whose pages are not free yet."""
        return self.concurrency * _SPARE

    @property
    def timings(self) -> dict[str, float]:
        """All periods and deadlines in the agents' configuration, in seconds."""
        return {name: float(value) for name, value in {**SHORT_TIMINGS, **self.config}.items() if name.endswith("_s")}

    @property
    def patience_s(self) -> float:
        """Time after which a room counts as hung: all its states' deadlines, the time of peer loss and a margin."""
        times = self.timings
        return times["bootstrap_timeout_s"] + 2 * times["waiting_timeout_s"] + times["lost_s"] + 5

    def resolve(self) -> tuple[Plan, PlanRequest]:
        """Resolves the model shape and the ranks; the pool sizes in the result are not used.

        Returns:
            The plan, and the request from which the planner computed it.

        Raises:
            CliError: the plan is impossible (the message contains the arithmetic), or packages of the agent are not
                installed.
        """
        request = PlanRequest(
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
        return plan(request), request

    def prefixed(self, prefix: str) -> FleetPlan:
        """Returns a copy in which all rank names have this prefix."""
        return replace(
            self,
            odd_pages={prefix + name: size for name, size in self.odd_pages.items()},
            odd_rings={prefix + name: mib for name, mib in self.odd_rings.items()},
            absent=frozenset(prefix + name for name in self.absent),
        )


def replaceable(rank: PlannedRank) -> bool:
    """Whether another process can replace a rank whose process still exists.

    Only prefill ranks can be replaced, except rank 0 of an instance, which hosts the bootstrap registry.
    """
    return rank["role"] == "prefill" and rank["unique"] > 0


class LiveRank:
    """State of one rank, which may be restarted in a new process several times.

    Attributes:
        name: name of the rank, with the prefix of the fleet.
        replaced: a paused process that `process` replaced, until it has exited; its messages are ignored.
        paused: whether the current process was stopped by `LiveFleet.pause`.
        instances: prefill instances with which the rank can exchange rooms, as last reported; empty until it serves.
        serving_ns: time at which the current process first reported that it serves; 0: not yet.
    """

    def __init__(self, name: str, planned: PlannedRank) -> None:
        self.name = name
        self.planned = planned
        self.process: RankProcess | None = None
        self.replaced: RankProcess | None = None
        self.paused = False
        self.instances: list[int] = []
        self.incarnation = ""
        self.lives = 0
        self.started_ns = 0
        self.serving_ns = 0

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def serving(self) -> bool:
        """Whether the rank runs, is not paused, and has reported that it serves."""
        return self.running and not self.paused and bool(self.instances)

    @property
    def pid(self) -> int:
        """Process id; 0 if the rank is not running."""
        return self.process.pid if self.process is not None else 0


class LiveFleet(RankGroup):
    """Starts, disturbs and ends the processes of a live fleet, one per rank, and exchanges messages with them.

    Attributes:
        ranks: state of the ranks by name, prefill ranks first.
    """

    def __init__(self, plan: FleetPlan) -> None:
        """Plans the fleet; starts no process yet.

        Raises:
            CliError: the plan is impossible, or packages of the agent are not installed.
        """
        self._planned, self._request = plan.resolve()
        planned = self._planned["ranks"]
        super().__init__(rank_names(planned))
        self.plan = plan.prefixed(self.prefix)
        self.ranks = {name: LiveRank(name, rank) for name, rank in zip(self.names, planned, strict=True)}
        self._pending: list[Event] = []
        self._tokens = 0

    def of_role(self, role: str) -> list[str]:
        """Returns the names of all ranks of a role, "prefill" or "decode"."""
        return [name for name, rank in self.ranks.items() if rank.planned["role"] == role]

    # ---- processes --------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float | None = None) -> None:
        """Starts all ranks that are not absent and waits until all ranks that are able to serve do so.

        Args:
            timeout_s: maximum wait; None: a default that grows with the number of ranks.

        Raises:
            FleetError: a rank exited, failed or was not ready in time; the message says what it was doing.
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
            for event in self._poll(TICK_S):
                self._pending.append(event)
                if event.kind in ("died", "fatal"):
                    raise FleetError(f'rank "{event.rank}" did not come up: {_cause(event)}')
            if time.monotonic() > deadline:
                first = missing[0]
                waits = first.process.doing if first.process and first.process.doing else "it has said nothing yet"
                load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
                busy = f"; this host has {cores} cores and a load of {load:.0f}: end other work, or start fewer ranks"
                raise FleetError(
                    f'rank "{first.name}" was not ready within {timeout_s:g} s: {waits}{busy if load > cores else ""}'
                )

    def _able(self) -> list[LiveRank]:
        """Returns the ranks that will be able to serve.

        Absent ranks and ranks with another page size are not, nor are the other ranks of their prefill instances.
        """
        unable = self.plan.absent | self.plan.odd_pages.keys()
        planned = [self.ranks[name].planned for name in unable]
        broken = {rank["instance"] for rank in planned if rank["role"] == "prefill"}
        return [
            rank
            for rank in self.ranks.values()
            if rank.name not in unable and (rank.planned["role"] == "decode" or rank.planned["instance"] not in broken)
        ]

    def restart(self, name: str, faults: str = "") -> None:
        """Starts a new process for a rank that is not running, with the same name and endpoints; does not wait for it.

        Args:
            faults: specs of faults in force from the start of the process, such as `clock-jump=-1h`.

        Raises:
            ValueError: the rank is running.
        """
        rank = self.ranks[name]
        if rank.process is not None:
            raise ValueError(f"{name} is running; kill it first")
        rank.process = self._launch(rank, self._start_command(name, faults))
        rank.lives += 1
        rank.started_ns, rank.serving_ns = time.monotonic_ns(), 0
        rank.paused, rank.instances = False, []

    def _launch(self, rank: LiveRank, start: Start) -> RankProcess:
        """Starts a process for a rank and sends it the Start command."""
        environment = {}
        if rank.replaced is not None:  # the old process still has its sockets
            directory = self._linked_directory()
            environment[SOCKET_DIR_VARIABLE] = str(directory)
            start = replace(
                start, bootstraps=tuple(f"ipc://{directory / Path(each).name}" for each in start.bootstraps)
            )
        process = self.launch(rank.name, environment)
        process.send(start)
        return process

    def _start_command(self, name: str, faults: str) -> Start:
        plan, rank = self.plan, self.ranks[name].planned
        ring = plan.odd_rings.get(name, plan.ring)
        return replace(
            rank_start(self._planned, self._request, rank, name, self.directory),
            page_size=plan.odd_pages.get(name, plan.page_size),
            pool_pages=1 + plan.slots * -(-plan.tokens[1] // plan.page_size),
            aux_slots=plan.slots,
            config={**self._planned["config"], **_SMALL_AGENT, **SHORT_TIMINGS, **plan.config, "staging_ring_mb": ring},
            faulty=True,
            faults=faults,
            verify=plan.verify,
        )

    def _linked_directory(self) -> Path:
        """Creates a directory with symbolic links to the registry sockets, for a process that replaces another.

        The process creates its control socket there, because the replaced process still uses the original one.
        """
        directory = Path(tempfile.mkdtemp(prefix="", dir=self.directory))
        for instance in range(len(self.plan.prefill)):
            (directory / f"bootstrap-{instance}").symlink_to(self.directory / f"bootstrap-{instance}")
        return directory

    def kill(self, name: str) -> None:
        """Sends SIGKILL to a rank; `LiveRank.running` becomes False when `poll` has seen the exit."""
        self._signal(name, SIGKILL)

    def pause(self, name: str) -> None:
        """Stops a rank's process with SIGSTOP."""
        self._signal(name, SIGSTOP)
        self.ranks[name].paused = True

    def resume(self, name: str) -> None:
        """Continues a paused rank's process with SIGCONT."""
        self.ranks[name].paused = False
        self._signal(name, SIGCONT)

    def replace(self, name: str) -> None:
        """Starts another process for a paused rank, whose old process stays paused; does not wait for the new one.

        The new process has its own socket directory and control endpoint, as it would have on another host.

        Raises:
            ValueError: the rank is not paused, hosts the registry, or its previous process still exists.
        """
        rank = self.ranks[name]
        if not replaceable(rank.planned) or not rank.paused or rank.replaced is not None:
            raise ValueError(
                f"{name} cannot be replaced: it must be paused, without the registry, and not replaced already"
            )
        rank.replaced, rank.process = rank.process, None
        self.restart(name)

    def resume_replaced(self, name: str) -> None:
        """Continues the replaced process of a rank with SIGCONT."""
        if (process := self.ranks[name].replaced) is not None:
            process.signal(SIGCONT)

    def end_replaced(self, name: str, *, kill: bool) -> None:
        """Ends the replaced process of a rank, with SIGKILL if `kill` is set and with a Stop command otherwise."""
        if (process := self.ranks[name].replaced) is not None:
            process.stopping = True
            if kill:
                process.signal(SIGKILL)
            else:
                process.send(Stop())

    def _signal(self, name: str, number: Signals) -> None:
        process = self.ranks[name].process
        if process is not None:
            process.signal(number)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def send(self, name: str, command: Command) -> None:
        """Sends a command to a rank without waiting; no effect if the rank is not running."""
        process = self.ranks[name].process
        if process is not None:
            process.send(command)

    def fault(self, name: str, spec: str, seconds: float | None = None) -> None:
        """Sets faults of a rank's agent.

        Args:
            spec: specs of the faults, or "clear" to end all faults.
            seconds: duration; None: until they are cleared.
        """
        self.send(name, SetFault(spec, seconds))

    def poll(self, timeout_s: float) -> list[Event]:
        """Waits for events of the ranks, at most for `timeout_s`, and returns them.

        Events that arrived during `start` or `usage` are returned first, without waiting.
        """
        pending, self._pending = self._pending, []
        return pending or self._poll(timeout_s)

    def _poll(self, timeout_s: float) -> list[Event]:
        return [found for event in super().poll(timeout_s) if (found := self._apply(event)) is not None]

    def _apply(self, event: Event) -> Event | None:
        """Updates the state of the event's rank; returns the event, or None if the caller need not handle it.

        An expected exit and all messages of a replaced process need no handling.
        """
        rank, process = self.ranks[event.rank], event.process
        replaced = process is rank.replaced
        if event.kind == "exited":
            if replaced:
                rank.replaced = None
            else:
                rank.process, rank.instances, rank.paused = None, [], False
            if process.stopping and event.data["returncode"] in ((0, -SIGKILL) if replaced else (0,)):
                return None
            return event._replace(kind="replaced-died" if replaced else "died")
        if replaced:
            return None
        if event.kind == "serving":
            serving = cast(Serving, event.data)
            rank.instances, rank.incarnation = serving["instances"], serving["incarnation"]
            rank.serving_ns = rank.serving_ns or event.at_ns
        return event

    def usage(self, timeout_s: float = 10.0, sweep: bool = False) -> dict[str, Usage]:
        """Requests the resource usage of every serving rank and waits for the reports.

        Args:
            sweep: whether the ranks also search all free pages for stray writes.

        Raises:
            FleetError: a rank did not report in time.
        """
        self._tokens += 1
        token = self._tokens
        asked = {name for name, rank in self.ranks.items() if rank.serving}
        for name in asked:
            self.send(name, Tell(token, sweep))
        found: dict[str, Usage] = {}
        deadline = time.monotonic() + timeout_s
        while missing := {name for name in asked - found.keys() if self.ranks[name].running}:
            for event in self._poll(TICK_S):
                if event.kind == "usage" and event.data["token"] == token:
                    found[event.rank] = cast(Usage, event.data)
                else:
                    self._pending.append(event)
            if time.monotonic() > deadline:
                raise FleetError(f"{', '.join(sorted(missing))} did not report usage within {timeout_s:g} s")
        return found

    # ---- end --------------------------------------------------------------------------------------------------------

    def close(self) -> dict[str, int]:
        """Ends all processes and removes all files of the fleet.

        Returns:
            The exit status by rank name, only for ranks that did not exit with 0.
        """
        running = list(self.running)
        try:
            for process in running:
                process.signal(SIGCONT)
                process.send(Stop())
        finally:  # a second Ctrl-C must not leave anything behind
            super().close()
        for rank in self.ranks.values():
            rank.process = rank.replaced = None
        return {process.name: process.returncode for process in running if process.returncode}


def _complete(rank: LiveRank, instances: set[int]) -> bool:
    return bool(rank.instances) and (rank.planned["role"] == "prefill" or instances.issubset(rank.instances))


def _cause(event: Event) -> str:
    if event.kind == "fatal":
        return f"{event.data.get('message')} ({event.data.get('code')})"
    return f"it exited with status {event.data['returncode']}; its last output:\n{event.data['output']}"
