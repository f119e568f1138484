"""Checks that ended rooms leave nothing behind: runs many small rooms with random aborts, then counts what is held.

A prefill process with two ranks and a decode process with one run the rooms, several at a time; either role aborts some
of them at a random time. The sizes of all containers of the agents, file descriptors, threads and files are counted
after a warm-up and again at the end, once the tombstones have expired; they must be equal. Memory is sampled during the
run; its growth per 1,000 rooms must be close to zero.

    python benchmarks/nothing_left.py --rooms 100000 --transport nixl --aborts 10%

Prints PASS or FAIL for each item; the exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.leaks.census import Sizes, grown
from benchmarks.leaks.process import SideProcess, files
from benchmarks.leaks.slope import slope, sparkline

SIZES = {"prefill": 2, "decode": 1}
TOMBSTONES_S = 10.0  # short, so that their number is constant before memory is measured
START_S = 60.0
# A thread's local variables still refer to objects that it has finished with, such as its last event.
STRAY_OBJECTS = 64
MEMORY_PER_1000 = 128 << 10  # bytes, 131 per room: heap sizes vary, and Python objects are counted exactly


class Held(NamedTuple):
    """Resources that one process holds and that must not grow.

    Attributes:
        containers: sizes of the agents' containers, by path.
        objects: live objects by class.
        descriptors: open file descriptors by kind.
        threads: number of threads.
    """

    containers: Sizes
    objects: Sizes
    descriptors: Sizes
    threads: int


class Check(NamedTuple):
    """One line of the verdict; the check fails if `left` has lines, which describe what is left over or wrong."""

    what: str
    left: list[str]


def main() -> int:
    options = _options()
    with fleet(options.transport) as (sides, directory):
        checks = measure(sides, directory, options)
        mapped = set().union(*(side.shared_memory() for side in sides))
        for side in sides:
            side.ask("close")
        ended = [f"{side.role}: exit status {status}" for side in sides if (status := side.end())]
        checks.append(Check("processes end well", ended))
        checks.append(Check("shared memory at the end", sorted(name for name in mapped if Path(name).exists())))
        checks.append(Check("files at the end", [f"{count} {kind}" for kind, count in files(directory).items()]))
    return verdict(checks)


def measure(sides: list[SideProcess], directory: Path, options: argparse.Namespace) -> list[Check]:
    """Runs the rooms and returns the checks of what they left behind."""
    first, step = 0, options.step
    run(sides, first, options.warm_up, options)
    first += options.warm_up
    before, files_before = rest(sides), files(directory)
    samples: dict[str, list[int]] = {side.role: [] for side in sides}
    rooms: list[int] = []
    ends: Counter[str] = Counter()
    since = time.monotonic()
    while len(rooms) * step < options.rooms:
        ends += run(sides, first, step, options)
        first += step
        rooms.append(len(rooms) * step + step)
        for side in sides:
            samples[side.role].append(side.rss_bytes)
    seconds = time.monotonic() - since
    after = rest(sides, before)
    print(
        f"{rooms[-1]} rooms over {options.transport} in {seconds:.0f} s, {options.window} in flight, "
        f"seed {options.seed}"
    )
    print("ends: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    checks = [*memory(samples, rooms, options), *(check for side in sides for check in compare(side, before, after))]
    kinds = files(directory)
    changed = [f"{count} {kind} (were {files_before.get(kind, 0)})" for kind, count in kinds.items()]
    checks.append(Check("sockets and temporary files", changed if kinds != files_before else []))
    checks += [Check(f"{side.role}: no errors in its threads", side.ask("errors")) for side in sides]
    missing = {"SUCCESS", *(["ABORTED"] if options.aborts else [])} - set(ends)
    checks.append(Check("rooms succeeded and were aborted", [f"none ended in {end}" for end in sorted(missing)]))
    return checks


def run(sides: list[SideProcess], first: int, count: int, options: argparse.Namespace) -> Counter[str]:
    """Runs the rooms in both processes at once; returns the number of rooms by outcome on the decode rank."""
    timeout = 60.0 + count / 10
    plan = {"first": first, "count": count, "window": options.window, "aborts": options.aborts, "seed": options.seed}
    for side in sides:
        side.tell("run", timeout=timeout, **plan)
    return [Counter(side.hear()) for side in sides][-1]


def rest(sides: list[SideProcess], before: dict[str, Held] | None = None) -> dict[str, Held]:
    """Counts what each process holds after the tombstones have expired; returns the result by role.

    Args:
        before: an earlier result; while a container is larger than in it, counts again, for at most ten seconds.
    """
    time.sleep(TOMBSTONES_S + 1)
    deadline = time.monotonic() + TOMBSTONES_S
    while True:
        held = {
            side.role: Held(side.ask("census"), side.ask("instances"), side.descriptors(), side.threads)
            for side in sides
        }
        left = [grown(before[role].containers, now.containers) for role, now in held.items()] if before else []
        if not any(left) or time.monotonic() > deadline:
            return held
        time.sleep(0.2)


def compare(side: SideProcess, before: dict[str, Held], after: dict[str, Held]) -> list[Check]:
    was, now = before[side.role], after[side.role]
    threads = [f"{now.threads} (were {was.threads})"] if now.threads > was.threads else []
    return [
        Check(
            f"{side.role}: {len(now.containers)} containers, {sum(now.containers.values())} elements",
            grown(was.containers, now.containers),
        ),
        Check(
            f"{side.role}: {sum(now.objects.values())} objects of {len(now.objects)} classes",
            more(was.objects, now.objects),
        ),
        Check(
            f"{side.role}: {sum(now.descriptors.values())} file descriptors", grown(was.descriptors, now.descriptors)
        ),
        Check(f"{side.role}: {now.threads} threads", threads),
    ]


def more(before: Sizes, after: Sizes) -> list[str]:
    """Returns one line for each class with more than `STRAY_OBJECTS` additional live objects."""
    return [
        f"{kind}: {count} (were {before.get(kind, 0)})"
        for kind, count in after.items()
        if count > before.get(kind, 0) + STRAY_OBJECTS
    ]


def memory(samples: dict[str, list[int]], rooms: list[int], options: argparse.Namespace) -> list[Check]:
    """Checks the growth of resident memory over the second half of the run, after the heaps have grown.

    Also prints the whole series.

    Args:
        samples: resident bytes at each sample, by role.
        rooms: number of rooms run until each sample.
    """
    checks: list[Check] = []
    for role, series in samples.items():
        warm = len(series) // 2
        rise = slope([number / 1000 for number in rooms[warm:]], series[warm:])
        shown = [f"{value / (1 << 20):.1f}" for value in series[:: max(1, len(series) // 20)]]
        print(f"{role}: RSS in MiB {sparkline(series)}  {' '.join(shown)}")
        left = [] if rise <= options.memory else [f"more than {options.memory / 1024:.0f} KiB"]
        checks.append(Check(f"{role}: memory grows by {rise / 1024:+.2f} KiB per 1,000 rooms", left))
    return checks


def verdict(checks: list[Check]) -> int:
    for check in checks:
        print(f"{'FAIL' if check.left else 'PASS'}  {check.what}")
        for line in check.left[:20]:
            print(f"      {line}")
        if len(check.left) > 20:
            print(f"      and {len(check.left) - 20} more")
    return int(any(check.left for check in checks))


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Creates a temporary directory with a path short enough for sockets, and removes it at the end."""
    directory = Path(tempfile.mkdtemp(prefix="kv-left-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def launch(role: str, transport: str, directory: Path, **config: Any) -> SideProcess:
    """Starts the process of one role; does not wait until its agents are ready, which requires the other role."""
    side = SideProcess(
        role, SIZES, directory, **{"transport": transport, "bootstrap_timeout_s": TOMBSTONES_S, **config}
    )
    try:
        side.ask("start")
    except RuntimeError:
        side.kill()
        raise
    return side


@contextlib.contextmanager
def fleet(transport: str, **config: Any) -> Iterator[tuple[list[SideProcess], Path]]:
    """Starts both processes, and yields them with their directory once they are ready.

    At the end, kills the processes that have not ended.
    """
    with workplace() as directory, contextlib.ExitStack() as stack:
        sides: list[SideProcess] = []
        for role in SIZES:
            sides.append(launch(role, transport, directory, **config))
            stack.callback(sides[-1].kill)
        for side in sides:
            side.ask("ready", timeout=START_S)
        yield sides, directory


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=100_000)
    parser.add_argument("--warm-up", type=int, default=2000, help="rooms before anything is counted")
    parser.add_argument("--step", type=int, default=1000, help="rooms between two samples of memory")
    parser.add_argument("--transport", choices=["nixl", "mooncake", "loopback"], default="nixl")
    parser.add_argument("--aborts", type=_share, default=0.1, help="share of rooms that are given up, as 10%%")
    parser.add_argument("--window", type=int, default=24, help="rooms in flight")
    parser.add_argument("--memory", type=int, default=MEMORY_PER_1000, help="bytes that 1,000 rooms may leave")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _share(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share")
    return value


if __name__ == "__main__":
    sys.exit(main())
