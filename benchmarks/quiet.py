"""Checks that no health code is raised for a healthy fleet that is as busy as this machine allows.

A fleet of `kvctl demo` with default timeouts is checked every two seconds with the queries of `kvctl doctor`. Every
finding is a false alarm and makes the exit status 1, unless this machine was starved at that time: this process then
had no processor for most of a second, or waited long for one at every turn, as the ranks did.

    python benchmarks/quiet.py --minutes 10
    python benchmarks/quiet.py --minutes 1 --transport mooncake --rate 20
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.client.fleet import Fleet
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.health.codes import CODES
from kvctl.health.engine import examine
from kvctl.health.finding import Finding
from kvctl.health.snapshot import Snapshot
from kvctl.lab.demo.fleet import CALM_TIMINGS, FleetPlan, LiveFleet
from kvctl.lab.demo.traffic import Traffic, TrafficOptions

LOOK_EVERY_S = 2.0
ANSWER_NS = 2_000_000_000
DRAIN_S = 120.0
WARM_S = 5.0  # the first rooms include measurements of the lanes
BUSY_S = 0.02  # ten threads of this fleet on two cores wait a third of this


class Onlooker(threading.Thread):
    """Thread that checks the fleet repeatedly, as an operator in another terminal would.

    Attributes:
        looks: number of checks.
        alarms: first finding of each code and subject.
        excused: number of findings by code while this machine was starved.
    """

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(name="onlooker")
        self.looks = 0
        self.alarms: dict[tuple[str, str], Finding] = {}
        self.excused: Counter[str] = Counter()
        self._traffic = traffic
        self._waited = _waited()
        self._over = threading.Event()
        self._began = time.monotonic()

    def run(self) -> None:
        before, starved_s, excused_until = None, 0.0, 0.0
        names = list(self._traffic.fleet.ranks)
        self._over.wait(WARM_S)
        while not self._over.wait(LOOK_EVERY_S):
            with Fleet(names, {}, ANSWER_NS) as fleet:
                now = Snapshot(fleet.survey(HEALTH_CALLS), time.monotonic_ns(), before)
            if self._traffic.starved_s > starved_s or self._turn_s() > BUSY_S:
                starved_s = self._traffic.starved_s
                excused_until = time.monotonic() + self._traffic.fleet.plan.timings["lost_s"]
            self.looks += 1
            for finding in examine(now, CODES):
                if time.monotonic() < excused_until:
                    self.excused[finding.code] += 1
                elif (finding.code, finding.subject) not in self.alarms:
                    self.alarms[finding.code, finding.subject] = finding
                    at_s = time.monotonic() - self._began
                    print(f"{at_s:6.1f} s  {finding.severity.label}  {finding.code}  {finding.subject}", flush=True)
                    print(f"          {finding.cause}\n          {dict(finding.evidence)}", flush=True)
            before = now

    def _turn_s(self) -> float:
        """Returns the mean wait of the main thread for a processor since the last call, in seconds.

        The main thread opens the rooms.
        """
        before, self._waited = self._waited, _waited()
        turns = self._waited[1] - before[1]
        return (self._waited[0] - before[0]) / turns if turns else 0.0

    def end(self) -> None:
        """Stops the checks and waits until the thread has ended."""
        self._over.set()
        self.join()


def _waited() -> tuple[float, int]:
    """Returns how long the main thread has waited for a processor, in seconds, and how often.

    Returns zeros if the kernel does not report them.
    """
    try:
        _, waited_ns, turns = map(int, Path("/proc/self/schedstat").read_text().split())
    except (OSError, ValueError):
        return 0.0, 0
    return waited_ns / 1e9, turns


def main() -> int:
    """Runs the check; returns 1 if a code was raised, a room failed unexpectedly, or nothing was checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--concurrency", type=int, default=16, help="rooms in flight")
    parser.add_argument("--rate", type=float, default=0.0, help="rooms a second, in bursts, in place of as many as fit")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    plan = FleetPlan(
        transport=options.transport, seed=options.seed, concurrency=options.concurrency, config=CALM_TIMINGS
    )
    with LiveFleet(plan) as fleet:
        fleet.start()
        traffic = Traffic(fleet, TrafficOptions(rate=options.rate, bursty=options.rate > 0))
        onlooker = Onlooker(traffic)
        onlooker.start()
        try:
            traffic.run(options.minutes * 60)
        finally:
            onlooker.end()
        traffic.drain(DRAIN_S)
    books = traffic.accounting
    excused = ", ".join(f"{code} {count}" for code, count in onlooker.excused.items())
    print(
        f"{books.done} rooms, {books.failed} failed; {onlooker.looks} looks by {len(CODES)} codes; "
        f"{len(onlooker.alarms)} false alarms; {traffic.starved_s:.1f} s without a processor"
        + (f", which excuses {excused}" if excused else "")
    )
    return 1 if onlooker.alarms or books.unexpected or not onlooker.looks else 0


if __name__ == "__main__":
    sys.exit(main())
