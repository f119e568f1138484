"""Keeps what is known of a finding while it still is: the room as every rank sees it, and the inputs of all machines.

A hung room is worth more with the recordings of that minute than with any log afterwards; `kvctl replay` reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.client.recorder import Series, save_recording
from kvctl.client.room_timeline import join
from kvctl.errors import CliError
from kvctl.lab.demo.fault_schedule import FaultRunner, ScheduledFault
from kvctl.lab.demo.fleet import SteadyFleet
from kvctl.lab.demo.leak_watch import LeakWatch
from kvctl.lab.demo.room_accounting import SUCCESS, Room, RoomAccounting
from kvctl.lab.demo.scenarios import Direction, Play
from kvctl.lab.demo.traffic import DeadlineMissed, Traffic, TrafficOptions
from kvctl.lab.ranks.group import Event, FleetError

# A rank that is paused does not answer, and everybody else waits meanwhile.
_TIMEOUT_NS = 1_000_000_000
_MOST_FINDINGS = 3


class Artifacts:
    """Files of one run.

    Attributes:
        saved: what was written, and why something could not be.
    """

    def __init__(self, directory: Path | None, ranks: Sequence[str]) -> None:
        """`directory` is made now, so that a finding is not lost for want of it; None: nothing is kept.

        Raises:
            OSError: it cannot be made.
        """
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ranks = list(ranks)
        self._seen = 0
        self.saved: list[str] = []

    def look(self, books: RoomAccounting) -> None:
        """Save what is new among the findings, the first few of them."""
        count = len(books.hung) + len(books.corrupt) + len(books.unexpected)
        if count == self._seen:
            return
        first, self._seen = self._seen == 0, count
        if self._directory is None or not (first or count <= _MOST_FINDINGS):
            return
        rooms = [*books.hung, *books.unexpected]
        numbers = [room.number for room in rooms[-1:]] + [each.mismatch["room"] for each in books.corrupt[-1:]]
        try:
            with Fleet(self._ranks, {}, _TIMEOUT_NS) as fleet:
                for number in numbers:
                    self._save_room(fleet, number, books.rooms.get(number))
                path = self._directory / f"finding-{count}.kvrec"
                save_recording(fleet, path, Series(0, 0, lambda moments, nbytes, left_ns: None))
                self.saved.append(str(path))
        except (OSError, CliError) as error:  # a full disk must not end the run that found something
            self.saved.append(f"not saved: {error}")

    def _save_room(self, fleet: Fleet, number: int, room: Room | None) -> None:
        """What `kvctl rooms show` would say, and what the fleet's books say."""
        assert self._directory is not None
        survey = fleet.survey([Call("room", {"room": str(number)})])
        details = [detail for _, data in survey.answers("room") for detail in data]
        joined = join(details, {agent.name: agent.clock for agent in survey.agents})
        path = self._directory / f"room-{number}.json"
        document = {"books": room, "joined": joined, "faults": survey.faults}
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2, default=list) + b"\n")
        self.saved.append(str(path))


LINE_EVERY_S = 1.0
_SHOWN_FINDINGS = 20
_SERVE_S = 60.0
_TURN_S = 0.05


