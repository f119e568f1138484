"""Endless random rooms through a steady fleet, with books on every one of them.

Run it from the thread that started the fleet: it is what polls the fleet.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from kvctl.lab.demo.room_accounting import SUCCESS, Disturbance, Room, RoomAccounting, names
from kvctl.lab.demo.router import SHORT_GAP_S, Choice, Manner, Router
from kvctl.lab.demo.steady import SteadyFleet
from kvctl.lab.faults.specification import FAULTS_BY_NAME, parse_faults
from kvctl.lab.ranks.errors import FleetError
from kvctl.lab.ranks.group import Event
from kvctl.lab.ranks.steady_messages import Abort, Ended, OpenRoom, Released, SendRoom

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
        elif event.kind == "met":
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
