"""Compares the transfer times that `kvctl peers cost` predicts with those that prompts then take.

A fleet of rank processes on this machine transfers prompts of random sizes in random order, one at a time or a few at
once. Just before each prompt the fleet is asked for the cost of that pair and size. Its transfer is measured as bench
measures it: from the last end of its forward on a prefill rank until the last decode rank has all of it.

    python benchmarks/cost_accuracy.py
    python benchmarks/cost_accuracy.py --fleet tp4-dp4 --in-flight 4 --prompts 200 --save FILE

Printed are, for the prompts after the first `--skip`, the share within 25 % of the prediction, and the median and the
90th percentile of the relative error |measured / predicted - 1|, of three predictions:

- now: alone, and behind the rooms in transfer. They have gone on for the time between question and begin of the
  transfer, for which the median of the prompts before is taken: a router knows how long prefill takes.
- alone: as if no other room were in transfer.
- fit: by a fit to the measured prompts themselves, afterwards; no prediction by the size alone is much better.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl.lab.bench.statistics import percentile
from kvctl.lab.demo.fleet import CALM_TIMINGS, FleetPlan, LiveFleet
from kvctl.lab.ranks.messages import Open, Room
from kvctl.lab.ranks.request import Sizes
from kvctl.render.transfer_costs import RankCost, cost_rows
from kvctl_agent.observer.transfer_times import Transferred, fit_transfers

FLEETS = {
    "tp1-tp1": ((Sizes(),), Sizes()),
    "tp4-dp4": ((Sizes(tp=4),), Sizes(dp=4)),
    "2xtp1-dp2": ((Sizes(), Sizes()), Sizes(dp=2)),
}
SHORTEST, LONGEST = 16, 16384
GOAL = 0.25
TIMEOUT_S = 60.0
HOUR_NS = 3_600_000_000_000


@dataclass
class Prompt:
    """One prompt: what was predicted, and wall clock times, among them begin and end of its transfer; all in ns."""

    room: int
    tokens: int
    instance: int
    decode_dp: int
    predicted: int | None = None
    alone: int | None = None
    basis: str | None = None
    asked: int = 0
    began: int = 0
    ended: int = 0

    @property
    def measured(self) -> int:
        return self.ended - self.began


class Run:
    """Prompts of one fleet.

    Args:
        name: one of `FLEETS`.
        in_flight: number of prompts at once.
    """

    def __init__(self, name: str, in_flight: int, prompts: int, transport: str, path: str, seed: int) -> None:
        prefill, decode = FLEETS[name]
        source = random.Random(seed)
        self.in_flight = in_flight
        self.prompts = [
            Prompt(
                room=number,
                tokens=round(SHORTEST * exp(source.random() * log(LONGEST / SHORTEST))),
                instance=source.randrange(len(prefill)),
                decode_dp=source.randrange(decode.dp),
            )
            for number in range(1000, 1000 + prompts)
        ]
        config = {**CALM_TIMINGS, "history_rooms": prompts, "path": path}
        self.plan = FleetPlan(
            prefill=prefill,
            decode=decode,
            transport=transport,
            tokens=(SHORTEST, LONGEST),
            concurrency=max(2, in_flight),
            chunk_tokens=8192,
            layers=8,
            ring_mb=256,
            config=config,
            verify=False,
        )

    def run(self) -> None:
        with LiveFleet(self.plan) as fleet:
            fleet.start()
            names = [*fleet.ranks]
            with Fleet(names, {}, round(TIMEOUT_S * 1e9), discovery_ns=HOUR_NS) as agents:
                self._transfer(fleet, agents)
                self._measure(agents)

    def _transfer(self, fleet: LiveFleet, agents: Fleet) -> None:
        waiting, held = list(reversed(self.prompts)), dict[int, set[str]]()
        deadline = time.monotonic() + TIMEOUT_S
        while waiting or held:
            while waiting and len(held) < self.in_flight:
                prompt = waiting.pop()
                self._ask(agents, prompt)
                held[prompt.room] = self._open(fleet, prompt)
                deadline = time.monotonic() + TIMEOUT_S
            for event in fleet.poll(0.05):
                if event.kind == "ended" and event.data["state"] != "Success":
                    raise SystemExit(f"room {event.data['room']} failed on {event.rank}: {event.data['cause']}")
                if event.kind == "released":
                    holders = held[event.data["room"]]
                    holders.discard(event.rank)
                    if not holders:
                        del held[event.data["room"]]
            if time.monotonic() > deadline:
                raise SystemExit(f"no prompt has ended for {TIMEOUT_S:g} s; open: {sorted(held)}")

    def _ask(self, agents: Fleet, prompt: Prompt) -> None:
        survey = agents.survey((Call("status"), Call("cost", {"tokens": prompt.tokens})))
        prompt.asked = time.time_ns()
        ranks = [RankCost(agent.name, agent.data["status"], cost) for agent, cost in survey.answers("cost")]
        several = len(self.plan.prefill) > 1
        for row in cost_rows(ranks, prompt.tokens):
            cost = row["ranks"][0]
            ours = not several or cost["agent"].removeprefix(self._prefix(ranks)).startswith(f"p{prompt.instance}-")
            if ours and cost["rank"] is not None and cost["rank"]["dp"] == prompt.decode_dp:
                prompt.predicted, prompt.alone = row["predicted_ns"], row["alone_ns"]
                prompt.basis = row["basis"]

    @staticmethod
    def _prefix(ranks: Sequence[RankCost]) -> str:
        """Returns what precedes the ranks' names if other fleets run on this machine."""
        name = min((rank.name for rank in ranks if "decode-" in rank.name), default="")
        return name[: name.find("decode-")] if name else ""

    def _open(self, fleet: LiveFleet, prompt: Prompt) -> set[str]:
        room = Room(prompt.room, prompt.room, prompt.tokens, 0, prompt.decode_dp, prompt.instance)
        holders = set()
        for name, rank in fleet.ranks.items():
            planned = rank.planned
            if planned["dp"] == room.decode_dp if planned["role"] == "decode" else planned["instance"] == room.instance:
                fleet.send(name, Open(room))
                holders.add(name)
        return holders

    def _measure(self, agents: Fleet) -> None:
        began, ended = dict[int, int](), dict[int, int]()
        deadline = time.monotonic() + TIMEOUT_S
        while len(began.keys() & ended.keys()) < len(self.prompts):
            if time.monotonic() > deadline:
                raise SystemExit(f"the agents' histories were not complete within {TIMEOUT_S:g} s")
            for agent, rows in agents.survey((Call("history", {"limit": len(self.prompts)}),)).answers("history"):
                for row in rows:
                    room = int(row["room"])
                    if agent.hello["role"] == "decode":
                        ended[room] = max(row["finished_at_ns"], ended.get(room, 0))
                    else:
                        began[room] = max(row["forward_done_at_ns"], began.get(room, 0))
        for prompt in self.prompts:
            prompt.began, prompt.ended = began[prompt.room], ended[prompt.room]

    def errors(self, which: str, skip: int) -> list[float]:
        """Returns the ascending relative errors of a prediction, "now", "alone" or "fit"."""
        pairs: dict[tuple[int, int], list[Transferred]] = {}
        for prompt in self.prompts:
            done = Transferred(prompt.tokens, prompt.measured, 0, "")
            pairs.setdefault((prompt.instance, prompt.decode_dp), []).append(done)
        fits = {pair: fit_transfers(done) for pair, done in pairs.items()}
        found = []
        for index, prompt in enumerate(self.prompts[skip:], skip):
            if prompt.alone is None or prompt.predicted is None:
                continue
            expected: float = prompt.alone
            if which == "now":
                lead = median(each.began - each.asked for each in self.prompts[:index])
                expected += max(0.0, prompt.predicted - prompt.alone - lead)
            elif which == "fit":
                expected = fits[prompt.instance, prompt.decode_dp].alone_ns(prompt.tokens)
            found.append(abs(prompt.measured / expected - 1))
        return sorted(found)


