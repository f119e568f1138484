"""Runs traffic and faults against a live fleet, saves artifacts of findings, drains the fleet and sums up results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.client.recorder import Series, save_recording
from kvctl.client.room_timeline import join
from kvctl.errors import CliError
from kvctl.lab.demo.fault_schedule import FaultRunner, ScheduledFault
from kvctl.lab.demo.fleet import LiveFleet
from kvctl.lab.demo.leak_watch import LeakWatch
from kvctl.lab.demo.room_accounting import SUCCESS, LiveRoom, RoomAccounting
from kvctl.lab.demo.scenarios import Scenario, ScriptRunner
from kvctl.lab.demo.traffic import DeadlineMissed, Traffic, TrafficOptions
from kvctl.lab.ranks.group import Event, FleetError

LINE_INTERVAL_S = 1.0
_MAX_SHOWN_FINDINGS = 20
_SERVE_S = 60.0
_TURN_S = 0.05
# The traffic stands still while this process waits for the answer of a rank, which may be paused.
_ANSWER_NS = 1_000_000_000
_MAX_SAVED_FINDINGS = 3


class Artifacts:
    """Saves files about findings: the room as every rank sees it, and a recording of all agents.

    The files are saved as soon as a finding is seen, because agents keep only their latest events and rooms.

    Attributes:
        saved: paths of the saved files, and error messages.
    """

    def __init__(self, directory: Path | None, ranks: Sequence[str]) -> None:
        """Creates the directory now, so that an error appears before the run and not at the first finding.

        Args:
            directory: directory for the files; None: saves nothing.
            ranks: names of all ranks.

        Raises:
            OSError: the directory cannot be created.
        """
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ranks = list(ranks)
        self._count = 0
        self.saved: list[str] = []

    def save_new(self, accounting: RoomAccounting) -> None:
        """Saves files about the latest findings if there are new ones, up to `_MAX_SAVED_FINDINGS` in all."""
        count = len(accounting.hung) + len(accounting.corrupt) + len(accounting.unexpected)
        if count == self._count:
            return
        first, self._count = self._count == 0, count
        if self._directory is None or not (first or count <= _MAX_SAVED_FINDINGS):
            return
        rooms = [*accounting.hung, *accounting.unexpected]
        numbers = [room.number for room in rooms[-1:]] + [each.mismatch["room"] for each in accounting.corrupt[-1:]]
        try:
            with Fleet(self._ranks, {}, _ANSWER_NS) as fleet:
                for number in numbers:
                    self._save_room(fleet, self._directory, number, accounting.rooms.get(number))
                path = self._directory / f"finding-{count}.kvrec"
                save_recording(fleet, path, Series(0, 0, lambda moments, nbytes, left_ns: None))
                self.saved.append(str(path))
        except (OSError, CliError) as error:  # a full disk must not end the run
            self.saved.append(f"not saved: {error}")

    def _save_room(self, fleet: Fleet, directory: Path, number: int, room: LiveRoom | None) -> None:
        """Saves a room as JSON: the data of `kvctl rooms show`, and the state of the room in the accounting."""
        survey = fleet.survey([Call("room", {"room": str(number)})])
        details = [detail for _, data in survey.answers("room") for detail in data]
        joined = join(details, {agent.name: agent.clock for agent in survey.agents})
        path = directory / f"room-{number}.json"
        document = {"books": room, "joined": joined, "faults": survey.faults}
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2, default=list) + b"\n")
        self.saved.append(str(path))


class Soak:
    """Runs traffic and faults against a fleet and collects the results.

    Attributes:
        traffic: opens the rooms and has their results.
        watch: collects the resource usage of the ranks.
        faults: executes the fault schedule.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        options: TrafficOptions,
        faults: Sequence[ScheduledFault],
        everywhere: str = "",
        evidence: Path | None = None,
        scenarios: Sequence[Scenario] = (),
        say: Callable[[Scenario | None, str], None] = lambda scenario, line: None,
    ) -> None:
        """Prepares the run; opens no rooms yet.

        Args:
            fleet: a fleet that has been started.
            options: arrival of the rooms.
            faults: schedule of faults, relative to now.
            everywhere: specs of faults that every rank has in force all the time; "" for none.
            evidence: directory for artifacts of findings; None: saves none.
            scenarios: scenarios whose scripts are run.
            say: function that gets the lines of each scenario, and with None those about ranks that ended.
        """
        self.fleet = fleet
        self.watch = LeakWatch(fleet)
        self.traffic = Traffic(fleet, options, self._handle, self._turn)
        self._everywhere = everywhere
        self._faulty: set[tuple[str, int]] = set()
        self.faults = FaultRunner(self.traffic, faults)
        self._say = say
        taken = {*fleet.plan.odd_pages, *fleet.plan.odd_rings, *fleet.plan.absent}
        self._scripts = [ScriptRunner(self.traffic, each.script, partial(say, each), taken) for each in scenarios]
        self._artifacts = Artifacts(evidence, list(fleet.ranks))
        self.began = time.monotonic()
        self._before = (self.began, 0, 0)
        self._not_drained = ""

    def run(self, seconds: float | None, on_line: Callable[[dict[str, Any]], None]) -> None:
        """Runs traffic and faults.

        Args:
            seconds: duration of the run; None: until KeyboardInterrupt.
            on_line: callback that gets a row of the live view every second.
        """
        deadline = None if seconds is None else self.began + seconds
        line_at = self.began + LINE_INTERVAL_S
        while deadline is None or time.monotonic() < deadline:
            self.traffic.run(_TURN_S)
            if time.monotonic() >= line_at:
                line_at += LINE_INTERVAL_S
                on_line(self.line())

    def drain(self) -> None:
        """Ends all faults and waits until all ranks serve and no rank holds resources of any room.

        Finally, all ranks search their free pages for stray writes. If one of the waits times out, the
        summary says so and the run is not sound.
        """
        self.faults.end()
        for script in self._scripts:
            script.end()
        ranks = self.fleet.ranks.values()
        try:
            # Rooms are opened until then: a restarted rank must also show that it can serve a room.
            self.traffic.until(
                lambda: all(rank.serving for rank in ranks) and self.faults.recovered,
                _SERVE_S,
                "every rank serves again, and every restarted one has served a room",
            )
            self.traffic.drain(self.fleet.plan.patience_s)
            drained_ns = time.monotonic_ns()
            self.traffic.until(
                lambda: self._clean(drained_ns), self.fleet.plan.patience_s, "nothing of any room is left", quiet=True
            )
        except DeadlineMissed as missed:
            self._not_drained = str(missed)
        with suppress(FleetError):
            for name, usage in self.fleet.usage(sweep=True).items():
                self.watch.add(name, usage)
                for stray in usage["strays"]:
                    self.traffic.accounting.stray(name, stray, usage["at_ns"])

    def _turn(self) -> None:
        self.faults.turn()
        self.watch.turn()
        self._artifacts.save_new(self.traffic.accounting)

    def _clean(self, since_ns: int) -> bool:
        """Whether no rank holds resources of any room, according to reports of all ranks that are newer than this."""
        reports = self.watch.now
        fresh = all(name in reports and reports[name]["at_ns"] > since_ns for name in self.fleet.ranks)
        return fresh and self.watch.clean

    def _handle(self, event: Event) -> None:
        self.watch.take(event)
        if self.traffic.crashes[-1:] == [event]:
            lines = event.data["output"].splitlines() or ["it printed nothing"]
            self._say(None, f"{event.rank} ended with status {event.data['returncode']}: {lines[-1]}")
        rank = self.fleet.ranks[event.rank]
        life = (event.rank, rank.lives)
        if self._everywhere and event.kind == "serving" and life not in self._faulty:
            self._faulty.add(life)
            self.traffic.fault(event.rank, self._everywhere, 1e9)

    # ---- results ----------------------------------------------------------------------------------------------------

    def line(self) -> dict[str, Any]:
        """Returns a row of the live view: totals, and rates since the previous call."""
        accounting, now = self.traffic.accounting, time.monotonic()
        at, done, nbytes = self._before
        self._before = (now, accounting.done, accounting.delivered_bytes)
        usage = self.watch.now.values()
        ring = sum(each["ring_bytes"] for each in usage)
        return {
            "elapsed_ns": round((now - self.began) * 1e9),
            "rooms_per_s": (accounting.done - done) / (now - at),
            "gb_per_s": (accounting.delivered_bytes - nbytes) / (now - at) / 1e9,
            "open": len(accounting.open),
            "done": accounting.done,
            "failed": accounting.failed,
            "causes": dict(accounting.causes),
            "unexpected": len(accounting.unexpected),
            "hung": len(accounting.hung),
            "corrupt": len(accounting.corrupt),
            "ring_ratio": sum(each["ring_used_bytes"] for each in usage) / ring if ring else None,
            "quarantined_bytes": sum(each["quarantined_bytes"] for each in usage),
            "faults": {name: what for name, (what, _) in self.faults.now.items()},
        }

    def summary(self) -> dict[str, Any]:
        """Returns the results of the run: all counts, the findings, and one row per rank."""
        accounting, plan = self.traffic.accounting, self.fleet.plan
        leaks = self.watch.leaks()
        fired: dict[str, int] = {}
        for counts in self.traffic.fired.values():
            for name, count in counts.items():
                fired[name] = fired.get(name, 0) + count
        restarts = self.faults.restarts
        served = sorted(each.served_s for each in restarts if each.served_s is not None)
        return {
            "seed": plan.seed,
            "transport": plan.transport,
            "seconds": time.monotonic() - self.began,
            "rooms": {
                "opened": accounting.opened,
                "done": accounting.done,
                "failed_expected": accounting.expected,
                "failed_unexpected": len(accounting.unexpected),
                "hung": len(accounting.hung),
            },
            "causes": dict(accounting.causes),
            "verified_bytes": accounting.verified_bytes,
            "corrupt": len(accounting.corrupt),
            "faults": {"injected": dict(self.faults.injected), "struck": fired},
            "restarts": {
                "count": len(restarts),
                "cut_short": sum(each.served_s is None for each in restarts),
                "serving_s": {
                    "p50": served[len(served) // 2] if served else None,
                    "max": served[-1] if served else None,
                },
            },
            "starved_s": round(self.traffic.starved_s, 2),
            "leaks": leaks,
            "crashes": [
                {"rank": each.rank, "returncode": each.data["returncode"], "words": each.data["output"]}
                for each in self.traffic.crashes
            ],
            "not_drained": self._not_drained or None,
            "findings": self._findings(),
            "evidence": self._artifacts.saved,
            "ranks": [self._rank(name, leaks.get(name, [])) for name in self.fleet.ranks],
        }

    @property
    def sound(self) -> bool:
        """Whether the run has no findings: no hang, corruption, unexplained failure, crash or leak, and it drained."""
        accounting = self.traffic.accounting
        found = (
            accounting.hung,
            accounting.corrupt,
            accounting.unexpected,
            self.traffic.crashes,
            self.watch.leaks(),
        )
        return not any(found) and not self._not_drained

    def _findings(self) -> list[str]:
        accounting = self.traffic.accounting
        lines = [f"hung: {_describe(room)}; still at {', '.join(sorted(room.hung))}" for room in accounting.hung]
        lines += [
            f"corrupt: {rank}: room {wrong['room']} {wrong['where']}: {wrong['found']} instead of {wrong['expected']}, "
            f"{wrong['hint']}"
            for rank, wrong, _ in accounting.corrupt
        ]
        lines += [f"unexpected: {_describe(room)}" for room in accounting.unexpected]
        more = len(lines) - _MAX_SHOWN_FINDINGS
        return lines[:_MAX_SHOWN_FINDINGS] + ([f"and {more} more"] if more > 0 else [])

    def _rank(self, name: str, leaks: list[str]) -> dict[str, Any]:
        lives = self.watch.lives[name]
        served = [each.served_s for each in self.faults.restarts if each.rank == name and each.served_s is not None]
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


def _describe(room: LiveRoom) -> str:
    """Describes the result of a room in one line."""
    cause = room.first_cause
    why = f"{cause['rank']}: {cause['text']} ({cause['code']})" if cause else "no cause given"
    ends = ", ".join(f"{name} {end['state']}" for name, end in room.ends.items() if end["state"] != SUCCESS)
    took_s = (room.ended_ns - room.opened_ns) / 1e9
    return f"room {room.number} of {room.tokens} tokens, {took_s:.2f} s: {why}; {ends or 'no rank saw it fail'}"
