"""Measures SGLang's own NIXL backend and kvctl's in the same queues of SGLang, without an engine, on this host.

Both run in rank processes around SGLang's scheduler code (tests/support/sglang), in turns, each time in new processes;
the table has the medians. "observed" is SGLang's backend with kvctl in observe mode. Each run first moves small rooms,
of which every byte is compared, and then a window of rooms that do not count. `make .venv/sglang/.done` installs
SGLang's classes.

    PYTHONPATH=. python benchmarks/sglang_backends.py
    PYTHONPATH=. python benchmarks/sglang_backends.py --works tp4-dp4 --rounds 1 --rooms 16
    PYTHONPATH=. python benchmarks/sglang_backends.py --sides "nixl,kvctl,kvctl path=staged"
    PYTHONPATH=. python benchmarks/sglang_backends.py --device cuda --prefill-gpus 0 --decode-gpus 1 --tokens 4096
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvctl.lab.bench.statistics import times_text
from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import Outcome, PDPair, RankError

WORKS = {
    "tp1-tp1": (Ranks(), Ranks()),
    "tp4-tp4": (Ranks(tp=4), Ranks(tp=4)),
    "tp4-dp4": (Ranks(tp=4), Ranks(dp=4)),
    "tp2-dp2": (Ranks(tp=2), Ranks(dp=2)),
    "tp2-tp1": (Ranks(tp=2), Ranks()),
    "tp1-tp2": (Ranks(), Ranks(tp=2)),
}
SIDES = ("nixl", "nixl observed", "nixl staging", "nixl staging observed", "kvctl", "kvctl SETTING=VALUE")


class Load(NamedTuple):
    """Rooms of equal size, `window` of which are open at once."""

    tokens: int
    window: int


class Figures(NamedTuple):
    """`p50_ms`: from a request's arrival at the first of its ranks to its end on the last decode rank."""

    rooms_s: float
    gb_s: float
    p50_ms: float


def run(side: str, work: str, loads: list[Load], options: argparse.Namespace) -> Iterator[Figures]:
    """Measures each load in the same processes."""
    prefill, decode = WORKS[work]
    page = options.page_size
    model = Model(layers=options.layers, heads=8, head_dim=128, hidden=4096)
    backend, *rest = side.split()
    # Ranks see nothing of this process's environment.
    variables = {f"KVCTL_{name.upper()}": value for name, _, value in (word.partition("=") for word in rest) if value}
    tokens, window = (max(column) for column in zip(*loads, strict=True))
    case = Case(
        backend,
        prefill,
        decode,
        model,
        page_size=page,
        pool_tokens=window * tokens + page,
        decode_pool_tokens=-(-window // decode.dp) * tokens + page,
        rows=max(8, window),
        staging="staging" in rest,
        environment=variables | ({"KVCTL_SGLANG": "observe"} if "observed" in rest else {}),
        chunked_prefill_size=8192,
        device=options.device,
        prefill_gpus=tuple(options.prefill_gpus),
        decode_gpus=tuple(options.decode_gpus),
    )
    token_bytes = model.layers * 2 * model.heads * model.head_dim * 2
    room_numbers = itertools.count(1000)
    with PDPair(case, deadline_s=options.limit_s) as pair:

        def rooms(count: int, tokens: int, content: bool = False) -> list[Room]:
            return [
                Room(number, tokens=tokens, decode_dp=number % decode.dp, content=content)
                for number in itertools.islice(room_numbers, count)
            ]

        pair.transfer(rooms(decode.dp, 4 * page, content=True)).check()
        for load in loads:
            pair.transfer(rooms(load.window, load.tokens), load.window, settle=False)
            outcome = pair.transfer(rooms(options.rooms, load.tokens), load.window, settle=False)
            yield figures_of(outcome, load.tokens * token_bytes)


def figures_of(outcome: Outcome, room_bytes: int) -> Figures:
    started, ended = [], []
    for room, ends in outcome.rooms.items():
        failed = [end.reason for end in ends.values() if end.state != "success"]
        if failed:
            raise RankError(f"room {room}: {failed[0]}")
        started.append(min(end.started for end in ends.values()))
        ended.append(max(end.ended for name, end in ends.items() if name.startswith("decode")))
    rate = len(started) / (max(ended) - min(started))
    latencies = [end - start for start, end in zip(started, ended, strict=True)]
    return Figures(rate, rate * room_bytes / 1e9, statistics.median(latencies) * 1e3)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--works", default="tp1-tp1,tp4-dp4", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--sides", default="nixl,nixl staging,kvctl", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rooms", type=int, default=24, help="measured rooms of each load")
    parser.add_argument("--windows", type=numbers, default=[4], help="rooms that are open at once: a load for each")
    parser.add_argument("--tokens", type=numbers, default=[1024], help="tokens of a room: a load for each")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prefill-gpus", type=numbers, default=[0], help="GPUs that prefill ranks take in turn")
    parser.add_argument("--decode-gpus", type=numbers, default=[0])
    parser.add_argument("--limit-s", type=float, default=120.0, help="time after which a load has failed")
    parser.add_argument("--json", help="file for the figures of all runs")
    options = parser.parse_args()
    loads = [Load(tokens, window) for tokens in options.tokens for window in options.windows]
    found: dict[tuple[str, Load], dict[str, list[Figures]]] = {}
    with tempfile.TemporaryDirectory(prefix="kv-") as sockets:
        os.environ["KVCTL_SOCKET_DIR"] = sockets
        for number in range(options.rounds):
            for work in options.works.split(","):
                sides = options.sides.split(",")
                for side in sides if number % 2 == 0 else reversed(sides):  # a round's first run is often its best
                    if "staging" in side and WORKS[work][0].tp == WORKS[work][1].tp:
                        continue  # SGLang stages at unequal TP sizes only
                    try:
                        for load, figures in zip(loads, run(side, work, loads, options), strict=True):
                            found.setdefault((work, load), {}).setdefault(side, []).append(figures)
                            print(
                                f"round {number + 1} {work} {side}, {load.tokens} tokens, {load.window} open: "
                                f"{figures.rooms_s:.2f} rooms/s, {figures.gb_s:.2f} GB/s, p50 {figures.p50_ms:.1f} ms",
                                flush=True,
                            )
                    except AssertionError as error:
                        print(f"round {number + 1} {work} {side}: failed: {str(error)[:300]}", flush=True)
    if options.json:
        runs = [
            {"layout": work, **load._asdict(), "backend": side, "runs": [figures._asdict() for figures in all]}
            for (work, load), sides in found.items()
            for side, all in sides.items()
        ]
        Path(options.json).write_text(json.dumps(runs))
    print("\n| layout | tokens | open | backend | rooms/s | GB/s | p50 ms | kvctl is |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (work, load), sides_found in found.items():
        middle = {
            side: Figures(*(statistics.median(column) for column in zip(*all, strict=True)))
            for side, all in sides_found.items()
        }
        for side, figures in middle.items():
            rates = [[figures.rooms_s for figures in sides_found.get(each, ())] for each in ("kvctl", side)]
            ratio = times_text(*rates) if side != "kvctl" else ""
            print(
                f"| {work} | {load.tokens} | {load.window} | {side} | {figures.rooms_s:.2f} | {figures.gb_s:.2f} | "
                f"{figures.p50_ms:.1f} | {ratio} |"
            )


if __name__ == "__main__":
    main()
