"""Measures the effect of a killed or stopped rank on the other ranks, and the time until the fleet serves as before.

Two prefill instances of two ranks each and two decode ranks, each rank a process, serve small verified rooms. Rooms are
opened at a constant rate for each pair of a prefill instance and a decode rank (an open loop), so that a dip shows as
missing rooms instead of a lower load. Then one rank at a time is killed (SIGKILL) and started again, or stopped
(SIGSTOP) for some seconds. "Others" are the rooms in which that rank does not take part.

    python benchmarks/outages.py --transport nixl
    python benchmarks/outages.py --outage kill=decode-1 --outage stop=p0-prefill-1@30

The timeouts are an agent's defaults (suspect after 3 s, lost after 15 s); `--short` selects those of the soak tests.
The exit status is 1 if a byte is wrong, a room hangs, or a room failed for a reason other than the injected outage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.lab.bench.statistics import percentile
from kvctl.lab.demo.fleet import SHORT_TIMINGS, FleetPlan, LiveFleet
from kvctl.lab.demo.room_accounting import LiveRoom
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.ranks.request import Sizes
from kvctl_agent.contract.config import KEYS

PREFILL = (Sizes(tp=2), Sizes(tp=2))
DECODE = Sizes(dp=2)
PAIRS = [(instance, dp) for instance in range(len(PREFILL)) for dp in range(DECODE.dp)]
OUTAGES = (
    "kill=decode-1",
    "kill=p0-prefill-1",
    "kill=p0-prefill-0",
    "stop=decode-1@5",
    "stop=p0-prefill-1@5",
    "stop=decode-1@30",
    "stop=p0-prefill-1@30",
)
DOWN_S = 3.0  # from a kill to the restart
CALM_S = 60.0  # time limit for the recovery
# Maximum number of open rooms of a pair with a silent rank: a router would stop sending requests, too.
MOST_OF_A_PAIR = 16
IN_FLIGHT = 8  # rooms per pair of the victim when the outage begins
TOKENS = 256
SAMPLE_S = 0.5


class Outage(NamedTuple):
    """Outage of one rank.

    Attributes:
        how: "kill" or "stop".
        victim: name of the rank.
        seconds: duration of a stop, or time from a kill until the restart.
    """

    how: str
    victim: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Outage:
        how, _, rest = text.partition("=")
        victim, _, seconds = rest.partition("@")
        if how not in ("kill", "stop") or not victim or (how == "stop") != bool(seconds):
            raise argparse.ArgumentTypeError(f"{text!r}: write kill=RANK or stop=RANK@SECONDS")
        return cls(how, victim, float(seconds or DOWN_S))

    def __str__(self) -> str:
        return f"{self.how} {self.victim}" + (f" {self.seconds:g} s" if self.how == "stop" else "")


class Window(NamedTuple):
    """Rooms per second that succeeded in a period, and the 99th percentile of their latency."""

    rooms_per_s: float
    p99_ms: float


@dataclass
class Finding:
    """Measurements of one outage, in seconds from its begin unless stated otherwise.

    Attributes:
        detected_s: time at which the first rank fails a room because the victim is lost.
        told_s: time at which the last rank has failed the last room that was in flight.
        failed: number of rooms that failed with a cause that names the victim.
        unopened: number of failed rooms that the victim had not opened; see `failures`.
        others: rooms without the victim before, during and after the outage.
        started_s: from the restart until the new process reports that it can serve; most of it is imports.
        served_s: from the restart, or the end of the stop, until the first room of the victim opened after it succeeds.
        quarantined: largest number of bytes quarantined for a silent writer.
        released_s: from the restart, or the end of the stop, until no bytes are quarantined.
    """

    outage: Outage
    detected_s: float | None = None
    told_s: float | None = None
    failed: int = 0
    unopened: int = 0
    others: list[Window] = field(default_factory=list)
    started_s: float | None = None
    served_s: float | None = None
    quarantined: int = 0
    released_s: float | None = None

    @property
    def dip(self) -> float:
        """Share of the other rooms that is missing during the outage, from 0 to 1."""
        before, during, _ = self.others
        return max(0.0, 1 - during.rooms_per_s / before.rooms_per_s) if before.rooms_per_s else 0.0


class OpenLoop:
    """Load that opens rooms at a constant rate for each pair of a prefill instance and a decode rank."""

    def __init__(self, traffic: Traffic, rate: float) -> None:
        self.traffic = traffic
        self._gap_s = 1 / rate
        self._rooms: dict[tuple[int, int], list[LiveRoom]] = {pair: [] for pair in PAIRS}
        now = time.monotonic()
        # Staggered, so that the pairs do not open rooms at the same time.
        self._next_at = {pair: now + self._gap_s * number / len(PAIRS) for number, pair in enumerate(PAIRS)}

    @property
    def rooms(self) -> list[LiveRoom]:
        return [room for rooms in self._rooms.values() for room in rooms]

    def forget(self) -> None:
        """Drops the rooms that have ended."""
        for rooms in self._rooms.values():
            rooms[:] = [room for room in rooms if not room.over]

    def burst(self, victim: str) -> None:
        """Opens several rooms in which the victim takes part at once, so that some of them are in flight."""
        rank = self.traffic.fleet.ranks[victim].planned
        mine = rank["dp"] if rank["role"] == "decode" else rank["instance"]
        for instance, dp in PAIRS:
            if mine == (dp if rank["role"] == "decode" else instance):
                self._rooms[instance, dp] += [self.traffic.open(TOKENS, instance, dp) for _ in range(IN_FLIGHT)]

    def run(self, seconds: float, sample: Callable[[], None] = lambda: None) -> None:
        self.until(lambda: False, seconds, sample)

    def until(self, condition: Callable[[], bool], seconds: float, sample: Callable[[], None] = lambda: None) -> bool:
        """Opens and serves rooms until a condition holds or `seconds` have passed; returns whether it holds.

        Args:
            sample: called every `SAMPLE_S` seconds meanwhile.
        """
        now = time.monotonic()
        deadline, sample_at = now + seconds, now
        while not (met := condition()) and (now := time.monotonic()) < deadline:
            self._open_due(now)
            if now >= sample_at:
                sample_at = now + SAMPLE_S
                sample()
            self.traffic.turn(max(0.0, min(0.05, deadline - now, min(self._next_at.values()) - now)), quiet=True)
        return met

    def _open_due(self, now: float) -> None:
        for pair, at in self._next_at.items():
            if at > now:
                continue
            self._next_at[pair] = max(at + self._gap_s, now - 1.0)  # no burst after this process was delayed
            instance, dp = pair
            open_rooms = sum(not room.over for room in self._rooms[pair][-4 * MOST_OF_A_PAIR :])
            if open_rooms < MOST_OF_A_PAIR and self._up(instance, dp):
                self._rooms[pair].append(self.traffic.open(TOKENS, instance, dp))

    def _up(self, instance: int, dp: int) -> bool:
        """Returns whether every rank of a pair has a serving process.

        A stopped process counts, because a router would not know that it is stopped.
        """
        ranks = self.traffic.fleet.ranks.values()
        of_pair = [
            rank
            for rank in ranks
            if (rank.planned["role"] == "prefill" and rank.planned["instance"] == instance)
            or (rank.planned["role"] == "decode" and rank.planned["dp"] == dp)
        ]
        return all(rank.paused or instance in rank.instances for rank in of_pair)


def main() -> int:
    options = _options()
    plan = FleetPlan(
        prefill=PREFILL,
        decode=DECODE,
        transport=options.transport,
        seed=options.seed,
        concurrency=MOST_OF_A_PAIR * len(PAIRS),
        tokens=(TOKENS, TOKENS),
        config={} if options.short else defaults(),
    )
    timings = plan.timings
    print(
        f"{options.transport}, {options.rate:g} rooms/s of {TOKENS} tokens for each of {len(PAIRS)} pairs, "
        f"suspect after {timings['suspect_s']:g} s, lost after {timings['lost_s']:g} s, seed {options.seed}"
    )
    with LiveFleet(plan) as fleet:
        fleet.start()
        traffic = Traffic(fleet)
        load = OpenLoop(traffic, options.rate)
        load.run(options.window)  # establishes connections and warms caches
        print(HEADER, flush=True)
        for outage in options.outage:
            print(row(measure(load, outage, options.window, traffic)), flush=True)
        traffic.drain(plan.patience_s)
        fleet.usage(sweep=True)
        traffic.turn(0.0, quiet=True)
        books = traffic.accounting
        print(
            f"{books.done} rooms succeeded, {books.failed} failed ({books.expected} explained), "
            f"{books.verified_bytes / 1e9:.1f} GB verified, {len(books.corrupt)} corrupt, {len(books.hung)} hung"
        )
        for room in books.unexpected[:8]:
            print(f"not explained: room {room.number}: {room.first_cause}")
        return 1 if books.corrupt or books.hung or books.unexpected or traffic.crashes else 0


def defaults() -> dict[str, str | int | float | bool]:
    """Returns an agent's default timeouts, to replace the fleet's short ones."""
    return {key.name: key.default for key in KEYS if key.name in SHORT_TIMINGS and key.default is not None}


def measure(load: OpenLoop, outage: Outage, window_s: float, traffic: Traffic) -> Finding:
    """Injects one outage and measures its effect."""
    fleet, victim = traffic.fleet, outage.victim
    found = Finding(outage)
    load.forget()
    load.run(window_s)
    now_ns = time.monotonic_ns()
    found.others.append(others(load.rooms, victim, now_ns - round(window_s * 1e9), now_ns))
    load.burst(victim)
    load.run(0.01)
    begun_ns = time.monotonic_ns()

    def sample() -> None:
        held = [usage["quarantined_bytes"] for usage in fleet.usage().values()]
        found.quarantined = max(found.quarantined, sum(held))

    def served(since_ns: int) -> Callable[[], bool]:
        return lambda: any(room.succeeded and room.opened_ns > since_ns for room in load.rooms if victim in room.ranks)

    if outage.how == "kill":
        traffic.kill(victim)
        load.run(outage.seconds, sample)
        back_ns = time.monotonic_ns()
        traffic.restart(victim)
    else:
        traffic.pause(victim)
        load.run(outage.seconds, sample)
        back_ns = time.monotonic_ns()
        traffic.resume(victim)
    if load.until(served(back_ns), CALM_S):
        found.served_s = (time.monotonic_ns() - back_ns) / 1e9
    if outage.how == "kill":
        found.started_s = (fleet.ranks[victim].serving_ns - back_ns) / 1e9
    over_ns = time.monotonic_ns()
    found.others.append(others(load.rooms, victim, begun_ns, over_ns))
    if found.quarantined and load.until(
        lambda: not any(u["quarantined_bytes"] for u in fleet.usage().values()), CALM_S
    ):
        found.released_s = (time.monotonic_ns() - back_ns) / 1e9
    after_ns = time.monotonic_ns()
    load.run(window_s)
    found.others.append(others(load.rooms, victim, after_ns, time.monotonic_ns()))
    failures(found, load.rooms, begun_ns)
    return found


def others(rooms: Iterable[LiveRoom], victim: str, from_ns: int, until_ns: int) -> Window:
    """Returns rate and latency of the rooms without the victim that succeeded within a time range."""
    took = []
    for room in rooms:
        if victim not in room.ranks and room.succeeded:
            ended_ns = max(room.ends[name]["at_ns"] for name in room.decode)
            if from_ns <= ended_ns < until_ns:
                took.append((ended_ns - room.opened_ns) / 1e6)
    return Window(len(took) / ((until_ns - from_ns) / 1e9), percentile(sorted(took), 0.99) if took else 0.0)


def failures(found: Finding, rooms: Iterable[LiveRoom], begun_ns: int) -> None:
    """Stores in `found` how many of the victim's rooms failed on the remaining ranks, and when.

    Rooms that the victim had not opened are counted separately: the other ranks do not know that it takes part in them,
    and they end with the bootstrap deadline.
    """
    victim = found.outage.victim
    ends = []
    for room in rooms:
        causes = [
            (end["at_ns"], end["cause"]["text"]) for name, end in room.ends.items() if name != victim and end["cause"]
        ]
        named = [(at_ns, text) for at_ns, text in causes if at_ns >= begun_ns and victim in text]
        found.failed += bool(named)
        found.unopened += bool(causes and not named and victim in room.ranks)
        ends += [(at_ns, text, room.opened_ns) for at_ns, text in named]
    lost = [at_ns for at_ns, text, _ in ends if f"peer {victim} (" in text]
    if lost:
        found.detected_s = (min(lost) - begun_ns) / 1e9
        found.told_s = (max(at_ns for at_ns, _, opened_ns in ends if opened_ns < min(lost)) - begun_ns) / 1e9


COLUMNS = (
    ("outage", 24),
    ("lost after s", 12),
    ("all told s", 10),
    ("failed", 6),
    ("unopened", 8),
    ("others/s before", 15),
    ("during", 6),
    ("after", 6),
    ("dip", 6),
    ("p99 ms before", 13),
    ("during", 7),
    ("up after s", 10),
    ("serves after s", 14),
    ("quarantine", 20),
)
HEADER = "  ".join(f"{name:<{width}}" for name, width in COLUMNS)


def row(found: Finding) -> str:
    before, during, after = found.others
    kept = f"{found.quarantined / (1 << 20):.1f} MiB, {_s(found.released_s)} s" if found.quarantined else "-"
    cells = (
        str(found.outage),
        _s(found.detected_s),
        _s(found.told_s),
        str(found.failed),
        str(found.unopened),
        f"{before.rooms_per_s:.1f}",
        f"{during.rooms_per_s:.1f}",
        f"{after.rooms_per_s:.1f}",
        f"{100 * found.dip:.1f} %",
        f"{before.p99_ms:.0f}",
        f"{during.p99_ms:.0f}",
        _s(found.started_s),
        _s(found.served_s),
        kept,
    )
    return "  ".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="nixl", choices=("nixl", "mooncake", "loopback"))
    parser.add_argument("--rate", type=float, default=4.0, help="rooms a second for each pair (default: 4)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds before and after (default: 10)")
    parser.add_argument("--short", action="store_true", help="suspect after 0.6 s, lost after 3 s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--outage", type=Outage.parse, action="append", help=f"one of them; default: {', '.join(OUTAGES)}"
    )
    options = parser.parse_args()
    options.outage = options.outage or [Outage.parse(text) for text in OUTAGES]
    return options


if __name__ == "__main__":
    sys.exit(main())