def summary(errors: Sequence[float]) -> Mapping[str, float]:
    """Returns the number of prompts, the share within the goal, and the median and 90th percentile of the errors."""
    within = sum(each <= GOAL for each in errors) / len(errors)
    return {"prompts": len(errors), "within": within, "p50": percentile(errors, 0.5), "p90": percentile(errors, 0.9)}


def main() -> None:
    parser = argparse.ArgumentParser(description="How right the transfer times of kvctl peers cost are")
    parser.add_argument("--fleet", choices=FLEETS, action="append", help="default: all of them")
    parser.add_argument("--in-flight", type=int, action="append", help="prompts at once; default: 1 and 4")
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--skip", type=int, default=30, help="first prompts, which only the fit learns from")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--path", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    saved: list[dict[str, Any]] = []
    heading = f"{'fleet':<12}{'in flight':>10}{'prediction':>12}{'prompts':>9}{'in 25 %':>9}{'p50':>7}{'p90':>7}"
    print(heading + f"{'load':>12}")
    for name in options.fleet or FLEETS:
        for in_flight in options.in_flight or (1, 4):
            run = Run(name, in_flight, options.prompts, options.transport, options.path, options.seed)
            load = os.getloadavg()[0]
            run.run()
            for which in ("now", "alone", "fit"):
                figures = summary(run.errors(which, options.skip))
                print(
                    f"{name:<12}{in_flight:>10}{which:>12}{figures['prompts']:>9}{figures['within']:>9.0%}"
                    f"{figures['p50']:>7.0%}{figures['p90']:>7.0%}{load:>6.1f}→{os.getloadavg()[0]:<5.1f}",
                    flush=True,
                )
                saved.append({"fleet": name, "in_flight": in_flight, "prediction": which, **figures})
            saved.append({"fleet": name, "in_flight": in_flight, "rooms": [asdict(each) for each in run.prompts]})
    if options.save:
        options.save.write_text(json.dumps(saved))


if __name__ == "__main__":
    main()
