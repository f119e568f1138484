"""`python -m tests.support.soak.run`: traffic and random faults against a live fleet, which is drained in the end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvctl.client.fleet import Fleet
from kvctl.client.recorder import Series, save_recording
from kvctl.errors import CliError
from kvctl.lab.demo.fault_schedule import ScheduledFault
from kvctl.lab.demo.fleet import FleetPlan, LiveFleet
from kvctl.lab.demo.live_run import Run
from kvctl.lab.demo.room_accounting import SUCCESS, LiveRoom
from kvctl.lab.demo.traffic import DeadlineMissed, TrafficOptions
from kvctl.lab.ranks.group import Event, FleetError
from kvctl.lab.ranks.request import Sizes, parse_instances
from tests.support.soak.leaks import ProcessHistory, held
from tests.support.soak.schedule import draw_schedule

_ABORTS = 0.05
_SWEEP_INTERVAL_S = 20.0  # every rank then searches its free pages for stray writes
_SERVE_S = 60.0
_ANSWER_NS = 1_000_000_000  # the traffic stands still meanwhile
_MAX_RECORDINGS = 3


class Soak(Run):
    """A run whose resources are watched, and which ends with a verdict.

    Attributes:
        saved: paths of the recordings of all agents, saved when findings are seen: agents keep their latest rooms only.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        options: TrafficOptions,
        faults: Sequence[ScheduledFault],
        everywhere: str = "",
        evidence: Path | None = None,
    ) -> None:
        """Prepares the run as `Run` does; `evidence` is the directory of the recordings."""
        self._histories: dict[tuple[str, str], ProcessHistory] = {}
        self._served_s: dict[tuple[str, int], float] = {}
        self._evidence = evidence
        self._findings_seen = 0
        self._swept_at = time.monotonic()
        self._not_drained = ""
        self.saved: list[str] = []
        super().__init__(fleet, options, faults, everywhere)

    def turn(self) -> None:
        super().turn()
        for name, at_ns in self.traffic.first_success_ns.items():
            rank = self.fleet.ranks[name]
            if rank.serving_ns and at_ns > rank.started_ns:
                self._served_s.setdefault((name, rank.lives), (at_ns - rank.started_ns) / 1e9)
        books = self.traffic.accounting
        count = len(books.hung) + len(books.corrupt) + len(books.unexpected)
        if count > self._findings_seen:
            self._findings_seen = count
            if self._evidence is not None and len(self.saved) < _MAX_RECORDINGS:
                self._record(self._evidence / f"finding-{count}.kvrec")

    def ask_usage(self, sweep: bool = False) -> None:
        if time.monotonic() - self._swept_at >= _SWEEP_INTERVAL_S:
            self._swept_at, sweep = time.monotonic(), True
        super().ask_usage(sweep)

    def handle(self, event: Event) -> None:
        super().handle(event)
        if event.kind == "usage":
            usage = self.usage[event.rank]
            process = event.rank, self.fleet.ranks[event.rank].incarnation
            self._histories.setdefault(process, ProcessHistory(usage)).add(usage)

    def drain(self) -> None:
        """Ends all faults and waits until all ranks serve and no rank holds resources of any room.

        Finally, all ranks search their free pages for stray writes. If one of the waits times out, the summary says so
        and the run is not sound.
        """
        self.faults.end()
        patience_s, ranks = self.fleet.plan.patience_s, self.fleet.ranks
        try:
            # Rooms are opened until then: a restarted rank must also show that it can serve a room.
            self.traffic.until(
                lambda: all(r.serving and (r.lives == 1 or (n, r.lives) in self._served_s) for n, r in ranks.items()),
                _SERVE_S,
                "every rank serves again, and every restarted one has served a room",
            )
            self.traffic.drain(patience_s)
            drained_ns = time.monotonic_ns()
            self.traffic.until(lambda: self._clean(drained_ns), patience_s, "nothing of any room is left", quiet=True)
        except DeadlineMissed as missed:
            self._not_drained = str(missed)
        with suppress(FleetError):
            for name, usage in self.fleet.usage(sweep=True).items():
                self.usage[name] = usage
                for stray in usage["strays"]:
                    self.traffic.accounting.stray(name, stray, usage["at_ns"])

    def leaks(self) -> dict[str, list[str]]:
        """Returns descriptions of leaked resources by rank name; call it when all rooms are over."""
        found = {name: held(usage) for name, usage in self.usage.items()}
        for (name, _), history in self._histories.items():
            found.setdefault(name, []).extend(history.leaks)
        return {name: words for name, words in found.items() if words}

    def findings(self) -> list[str]:
        """Returns a line for each hang, corruption, unexplained failure, crash and leak, and if it did not drain."""
        books = self.traffic.accounting
        lines = [f"hung: {_describe(room)}; still at {', '.join(sorted(room.hung))}" for room in books.hung]
        lines += [f"corrupt: {each.rank}: {dict(each.mismatch)}" for each in books.corrupt]
        lines += [f"unexpected: {_describe(room)}" for room in books.unexpected]
        for crash in self.traffic.crashes:
            lines.append(f"crash: {crash.rank}, status {crash.data['returncode']}: {crash.data['output']}")
        lines += [f"leak: {name}: {', '.join(words)}" for name, words in self.leaks().items()]
        return lines + ([f"not drained: {self._not_drained}"] if self._not_drained else [])

    def summary(self) -> dict[str, Any]:
        """Returns the counts of the run, and its findings; it is sound if there are none."""
        books, plan = self.traffic.accounting, self.fleet.plan
        fired: Counter[str] = Counter()
        for counts in self.traffic.fired.values():
            fired.update(counts)
        restarts = sum(rank.lives - 1 for rank in self.fleet.ranks.values())
        served = sorted(s for (_, life), s in self._served_s.items() if life > 1)
        return {
            "seed": plan.seed,
            "transport": plan.transport,
            "seconds": round(time.monotonic() - self.began, 1),
            "rooms": {"opened": books.opened, "done": books.done, "failed_expected": books.expected},
            "causes": dict(books.causes),
            "verified_bytes": books.verified_bytes,
            "faults": {"injected": dict(self.faults.injected), "struck": dict(fired)},
            "restarts": {"count": restarts, "cut_short": restarts - len(served), "slowest_s": served[-1:]},
            "starved_s": round(self.traffic.starved_s, 2),
            "findings": self.findings(),
            "evidence": self.saved,
        }

    def _clean(self, since_ns: int) -> bool:
        """Whether no rank holds resources of any room, according to reports of all ranks that are newer than this."""
        reports = self.usage
        return all(
            name in reports and reports[name]["at_ns"] > since_ns and not held(reports[name])
            for name in self.fleet.ranks
        )

    def _record(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with Fleet(list(self.fleet.ranks), {}, _ANSWER_NS) as fleet:
                save_recording(fleet, path, Series(0, 0, lambda moments, nbytes, left_ns: None))
            self.saved.append(str(path))
        except (OSError, CliError) as error:  # a full disk must not end the run
            self.saved.append(f"not saved: {error}")


def _describe(room: LiveRoom) -> str:
    cause = room.first_cause
    why = f"{cause['rank']}: {cause['text']} ({cause['code']})" if cause else "no cause given"
    ends = ", ".join(f"{name} {end['state']}" for name, end in room.ends.items() if end["state"] != SUCCESS)
    took_s = (room.ended_ns - room.opened_ns) / 1e9
    return f"room {room.number} of {room.tokens} tokens, {took_s:.2f} s: {why}; {ends or 'no rank saw it fail'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a soak and prints its summary as JSON; the exit status is 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--prefill-instances", type=parse_instances, default=(Sizes(tp=2), Sizes()))
    parser.add_argument("--decode-dp", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="rooms a second, in bursts; 0: 16 at all times")
    parser.add_argument(
        "--fault", default="", help="faults in force all the time in place of random ones, as of kvctl demo"
    )
    parser.add_argument("--evidence", type=Path)
    given = parser.parse_args(arguments)
    plan = FleetPlan(given.prefill_instances, Sizes(dp=given.decode_dp), given.transport, given.seed)
    with LiveFleet(plan) as fleet:
        fleet.start()
        ranks = {name: rank.planned for name, rank in fleet.ranks.items()}
        schedule = [] if given.fault else draw_schedule(given.seed, given.minutes * 60, ranks)
        options = TrafficOptions(given.rate, given.rate > 0, _ABORTS)
        soak = Soak(fleet, options, schedule, given.fault, given.evidence)
        soak.run(given.minutes * 60, lambda row: print(json.dumps(row), file=sys.stderr))
        soak.drain()
        summary = soak.summary()
    print(json.dumps(summary, indent=2))
    return 1 if summary["findings"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the ranks as Ctrl-C does
    sys.exit(main())