class Soak:
    """Runs it.

    Attributes:
        traffic, watch: books of rooms, and of what ranks hold.
    """

    def __init__(
        self,
        fleet: SteadyFleet,
        options: TrafficOptions,
        strikes: Sequence[ScheduledFault],
        everywhere: str = "",
        evidence: Path | None = None,
        scene: Play | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Traffic may begin.

        Args:
            fleet: it has been started.
            everywhere: faults in force at every rank, all the time.
            evidence: directory for what is known of findings.
            scene: what is played beside the traffic; it tells `say` what it did.
        """
        self.fleet = fleet
        self.watch = LeakWatch(fleet)
        self.traffic = Traffic(fleet, options, self._heard)
        self._everywhere = everywhere
        self._faulty: set[tuple[str, int]] = set()
        self.chaos = FaultRunner(self.traffic, strikes, fleet.plan.seed)
        self._scene = Direction(self.traffic, scene, say) if scene is not None else None
        self._evidence = Artifacts(evidence, list(fleet.ranks))
        self.began = time.monotonic()
        self._before = (self.began, 0, 0)
        self._not_drained = ""

    def run(self, seconds: float | None, on_line: Callable[[dict[str, Any]], None]) -> None:
        """Traffic and faults for so long, or until interrupted; then all is drained.

        Args:
            on_line: gets a row of the live view every second.
        """
        deadline = None if seconds is None else self.began + seconds
        line_at = self.began + LINE_EVERY_S
        while deadline is None or time.monotonic() < deadline:
            self._turn()
            if time.monotonic() >= line_at:
                line_at += LINE_EVERY_S
                on_line(self.line())

    def drain(self) -> None:
        """End every fault, and wait until every rank serves and nothing of any room is left."""
        self.chaos.end()
        if self._scene is not None:
            self._scene.end()
        ranks = self.fleet.ranks.values()
        try:
            # Rooms still flow until all serve: a rank that nobody needs would never show that it can.
            self._until(lambda: all(rank.serving for rank in ranks), _SERVE_S, "every rank serves again")
            self.traffic.drain(self.fleet.plan.patience_s)
            self._until(self._clean, self.fleet.plan.patience_s, "nothing of any room is left", quiet=True)
        except DeadlineMissed as missed:
            self._not_drained = str(missed)
        with suppress(FleetError):
            for name, usage in self.fleet.usage(sweep=True).items():
                self.watch.add(name, usage)
                for stray in usage["strays"]:
                    self.traffic.ledger.stray(name, stray, usage["at_ns"])

    def close(self) -> None:
        """Close what is not the fleet's."""
        self.chaos.close()

    def _turn(self, quiet: bool = False) -> None:
        self.chaos.turn()
        if self._scene is not None:
            self._scene.turn()
        self.watch.turn()
        self.traffic.turn(_TURN_S, quiet)
        self._evidence.look(self.traffic.ledger)

    def _until(self, condition: Callable[[], bool], timeout_s: float, waited_for: str, quiet: bool = False) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineMissed(f"waited {timeout_s:g} s for this: {waited_for}")
            self._turn(quiet)

    def _clean(self) -> bool:
        asked_ns = time.monotonic_ns() - 5_000_000_000
        fresh = all(name in self.watch.now and self.watch.now[name]["at_ns"] > asked_ns for name in self.fleet.ranks)
        return fresh and self.watch.clean

    def _heard(self, event: Event) -> None:
        self.watch.take(event)
        rank = self.fleet.ranks[event.rank]
        if self._everywhere and event.kind == "serving" and (life := (event.rank, rank.lives)) not in self._faulty:
            self._faulty.add(life)
            self.traffic.fault(event.rank, self._everywhere, 1e9)

    # ---- what there is to see -----------------------------------------------------------------------------------

    def line(self) -> dict[str, Any]:
        """A row of the live view: what happened since the one before."""
        books, now = self.traffic.ledger, time.monotonic()
        at, done, nbytes = self._before
        self._before = (now, books.done, books.delivered_bytes)
        usage = self.watch.now.values()
        ring = sum(each["ring_bytes"] for each in usage)
        return {
            "elapsed_ns": round((now - self.began) * 1e9),
            "rooms_per_s": (books.done - done) / (now - at),
            "gb_per_s": (books.delivered_bytes - nbytes) / (now - at) / 1e9,
            "open": len(books.open),
            "done": books.done,
            "failed": books.failed,
            "causes": dict(books.causes),
            "unexpected": len(books.unexpected),
            "hung": len(books.hung),
            "corrupt": len(books.corrupt),
            "ring_ratio": sum(each["ring_used_bytes"] for each in usage) / ring if ring else None,
            "quarantined_bytes": sum(each["quarantined_bytes"] for each in usage),
            "faults": {name: what for name, (what, _) in self.chaos.now.items()},
        }

    def summary(self) -> dict[str, Any]:
        """Everything that was counted, and every finding."""
        books, plan = self.traffic.ledger, self.fleet.plan
        leaks = self.watch.leaks()
        struck: dict[str, int] = {}
        for counts in self.traffic.struck.values():
            for name, count in counts.items():
                struck[name] = struck.get(name, 0) + count
        served = sorted(each.served_s for each in self.chaos.restarts if each.served_s is not None)
        return {
            "seed": plan.seed,
            "transport": plan.transport,
            "seconds": time.monotonic() - self.began,
            "rooms": {
                "opened": books.opened,
                "done": books.done,
                "failed_expected": books.expected,
                "failed_unexpected": len(books.unexpected),
                "hung": len(books.hung),
            },
            "causes": dict(books.causes),
            "verified_bytes": books.verified_bytes,
            "corrupt": len(books.corrupt),
            "faults": {"injected": dict(self.chaos.injected), "struck": struck},
            "restarts": {
                "count": len(self.chaos.restarts),
                "cut_short": sum(each.served_s is None for each in self.chaos.restarts),
                "serving_s": {
                    "p50": served[len(served) // 2] if served else None,
                    "max": served[-1] if served else None,
                },
            },
            "starved_s": round(self.traffic.starved_s, 2),
            "leaks": leaks,
            "crashes": [{"rank": each.rank, **each.data} for each in self.traffic.unasked_deaths],
            "not_drained": self._not_drained or None,
            "findings": self._findings(),
            "evidence": self._evidence.saved,
            "ranks": [self._rank(name, leaks.get(name, [])) for name in self.fleet.ranks],
        }

    @property
    def sound(self) -> bool:
        """Nothing was found."""
        books = self.traffic.ledger
        found = books.hung, books.corrupt, books.unexpected, self.traffic.unasked_deaths, self.watch.leaks()
        return not any(found) and not self._not_drained

    def _findings(self) -> list[str]:
        books = self.traffic.ledger
        lines = [f"hung: {_told(room)}; still at {', '.join(sorted(room.hung))}" for room in books.hung]
        lines += [
            f"corrupt: {rank}: room {wrong['room']} {wrong['where']}: {wrong['found']} instead of {wrong['expected']}, "
            f"{wrong['hint']}"
            for rank, wrong, _ in books.corrupt
        ]
        lines += [f"unexpected: {_told(room)}" for room in books.unexpected]
        more = len(lines) - _SHOWN_FINDINGS
        return lines[:_SHOWN_FINDINGS] + ([f"and {more} more"] if more > 0 else [])

    def _rank(self, name: str, leaks: list[str]) -> dict[str, Any]:
        lives = self.watch.lives[name]
        served = [each.served_s for each in self.chaos.restarts if each.rank == name and each.served_s is not None]
        longest = max(lives, key=lambda life: len(life.rss), default=None)
        now = self.watch.now.get(name)
        return {
            "rank": name,
            "lives": self.fleet.ranks[name].lives,
            "slowest_ns": round(max(served) * 1e9) if served else None,
            "rss_bytes": now["rss_bytes"] if now else None,
            "slope": longest.slope if longest else None,
            "fds": now["fds"] if now else None,
            "fds_grown": longest.grown["fds"] if longest else None,
            "threads": now["threads"] if now else None,
            "threads_grown": longest.grown["threads"] if longest else None,
            "ring_used_bytes": now["ring_used_bytes"] if now else None,
            "quarantined_bytes": now["quarantined_bytes"] if now else None,
            "records": now["records"] if now else None,
            "starved_s": round(self.traffic.starved_s, 2),
            "leaks": leaks,
        }


def _told(room: Room) -> str:
    """A room's fate in a line."""
    cause = room.first_cause
    why = f"{cause['rank']}: {cause['text']} ({cause['code']})" if cause else "no cause given"
    ends = ", ".join(f"{name} {end.state}" for name, end in room.ends.items() if end.state != SUCCESS)
    took_s = (room.ended_ns - room.opened_ns) / 1e9
    return f"room {room.number} of {room.tokens} tokens, {took_s:.2f} s: {why}; {ends or 'nobody saw it fail'}"
