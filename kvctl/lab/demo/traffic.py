"""Decides which room goes where: a small router as every disaggregated fleet has one, with a seed.

Only ranks that can serve take part. A room needs all ranks of its prefill instance and of its decode dp group, and a
place at each of them, counting rooms whose pages are not free yet.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import cast

from kvctl.lab.demo.fleet import SteadyFleet
from kvctl.lab.demo.room_accounting import SUCCESS, Disturbance, Room, RoomAccounting, names
from kvctl.lab.faults.specification import FAULTS_BY_NAME, parse_faults
from kvctl.lab.ranks.group import Event, FleetError
from kvctl.lab.ranks.messages import Abort, Ended, OpenRoom, Released, SendRoom
from kvctl.lab.ranks.plan import PlannedRank

# Of rooms that have a cached prefix, of those that are computed before they are asked for, of those sent in groups.
_WITH_PREFIX = 0.25
_AT_ONCE = 0.5
_IN_GROUPS = 0.3
_MOST_CHUNKS = 3
_MOST_GROUPS = 3
SHORT_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Manner:
    """How a room is computed and sent: fields of `contract.steady.SendRoom`."""

    chunks: int
    groups: int
    gap_s: float
    at_once: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One room to open.

    Attributes:
        manner: how it is computed.
        aborter: who gives it up after how long; None: nobody.
        hangs_at: the prefill rank whose last forward never ends; None: none.
        computes: tokens that its prefill ranks were told of; None: those that it has.
    """

    room: Room
    manner: Manner
    aborter: str | None
    abort_after_s: float
    hangs_at: str | None = None
    computes: int | None = None


