"""Command line of the explorer, which prints the number of states of each configuration: see `make explore`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.explore.configurations import LARGE, SMALL, Configuration
from tests.explore.explorer.search import Bounds, Explored
from tests.support.protocol.invariants import Broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore; exit code 0: no violation; 1: a violation, whose history is printed."""
    parser = argparse.ArgumentParser(description="Explore the protocol's machines, breadth first.")
    parser.add_argument(
        "--small", action="store_true", help="the configurations of the tests instead of the large ones"
    )
    parser.add_argument("--states", type=int, default=1_000_000, help="bound for each configuration")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="bound for all of them together")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    configurations = SMALL if given.small else LARGE
    seconds = 60 * given.minutes * given.processes / len(configurations)
    begun = time.monotonic()
    states = failed = 0
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        runs = {
            configuration.name: pool.submit(_run, configuration, given.states, seconds)
            for configuration in configurations
        }
        for name, run in runs.items():
            try:
                found = run.result()
            except Broken as broken:
                failed += 1
                print(f"BROKEN {broken}", flush=True)
                continue
            states += found.states
            print(f"{name:<52} {found}", flush=True)
    print(f"{states:,} states in {time.monotonic() - begun:.0f} s, {failed} broken")
    return 1 if failed else 0


def _run(configuration: Configuration, states: int, seconds: float) -> Explored:
    return configuration.explore(Bounds(states, seconds, partial(_say, configuration.name)))


def _say(name: str, progress: str) -> None:
    print(f"  {name}: {progress}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
