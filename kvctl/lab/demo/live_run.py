"""Runs traffic, faults and scenarios against a live fleet, and sums them up in a line per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from kvctl.lab.demo.fault_schedule import FaultRunner, ScheduledFault
from kvctl.lab.demo.fleet import LiveFleet
from kvctl.lab.demo.scenarios import Scenario, ScriptRunner
from kvctl.lab.demo.traffic import Traffic, TrafficOptions
from kvctl.lab.ranks.group import Event
from kvctl.lab.ranks.messages import Tell, Usage

LINE_INTERVAL_S = 1.0
_TURN_S = 0.05
_TOKEN = 0  # of these reports; `LiveFleet.usage` waits for reports with other tokens


class Run:
    """Traffic and faults on a fleet. `usage`: latest report of the resources of each running rank, by name."""

    def __init__(
        self,
        fleet: LiveFleet,
        options: TrafficOptions,
        faults: Sequence[ScheduledFault],
        everywhere: str = "",
        scenarios: Sequence[Scenario] = (),
        say: Callable[[Scenario | None, str], None] = lambda scenario, line: None,
    ) -> None:
        """Prepares the run; opens no rooms yet.

        Args:
            faults: schedule of faults, relative to now.
            everywhere: specs of faults that every rank has in force all the time; "" for none.
            say: function that gets the lines of each scenario, and with None those about ranks that ended.
        """
        self.fleet = fleet
        self.usage: dict[str, Usage] = {}
        self.traffic = Traffic(fleet, options, self.handle, self.turn)
        self.faults = FaultRunner(self.traffic, faults)
        self._everywhere = everywhere
        self._faulty: set[tuple[str, int]] = set()
        self._say = say
        taken = {*fleet.plan.odd_pages, *fleet.plan.odd_rings, *fleet.plan.absent}
        for each in scenarios:
            ScriptRunner(self.traffic, each.script, partial(say, each), taken)
        self.began = self._asked_at = time.monotonic()
        self._before = (self.began, 0, 0)

    def run(self, seconds: float, on_line: Callable[[dict[str, Any]], None]) -> None:
        """Runs traffic and faults for some seconds; `on_line` gets a row of the live view every second."""
        line_at = self.began + LINE_INTERVAL_S
        while time.monotonic() < self.began + seconds:
            self.traffic.run(_TURN_S)
            if time.monotonic() >= line_at:
                line_at += LINE_INTERVAL_S
                on_line(self.line())

    def turn(self) -> None:
        """Asks for usage reports once a second; called at the end of every turn of the traffic."""
        if time.monotonic() - self._asked_at >= LINE_INTERVAL_S:
            self._asked_at = time.monotonic()
            self.ask_usage()

    def ask_usage(self, sweep: bool = False) -> None:
        """Requests the usage of all serving ranks; the reports arrive as events. `sweep`: as in `Tell`."""
        for name, rank in self.fleet.ranks.items():
            if rank.serving:
                self.fleet.send(name, Tell(_TOKEN, sweep))

    def handle(self, event: Event) -> None:
        """Handles an event of the fleet after the traffic has done so."""
        if event.kind == "usage":
            self.usage[event.rank] = cast(Usage, event.data)
        elif event.kind == "died":
            self.usage.pop(event.rank, None)
        if self.traffic.crashes[-1:] == [event]:
            lines = event.data["output"].splitlines() or ["it printed nothing"]
            self._say(None, f"{event.rank} ended with status {event.data['returncode']}: {lines[-1]}")
        life = (event.rank, self.fleet.ranks[event.rank].lives)
        if self._everywhere and event.kind == "serving" and life not in self._faulty:
            self._faulty.add(life)
            self.traffic.fault(event.rank, self._everywhere, 1e9)

    def line(self) -> dict[str, Any]:
        """Returns a row of the live view: totals, and rates since the previous call."""
        accounting, now = self.traffic.accounting, time.monotonic()
        at, done, nbytes = self._before
        self._before = (now, accounting.done, accounting.delivered_bytes)
        ring = sum(each["ring_bytes"] for each in self.usage.values())
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
            "ring_ratio": sum(each["ring_used_bytes"] for each in self.usage.values()) / ring if ring else None,
            "quarantined_bytes": sum(each["quarantined_bytes"] for each in self.usage.values()),
            "faults": self.faults.now,
        }