class Router:
    """Chooses rooms; the same seed and the same answers of the fleet give the same rooms."""

    def __init__(
        self,
        ranks: Mapping[str, PlannedRank],
        *,
        seed: int,
        tokens: tuple[int, int],
        page_size: int,
        slots: int,
        concurrency: int,
        aborts: float = 0.0,
        longest_gap_s: float = SHORT_GAP_S,
    ) -> None:
        """Args:
        ranks: by name.
        tokens: shortest and longest prompt; lengths are log-uniform, as prompts are.
        slots: rooms that a rank has places for.
        concurrency: rooms in flight over all decode dp groups, shared evenly, so that a stuck one stops no other.
        aborts: share of rooms that somebody gives up.
        longest_gap_s: time between two forwards of a room at most.
        """
        self._ranks = ranks
        self._draw = random.Random(seed)
        self._tokens = tokens
        self._page_size = page_size
        self._slots = slots
        self._aborts = aborts
        self._longest_gap_s = longest_gap_s
        self._dps = sorted({rank["dp"] for rank in ranks.values() if rank["role"] == "decode"})
        self._share = -(-concurrency // len(self._dps))
        self._next = self._draw.randrange(1 << 20)
        self._prefill_dp = {
            rank["instance"]: 1 + max(other["dp"] for other in ranks.values() if other["instance"] == rank["instance"])
            for rank in ranks.values()
            if rank["role"] == "prefill"
        }
        self.held: dict[str, int] = dict.fromkeys(ranks, 0)

    def choose(
        self, serving: Mapping[str, Collection[int]], in_flight: Mapping[int, int], now_ns: int
    ) -> Choice | None:
        """The next room, or None where nobody could serve one now.

        Args:
            serving: prefill instances that each rank can exchange rooms with; ranks that are down have none.
            in_flight: rooms of each decode dp group that are not over.
        """
        free = [dp for dp in self._dps if in_flight.get(dp, 0) < self._share]
        pairs = [(instance, dp) for instance in self._prefill_dp for dp in self._groups(instance, serving, free)]
        if not pairs:
            return None
        instance, dp = self._draw.choice(pairs)
        return self.place(instance, dp, self._length(), now_ns)

    def place(
        self, instance: int, decode_dp: int, tokens: int, now_ns: int, prefix_tokens: int | None = None
    ) -> Choice:
        """A room for this prefill instance and decode dp group, whoever serves."""
        draw = self._draw
        number = self._next = self._next + draw.randint(1, 7)
        everybody = self._instance(instance)
        group = number % self._prefill_dp[instance]
        prefill = tuple(name for name in everybody if self._ranks[name]["dp"] == group)
        decode = tuple(self._group(decode_dp))
        if prefix_tokens is None:
            whole = tokens // self._page_size
            prefix_tokens = draw.randint(0, whole) * self._page_size if draw.random() < _WITH_PREFIX else 0
        room = Room(
            number=number,
            tokens=tokens,
            prefix_tokens=prefix_tokens,
            instance=instance,
            decode_dp=decode_dp,
            prefill=prefill,
            decode=decode,
            ranks=(*everybody, *decode),
            opened_ns=now_ns,
        )
        manner = Manner(
            chunks=draw.randint(1, _MOST_CHUNKS),
            groups=draw.randint(2, _MOST_GROUPS) if draw.random() < _IN_GROUPS else 1,
            gap_s=round(draw.uniform(0, self._longest_gap_s), 4),
            at_once=draw.random() < _AT_ONCE,
        )
        aborter = draw.choice([*prefill, *decode]) if draw.random() < self._aborts else None
        # Most within the time that a room takes, some long after.
        after_s = draw.expovariate(1 / 0.05)
        return Choice(room, manner, aborter, after_s)

    def taken(self, name: str) -> None:
        """A rank was told of a room."""
        self.held[name] += 1

    def freed(self, name: str) -> None:
        """A rank has released one."""
        self.held[name] -= 1

    def forget(self, name: str) -> None:
        """A rank's process is gone."""
        self.held[name] = 0

    def gap_s(self, rate: float, bursty: bool) -> float:
        """Time to the next arrival at `rate` rooms a second; bursty: most of them close together, then nothing."""
        if bursty:
            return self._draw.expovariate(rate * 8) if self._draw.random() < 0.9 else self._draw.expovariate(rate / 9)
        return self._draw.expovariate(rate)

    def _groups(self, instance: int, serving: Mapping[str, Collection[int]], free: Sequence[int]) -> list[int]:
        """Decode dp groups that can take a room of an instance."""
        if not all(serving[name] and self._has_place(name) for name in self._instance(instance)):
            return []
        return [
            dp for dp in free if all(instance in serving[name] and self._has_place(name) for name in self._group(dp))
        ]

    def _instance(self, instance: int) -> Sequence[str]:
        return [name for name, rank in self._ranks.items() if rank["instance"] == instance]

    def _group(self, dp: int) -> Sequence[str]:
        return [name for name, rank in self._ranks.items() if rank["role"] == "decode" and rank["dp"] == dp]

    def _has_place(self, name: str) -> bool:
        return self.held[name] < self._slots

    def _length(self) -> int:
        low, high = self._tokens
        return min(high, round(low * exp(self._draw.random() * log(high / low)))) if high > low else low


_TICK_S = 0.05
_OVERDUE_EVERY_S = 0.5
# A router hears of a silent rank from its own health checks, not at once.
_NOTICED_AFTER_S = 1.0
# This process waits for a moment and gets the processor so much later: then ranks do not get it either.
_STARVED_S = 0.75
_LOST = FAULTS_BY_NAME["control-loss"].explains


class DeadlineMissed(FleetError):
    """Something did not happen in time; says what was waited for."""


@dataclass(frozen=True)
class TrafficOptions:
    """How rooms come and go.

    Args:
        rate: rooms a second; 0: as many at all times as the plan was made for.
        bursty: with a rate, most rooms come close together.
        aborts: share of rooms that one of their ranks gives up.
        longest_gap_s: most time between two forwards of a room.
    """

    rate: float = 0.0
    bursty: bool = False
    aborts: float = 0.0
    longest_gap_s: float = SHORT_GAP_S


class Traffic:
    """Keeps rooms in flight, or lets them come at a rate.

    Attributes:
        ledger: what became of them.
        first_success_ns: by rank, when the first room of its present life succeeded there.
        struck: how often each fault struck, by rank and life.
        unasked_deaths: ends of processes that nobody had killed.
        starved_s: time that this process waited for a processor, in stretches in which ranks may have been lost.
        shut: no rooms are opened but those that somebody asks for.
    """

    def __init__(
        self,
        fleet: SteadyFleet,
        options: TrafficOptions = TrafficOptions(),
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """Nothing is opened before `run` or `until`.

        Args:
            on_event: told of everything that ranks say and of their deaths.
        """
        plan = fleet.plan
        self.fleet = fleet
        self.ledger = RoomAccounting(plan.patience_s, plan.timings["suspect_s"] + 1.0, plan.bytes_of_token)
        self.first_success_ns: dict[str, int] = {}
        self.struck: dict[tuple[str, int], dict[str, int]] = {}
        self.unasked_deaths: list[Event] = []
        self.starved_s = 0.0
        self.shut = False
        self._router = Router(
            {name: rank.planned for name, rank in fleet.ranks.items()},
            seed=plan.seed,
            tokens=plan.tokens,
            page_size=plan.page_size,
            slots=plan.slots,
            concurrency=plan.concurrency,
            aborts=options.aborts,
            longest_gap_s=options.longest_gap_s,
        )
        self._options = options
        self._on_event = on_event
        self._next_at = time.monotonic()
        self._overdue_at = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._down: dict[str, Disturbance] = {}  # what keeps a rank from serving: killed, or paused
        self._replaced: dict[str, Disturbance] = {}  # the latest pause in which another process took the rank's place
        self._deaths: set[str] = set()  # ranks that are being killed, so that their end is no finding

    # ---- rooms --------------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: int,
        instance: int = 0,
        decode_dp: int = 0,
        prefix_tokens: int = 0,
        aborter: str | None = None,
        gap_s: float | None = None,
        hangs_at: str | None = None,
        chunks: int = 2,
        computes: int | None = None,
    ) -> Room:
        """Open a room of one's own, whoever serves.

        Args:
            aborter: soon gives it up.
            gap_s: lies between its two forwards.
            hangs_at: a prefill rank of it whose last forward, of `chunks`, never ends.
            computes: tokens that its prefill ranks were told of, where those are not `tokens`.
        """
        choice = self._router.place(instance, decode_dp, tokens, time.monotonic_ns(), prefix_tokens)
        manner = choice.manner
        if gap_s is not None:
            manner = replace(manner, chunks=2, gap_s=gap_s)
        if hangs_at is not None:
            manner = Manner(chunks=chunks, groups=1, gap_s=0.0, at_once=True)
        choice = Choice(choice.room, manner, aborter, choice.abort_after_s, hangs_at, computes)
        self._open(choice)
        return choice.room

    def abort(self, room: Room, rank: str, reason: str = "the client has gone") -> None:
        """Have a rank give a room up."""
        room.aborted = True
        self.fleet.tell(rank, Abort(room.number, reason))

    # ---- time ---------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Serve traffic for so long."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.turn(min(left_s, _TICK_S))

    def until(self, condition: Callable[[], bool], timeout_s: float, waited_for: str, quiet: bool = False) -> None:
        """Serve traffic until something is so; `quiet`: open no new rooms meanwhile.

        Raises:
            DeadlineMissed: it is not so in time; names what was waited for.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineMissed(f"waited {timeout_s:g} s for this: {waited_for}")
            self.turn(_TICK_S, quiet)

    def drain(self, timeout_s: float) -> None:
        """Open no new rooms; wait until all have ended and their pages are free, at every rank that lives.

        Raises:
            DeadlineMissed: names the rooms, and who has them.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.ledger.open:
            if time.monotonic() > deadline:
                raise DeadlineMissed(f"{len(left)} rooms have not ended after {timeout_s:g} s: {names(left)}")
            self.turn(_TICK_S, quiet=True)

    def turn(self, timeout_s: float, quiet: bool = False) -> None:
        """Open what is due, then hear the fleet once, for so long at most."""
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if not (quiet or self.shut):
            self._open_due(now)
        if self._later:
            timeout_s = min(timeout_s, max(0.0, self._later[0][0] - now))
        before = time.monotonic_ns()
        events = self.fleet.poll(timeout_s)
        self._note_starvation(before, timeout_s)
        for event in events:
            self._take(event)
        if now >= self._overdue_at:
            self._overdue_at = now + _OVERDUE_EVERY_S
            self.ledger.overdue(time.monotonic_ns())

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then, on a turn."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), action))

    # ---- what is done to ranks ----------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL a rank; its rooms' failures are expected."""
        self._deaths.add(name)
        self._revive(name)
        self._down[name] = self.ledger.disturb(Disturbance("kill", name, time.monotonic_ns()))
        self.fleet.kill(name)

    def restart(self, name: str, faults: str = "") -> None:
        """Start a killed rank again, with faults in force from the beginning; rooms go to it once it serves."""
        self.fleet.restart(name, faults)
        self.first_success_ns.pop(name, None)

    def pause(self, name: str) -> None:
        """SIGSTOP a rank; the router notices a little later."""
        self._down[name] = self.ledger.disturb(Disturbance("pause", name, time.monotonic_ns()))
        self.fleet.pause(name)

    def resume(self, name: str) -> None:
        """SIGCONT it."""
        self.fleet.resume(name)
        self._revive(name)

    def replace(self, name: str) -> None:
        """Start another process in a paused rank's place, and send it rooms once it serves.

        The rooms of the paused one end there now, whatever it does later: its engine's requests were given up.
        """
        pause = self._replaced[name] = self._down[name]
        now_ns = pause.before_ns = time.monotonic_ns()
        self.ledger.died(name, now_ns)
        self._router.forget(name)
        self.first_success_ns.pop(name, None)
        self._down[name] = self.ledger.disturb(Disturbance("replace", name, now_ns))
        self.fleet.replace(name)

    def thaw(self, name: str) -> None:
        """SIGCONT the process that was replaced: from now on it has to let go of its rooms."""
        self.fleet.thaw(name)
        self._replaced[name].until_ns = time.monotonic_ns()

    def end_former(self, name: str, *, kill: bool) -> None:
        """End the process that was replaced, by SIGKILL or in order."""
        self.fleet.end_former(name, kill=kill)
        pause = self._replaced[name]
        pause.until_ns = pause.until_ns or time.monotonic_ns()

    def fault(self, name: str, spec: str, seconds: float) -> None:
        """Put a fault in force at a rank for so long; it explains what its kind says, and no more."""
        now_ns = time.monotonic_ns()
        codes = {code for fault in parse_faults(spec) for code in fault.kind.explains}
        until_ns = now_ns + round(seconds * 1e9)
        self.ledger.disturb(Disturbance("fault", name, now_ns, until_ns, tuple(sorted(codes)) or ("-",)))
        self.fleet.fault(name, spec, seconds)

    def _revive(self, name: str) -> None:
        if down := self._down.pop(name, None):
            down.until_ns = time.monotonic_ns()

    def _note_starvation(self, since_ns: int, waited_s: float) -> None:
        """A machine that gives nobody the processor makes ranks silent: that explains why others take them for lost."""
        now_ns = time.monotonic_ns()
        late_s = (now_ns - since_ns) / 1e9 - waited_s
        if late_s > _STARVED_S:
            self.starved_s += late_s
            # Whoever was silent may be heard of, and given up, a little earlier or later than we were late.
            lost_ns = round(self.fleet.plan.timings["lost_s"] * 1e9)
            self.ledger.disturb(Disturbance("starved", None, since_ns - lost_ns, now_ns + lost_ns, _LOST))

    # ---- within -------------------------------------------------------------------------------------------------

    def _open_due(self, now: float) -> None:
        if self._options.rate:
            while self._next_at <= now:
                self._next_at += self._router.gap_s(self._options.rate, self._options.bursty)
                self._open_one()
            return
        while self._open_one():
            pass

    def _open_one(self) -> bool:
        serving = {name: self._instances(name) for name in self.fleet.ranks}
        choice = self._router.choose(serving, self.ledger.in_flight, time.monotonic_ns())
        if choice is None:
            return False
        self._open(choice)
        return True

    def _instances(self, name: str) -> list[int]:
        """Prefill instances that a rank can serve, as the router believes."""
        rank, down = self.fleet.ranks[name], self._down.get(name)
        if down is None:
            return rank.instances
        unnoticed = down.kind == "pause" and time.monotonic_ns() - down.from_ns < _NOTICED_AFTER_S * 1e9
        return rank.instances if unnoticed else []

    def _open(self, choice: Choice) -> None:
        room, manner = choice.room, choice.manner
        told = [*room.prefill, *room.decode]
        self.ledger.opening(room, [name for name in told if self.fleet.ranks[name].running])
        number, prefix = room.number, room.prefix_tokens
        computes = room.tokens if choice.computes is None else choice.computes
        for name in told:
            if name in room.expects:
                self._router.taken(name)
            if name in room.prefill:
                how = manner.chunks, manner.groups, manner.gap_s, manner.at_once
                hangs = name == choice.hangs_at
                self.fleet.tell(name, SendRoom(number, number, computes, prefix, *how, hangs=hangs))
            else:
                self.fleet.tell(name, OpenRoom(number, number, room.tokens, prefix, room.instance))
        if (aborter := choice.aborter) is not None:
            self.later(choice.abort_after_s, lambda: self._give_up(room, aborter))

    def _give_up(self, room: Room, rank: str) -> None:
        if rank in room.expects and rank not in room.ends:
            self.abort(room, rank)

    def _take(self, event: Event) -> None:
        name = event.rank
        if event.kind == "ended":
            room = self.ledger.ended(name, cast(Ended, event.data))
            if room is not None and event.data["state"] == SUCCESS:
                self.first_success_ns.setdefault(name, event.data["at_ns"])
        elif event.kind == "released":
            released = cast(Released, event.data)
            if self.ledger.release(name, released["room"], released["at_ns"]) is not None:
                self._router.freed(name)
        elif event.kind == "serving":
            if name not in self._deaths and (down := self._down.get(name)) and down.kind in ("kill", "replace"):
                self._revive(name)
        elif event.kind == "died":
            self.ledger.died(name, event.at_ns)
            self._router.forget(name)
            if name in self._deaths:
                self._deaths.discard(name)
            else:
                self.unasked_deaths.append(event)
                self._down[name] = self.ledger.disturb(Disturbance("died", name, event.at_ns))
        elif event.kind == "former-died":
            self.unasked_deaths.append(event)
        elif event.kind == "usage":
            for stray in event.data["strays"]:
                self.ledger.stray(name, stray, event.at_ns)
        elif event.kind == "faults":
            self.struck[name, self.fleet.ranks[name].lives] = event.data["counts"]
        self._on_event(event)
