"""Opens random rooms in a live fleet: a router that chooses them, and the event loop that opens and accounts for them.

Run the event loop on the thread that started the fleet, because it polls the fleet.
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

from kvctl.lab.demo.fleet import FleetPlan, LiveFleet
from kvctl.lab.demo.room_accounting import SUCCESS, Disturbance, LiveRoom, RoomAccounting, describe
from kvctl.lab.faults.specification import FAULTS_BY_NAME, parse_faults
from kvctl.lab.ranks.group import Event, FleetError
from kvctl.lab.ranks.messages import Abort, Ended, Open, Released, Room
from kvctl.lab.ranks.plan import PlannedRank

# Shares of rooms with a cached prefix, of rooms that prefill computes without waiting for decode to open them, and of
# rooms sent in layer groups.
_WITH_PREFIX = 0.25
_AT_ONCE = 0.5
_IN_GROUPS = 0.3
_MAX_CHUNKS = 3
_MAX_GROUPS = 3
SHORT_GAP_S = 0.05
_TICK_S = 0.05
_OVERDUE_INTERVAL_S = 0.5
# A router notices a silent rank only after this time, by its own health checks.
_NOTICED_AFTER_S = 1.0
# If this process wakes up this much later than requested, the ranks are assumed to lack CPU time as well.
_STARVED_S = 0.75
_LOST = FAULTS_BY_NAME["control-loss"].explains


@dataclass(frozen=True, slots=True)
class RoomChoice:
    """One room to open, as chosen by the router.

    Attributes:
        aborter: name of the rank that aborts the room after `abort_after_s`; None: the room is not aborted.
        hangs_at: name of the prefill rank whose last forward of the room never ends; None: all forwards end.
    """

    room: LiveRoom
    send: Open
    aborter: str | None
    abort_after_s: float
    hangs_at: str | None = None


@dataclass(frozen=True)
class TrafficOptions:
    """Options for the arrival of rooms.

    Args:
        rate: rooms per second; 0: opens rooms whenever fewer than the plan's concurrency are in flight.
        bursty: whether most rooms arrive close together; only with a rate.
    """

    rate: float = 0.0
    bursty: bool = False
    aborts: float = 0.0
    longest_gap_s: float = SHORT_GAP_S


class Router:
    """Chooses the prefill instance, decode dp group and length of random rooms, as the router of a PD fleet would.

    The seed determines all random choices. `choose` returns a room only if all ranks of its prefill instance and of its
    decode dp group serve and have a free slot. A room occupies a slot at a rank until its pages are free there.
    """

    def __init__(self, ranks: Mapping[str, PlannedRank], plan: FleetPlan, options: TrafficOptions) -> None:
        """Creates a router with all slots free; `ranks` are the planned ranks by name."""
        self._ranks = ranks
        self._plan = plan
        self._options = options
        self._draw = random.Random(plan.seed)
        self._dps = sorted({rank["dp"] for rank in ranks.values() if rank["role"] == "decode"})
        # The rooms in flight are split evenly, so that a stuck group does not stop the others.
        self._limit = -(-plan.concurrency // len(self._dps))
        self._next = self._draw.randrange(1 << 20)
        self._prefill_dp = {
            rank["instance"]: 1 + max(other["dp"] for other in ranks.values() if other["instance"] == rank["instance"])
            for rank in ranks.values()
            if rank["role"] == "prefill"
        }
        self.held: dict[str, int] = dict.fromkeys(ranks, 0)

    def choose(
        self, serving: Mapping[str, Collection[int]], in_flight: Mapping[int, int], now_ns: int
    ) -> RoomChoice | None:
        """Returns a random room for ranks that serve; None if no instance and dp group can take a room now.

        Args:
            serving: prefill instances with which each rank can exchange rooms, by rank name; empty for a rank that is
                down.
        """
        free = [dp for dp in self._dps if in_flight.get(dp, 0) < self._limit]
        pairs = [(instance, dp) for instance in self._prefill_dp for dp in self._groups(instance, serving, free)]
        if not pairs:
            return None
        instance, dp = self._draw.choice(pairs)
        return self.place(instance, dp, self._length(), now_ns)

    def place(
        self, instance: int, decode_dp: int, tokens: int, now_ns: int, prefix_tokens: int | None = None
    ) -> RoomChoice:
        """Returns a room for a given prefill instance and decode dp group, whether or not their ranks serve.

        Args:
            prefix_tokens: length of the prefix that the decode side has cached; None: random.
        """
        draw = self._draw
        number = self._next = self._next + draw.randint(1, 7)
        members = self._instance(instance)
        group = number % self._prefill_dp[instance]
        prefill = tuple(name for name in members if self._ranks[name]["dp"] == group)
        decode = tuple(self._group(decode_dp))
        if prefix_tokens is None:
            whole = tokens // self._plan.page_size
            prefix_tokens = draw.randint(0, whole) * self._plan.page_size if draw.random() < _WITH_PREFIX else 0
        room = LiveRoom(
            number=number,
            tokens=tokens,
            prefix_tokens=prefix_tokens,
            instance=instance,
            decode_dp=decode_dp,
            prefill=prefill,
            decode=decode,
            ranks=(*members, *decode),
            opened_ns=now_ns,
        )
        send = Open(
            Room(number, number, tokens, prefix_tokens, decode_dp, instance),
            chunks=draw.randint(1, _MAX_CHUNKS),
            groups=draw.randint(2, _MAX_GROUPS) if draw.random() < _IN_GROUPS else 1,
            gap_s=round(draw.uniform(0, self._options.longest_gap_s), 4),
            at_once=draw.random() < _AT_ONCE,
        )
        aborter = draw.choice([*prefill, *decode]) if draw.random() < self._options.aborts else None
        # Most aborts come within the usual duration of a room, some long after.
        after_s = draw.expovariate(1 / 0.05)
        return RoomChoice(room, send, aborter, after_s)

    def taken(self, name: str) -> None:
        """Occupies a slot of a rank to which a room was sent."""
        self.held[name] += 1

    def freed(self, name: str) -> None:
        """Frees a slot of a rank that has released a room."""
        self.held[name] -= 1

    def forget(self, name: str) -> None:
        """Frees all slots of a rank whose process has exited or was replaced."""
        self.held[name] = 0

    def gap_s(self) -> float:
        """Returns a random time to the next arrival, whose rate is not 0; bursts have long gaps between them."""
        rate = self._options.rate
        if self._options.bursty:
            return self._draw.expovariate(rate * 8) if self._draw.random() < 0.9 else self._draw.expovariate(rate / 9)
        return self._draw.expovariate(rate)

    def _groups(self, instance: int, serving: Mapping[str, Collection[int]], free: Sequence[int]) -> list[int]:
        """Returns those of the decode dp groups in `free` that can take a room from a prefill instance now."""
        if not all(serving[name] and self._has_slot(name) for name in self._instance(instance)):
            return []
        return [
            dp for dp in free if all(instance in serving[name] and self._has_slot(name) for name in self._group(dp))
        ]

    def _instance(self, instance: int) -> Sequence[str]:
        return [name for name, rank in self._ranks.items() if rank["instance"] == instance]

    def _group(self, dp: int) -> Sequence[str]:
        return [name for name, rank in self._ranks.items() if rank["role"] == "decode" and rank["dp"] == dp]

    def _has_slot(self, name: str) -> bool:
        return self.held[name] < self._plan.slots

    def _length(self) -> int:
        low, high = self._plan.tokens  # log-uniform, like the lengths of real prompts
        return min(high, round(low * exp(self._draw.random() * log(high / low)))) if high > low else low


class DeadlineMissed(FleetError):
    """Raised when a condition was not met in time; the text names the condition."""


class Traffic:
    """Event loop of a live fleet: opens rooms, handles the events of the ranks, and disturbs ranks on request.

    Attributes:
        accounting: results of all rooms, and the disturbances that explain failures.
        first_success_ns: time of the first success of a room in each rank's current process, by rank name.
        fired: how often each kind of fault has fired, by (rank name, number of the rank's process).
        crashes: exits of processes that had not been killed or stopped by this fleet.
        starved_s: total time by which this process woke up late, counting only delays above `_STARVED_S`.
        closed: if set, no rooms are opened except by `open`.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        options: TrafficOptions = TrafficOptions(),
        on_event: Callable[[Event], None] = lambda event: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepares the event loop; rooms are opened once `run`, `until` or `turn` is called.

        Args:
            on_event: callback for every message and exit of a rank, after it was handled.
        """
        plan = fleet.plan
        self.fleet = fleet
        self.accounting = RoomAccounting(plan.patience_s, plan.timings["suspect_s"] + 1.0, plan.token_bytes)
        self.first_success_ns: dict[str, int] = {}
        self.fired: dict[tuple[str, int], dict[str, int]] = {}
        self.crashes: list[Event] = []
        self.starved_s = 0.0
        self.closed = False
        self._router = Router({name: rank.planned for name, rank in fleet.ranks.items()}, plan, options)
        self._options = options
        self._on_event = on_event
        self._on_turn = on_turn
        self._next_at = time.monotonic()
        self._overdue_at = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._down: dict[str, Disturbance] = {}  # the kill or pause that keeps a rank from serving
        self._replaced: dict[str, Disturbance] = {}  # the pause in which a rank was replaced
        self._killed: set[str] = set()  # ranks that are being killed, so that their exit is expected

    # ---- rooms ------------------------------------------------------------------------------------------------------

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
    ) -> LiveRoom:
        """Opens a room with the given properties, whether or not its ranks serve.

        Args:
            gap_s: if given, the room is computed in two forwards with this time between them.
            hangs_at: if given, the room is computed in `chunks` forwards, the last of which never ends on this rank.
            computes: number of tokens that the prefill ranks compute; None: `tokens`.
        """
        choice = self._router.place(instance, decode_dp, tokens, time.monotonic_ns(), prefix_tokens)
        send = choice.send
        if computes is not None:
            send = replace(send, room=replace(send.room, tokens=computes))
        if gap_s is not None:
            send = replace(send, chunks=2, gap_s=gap_s)
        if hangs_at is not None:
            send = replace(send, chunks=chunks, groups=1, gap_s=0.0, at_once=True)
        self._open(RoomChoice(choice.room, send, aborter, choice.abort_after_s, hangs_at))
        return choice.room

    def abort(self, room: LiveRoom, rank: str, reason: str = "the client has gone") -> None:
        """Sends a rank the command to abort a room."""
        room.aborted = True
        self.fleet.send(rank, Abort(room.number, reason))

    # ---- time -------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Runs the event loop for some seconds."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.turn(min(left_s, _TICK_S))

    def until(self, condition: Callable[[], bool], timeout_s: float, waited_for: str, quiet: bool = False) -> None:
        """Runs the event loop until a condition is met.

        Args:
            quiet: whether to open no new rooms meanwhile.

        Raises:
            DeadlineMissed: the condition is not met within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineMissed(f"waited {timeout_s:g} s for this: {waited_for}")
            self.turn(_TICK_S, quiet)

    def drain(self, timeout_s: float) -> None:
        """Opens no new rooms and waits until, at every running rank, all rooms have ended and their pages are free.

        Raises:
            DeadlineMissed: rooms are left after `timeout_s`; the message names them and the ranks that hold them.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.accounting.open:
            if time.monotonic() > deadline:
                raise DeadlineMissed(f"{len(left)} rooms have not ended after {timeout_s:g} s: {describe(left)}")
            self.turn(_TICK_S, quiet=True)

    def turn(self, timeout_s: float, quiet: bool = False) -> None:
        """Runs the event loop once: performs scheduled actions, opens rooms, and polls the fleet.

        Args:
            quiet: whether to open no new rooms.
        """
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if not (quiet or self.closed):
            self._open_due(now)
        if self._later:
            timeout_s = min(timeout_s, max(0.0, self._later[0][0] - now))
        before = time.monotonic_ns()
        events = self.fleet.poll(timeout_s)
        self._note_starvation(before, timeout_s)
        for event in events:
            self._apply(event)
        if now >= self._overdue_at:
            self._overdue_at = now + _OVERDUE_INTERVAL_S
            self.accounting.find_overdue(time.monotonic_ns())
        self._on_turn()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedules an action for the first turn after this many seconds."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), action))

    # ---- disturbances -----------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kills a rank's process and records the disturbance, which explains failures of the rank's rooms."""
        self._killed.add(name)
        self._recovered(name)
        self._down[name] = self.accounting.disturb(Disturbance("kill", name, time.monotonic_ns()))
        self.fleet.kill(name)

    def restart(self, name: str, faults: str = "") -> None:
        """Restarts a rank that has been killed; the router sends it rooms once it serves."""
        self.fleet.restart(name, faults)
        self.first_success_ns.pop(name, None)

    def pause(self, name: str) -> None:
        """Pauses a rank's process; the router sends it rooms for another `_NOTICED_AFTER_S`."""
        self._down[name] = self.accounting.disturb(Disturbance("pause", name, time.monotonic_ns()))
        self.fleet.pause(name)

    def resume(self, name: str) -> None:
        """Resumes the process of a paused rank."""
        self.fleet.resume(name)
        self._recovered(name)

    def replace(self, name: str) -> None:
        """Replaces a paused rank's process by a new one; the router sends it rooms once it serves.

        The rooms of the paused process are recorded as ended there, as if its engine's requests had been aborted.
        """
        pause = self._replaced[name] = self._down[name]
        now_ns = pause.before_ns = time.monotonic_ns()
        self.accounting.died(name, now_ns)
        self._router.forget(name)
        self.first_success_ns.pop(name, None)
        self._down[name] = self.accounting.disturb(Disturbance("replace", name, now_ns))
        self.fleet.replace(name)

    def resume_replaced(self, name: str) -> None:
        """Resumes the replaced process of a rank and records the end of its pause."""
        self.fleet.resume_replaced(name)
        self._replaced[name].until_ns = time.monotonic_ns()

    def end_replaced(self, name: str, *, kill: bool) -> None:
        """Ends the replaced process of a rank, with SIGKILL if `kill` is set and with a Stop command otherwise."""
        self.fleet.end_replaced(name, kill=kill)
        pause = self._replaced[name]
        pause.until_ns = pause.until_ns or time.monotonic_ns()

    def fault(self, name: str, spec: str, seconds: float) -> None:
        """Sets faults of a rank's agent for some seconds; they explain only failures with the codes of their kinds."""
        now_ns = time.monotonic_ns()
        codes = {code for fault in parse_faults(spec) for code in fault.kind.explains}
        until_ns = now_ns + round(seconds * 1e9)
        self.accounting.disturb(Disturbance("fault", name, now_ns, until_ns, tuple(sorted(codes)) or ("-",)))
        self.fleet.fault(name, spec, seconds)

    def _recovered(self, name: str) -> None:
        if down := self._down.pop(name, None):
            down.until_ns = time.monotonic_ns()

    def _note_starvation(self, since_ns: int, waited_s: float) -> None:
        """Records a disturbance if this process woke up much later than requested.

        The ranks probably lacked CPU time as well and sent no heartbeats, so that peers declared them lost.
        """
        now_ns = time.monotonic_ns()
        late_s = (now_ns - since_ns) / 1e9 - waited_s
        if late_s > _STARVED_S:
            self.starved_s += late_s
            # The ranks' delays, and their peers' reactions, may come earlier or later than the delay of this process.
            lost_ns = round(self.fleet.plan.timings["lost_s"] * 1e9)
            self.accounting.disturb(Disturbance("starved", None, since_ns - lost_ns, now_ns + lost_ns, _LOST))

    # ---- internals --------------------------------------------------------------------------------------------------

    def _open_due(self, now: float) -> None:
        if self._options.rate:
            while self._next_at <= now:
                self._next_at += self._router.gap_s()
                self._open_one()
            return
        while self._open_one():
            pass

    def _open_one(self) -> bool:
        serving = {name: self._instances(name) for name in self.fleet.ranks}
        choice = self._router.choose(serving, self.accounting.in_flight, time.monotonic_ns())
        if choice is None:
            return False
        self._open(choice)
        return True

    def _instances(self, name: str) -> list[int]:
        """Returns the prefill instances with which a rank can exchange rooms, as far as the router knows."""
        rank, down = self.fleet.ranks[name], self._down.get(name)
        if down is None:
            return rank.instances
        unnoticed = down.kind == "pause" and time.monotonic_ns() - down.from_ns < _NOTICED_AFTER_S * 1e9
        return rank.instances if unnoticed else []

    def _open(self, choice: RoomChoice) -> None:
        room = choice.room
        members = [*room.prefill, *room.decode]
        self.accounting.add(room, [name for name in members if self.fleet.ranks[name].running])
        receive = Open(Room(room.number, room.number, room.tokens, room.prefix_tokens, room.decode_dp, room.instance))
        for name in members:
            if name in room.expects:
                self._router.taken(name)
            prefill = name in room.prefill
            self.fleet.send(name, replace(choice.send, hangs=name == choice.hangs_at) if prefill else receive)
        if (aborter := choice.aborter) is not None:
            self.later(choice.abort_after_s, lambda: self._abort_unless_ended(room, aborter))

    def _abort_unless_ended(self, room: LiveRoom, rank: str) -> None:
        if rank in room.expects and rank not in room.ends:
            self.abort(room, rank)

    def _apply(self, event: Event) -> None:
        name = event.rank
        if event.kind == "ended":
            room = self.accounting.ended(name, cast(Ended, event.data))
            if room is not None and event.data["state"] == SUCCESS:
                self.first_success_ns.setdefault(name, event.data["at_ns"])
        elif event.kind == "released":
            released = cast(Released, event.data)
            if self.accounting.released(name, released["room"], released["at_ns"]) is not None:
                self._router.freed(name)
        elif event.kind == "serving":
            if name not in self._killed and (down := self._down.get(name)) and down.kind in ("kill", "replace"):
                self._recovered(name)
        elif event.kind == "died":
            self.accounting.died(name, event.at_ns)
            self._router.forget(name)
            if name in self._killed:
                self._killed.discard(name)
            else:
                self.crashes.append(event)
                self._down[name] = self.accounting.disturb(Disturbance("died", name, event.at_ns))
        elif event.kind == "replaced-died":
            self.crashes.append(event)
        elif event.kind == "usage":
            for stray in event.data["strays"]:
                self.accounting.stray(name, stray, event.at_ns)
        elif event.kind == "faults":
            self.fired[name, self.fleet.ranks[name].lives] = event.data["counts"]
        self._on_event(event)
