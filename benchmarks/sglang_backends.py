"""Measures SGLang's own NIXL backend and kvctl's in the same queues of SGLang, without an engine, on this host.

Both run in rank processes around SGLang's scheduler code (tests/support/sglang), in turns, each time in new processes;
the table has the medians. "observed" is SGLang's backend with kvctl in observe mode. Each run first moves small rooms,
of which every byte is compared, and then a window of rooms that do not count. `make .venv/sglang/.done` installs
SGLang's classes.

    PYTHONPATH=. python benchmarks/sglang_backends.py
    PYTHONPATH=. python benchmarks/sglang_backends.py --works tp4-dp4 --rounds 1 --rooms 16
    PYTHONPATH=. python benchmarks/sglang_backends.py --device cuda --prefill-gpus 0 --decode-gpus 1 --tokens 4096
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair, RankError

WORKS = {
    "tp1-tp1": (Ranks(), Ranks()),
    "tp4-tp4": (Ranks(tp=4), Ranks(tp=4)),
    "tp4-dp4": (Ranks(tp=4), Ranks(dp=4)),
    "tp2-dp2": (Ranks(tp=2), Ranks(dp=2)),
    "tp2-tp1": (Ranks(tp=2), Ranks()),
    "tp1-tp2": (Ranks(), Ranks(tp=2)),
}
SIDES = ("nixl", "nixl observed", "nixl staging", "nixl staging observed", "kvctl")


class Figures(NamedTuple):
    """`p50_ms`: from a request's arrival at the first of its ranks to its end on the last decode rank."""

    rooms_s: float
    gb_s: float
    p50_ms: float


def run(side: str, work: str, options: argparse.Namespace) -> Figures:
    prefill, decode = WORKS[work]
    page = options.page_size
    model = Model(layers=options.layers, heads=8, head_dim=128, hidden=4096)
    backend, *rest = side.split()
    case = Case(
        backend,
        prefill,
        decode,
        model,
        page_size=page,
        pool_tokens=options.window * options.tokens + page,
        decode_pool_tokens=-(-options.window // decode.dp) * options.tokens + page,
        rows=max(8, options.window),
        staging="staging" in rest,
        environment={"KVCTL_SGLANG": "observe"} if "observed" in rest else {},
        chunked_prefill_size=8192,
        device=options.device,
        prefill_gpus=tuple(options.prefill_gpus),
        decode_gpus=tuple(options.decode_gpus),
    )
    room_bytes = options.tokens * model.layers * 2 * model.heads * model.head_dim * 2
    with PDPair(case, deadline_s=options.limit_s) as pair:

        def rooms(first: int, count: int, tokens: int, content: bool = False) -> list[Room]:
            return [
                Room(number, tokens=tokens, decode_dp=number % decode.dp, content=content)
                for number in range(first, first + count)
            ]

        pair.transfer(rooms(1000, decode.dp, 4 * page, content=True)).check()
        pair.transfer(rooms(2000, options.window, options.tokens), options.window, settle=False)
        outcome = pair.transfer(rooms(3000, options.rooms, options.tokens), options.window, settle=False)
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
    parser.add_argument("--rooms", type=int, default=24, help="measured rooms of each run")
    parser.add_argument("--window", type=int, default=4, help="rooms that are open at once")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prefill-gpus", type=numbers, default=[0], help="GPUs that prefill ranks take in turn")
    parser.add_argument("--decode-gpus", type=numbers, default=[0])
    parser.add_argument("--limit-s", type=float, default=120.0, help="time after which a run has failed")
    parser.add_argument("--json", help="file for the figures of all runs: work, side, [rooms/s, GB/s, p50 ms]")
    options = parser.parse_args()
    found: dict[str, dict[str, list[Figures]]] = {}
    with tempfile.TemporaryDirectory(prefix="kv-") as sockets:
        os.environ["KVCTL_SOCKET_DIR"] = sockets
        for number in range(options.rounds):
            for work in options.works.split(","):
                sides = options.sides.split(",")
                for side in sides if number % 2 == 0 else reversed(sides):  # a round's first run is often its best
                    if "staging" in side and WORKS[work][0].tp == WORKS[work][1].tp:
                        continue  # SGLang stages at unequal TP sizes only
                    begun = time.monotonic()
                    try:
                        figures = run(side, work, options)
                    except AssertionError as error:
                        print(f"round {number + 1} {work} {side}: failed: {str(error)[:300]}", flush=True)
                        continue
                    found.setdefault(work, {}).setdefault(side, []).append(figures)
                    print(
                        f"round {number + 1} {work} {side}: {figures.rooms_s:.2f} rooms/s, {figures.gb_s:.2f} GB/s, "
                        f"p50 {figures.p50_ms:.0f} ms ({time.monotonic() - begun:.0f} s)",
                        flush=True,
                    )
    if options.json:
        Path(options.json).write_text(json.dumps(found))
    print("\n| layout | backend | rooms/s | GB/s | p50 ms | kvctl is |\n| --- | --- | --- | --- | --- | --- |")
    for work, sides in found.items():
        middle = {
            side: Figures(*(statistics.median(column) for column in zip(*all, strict=True)))
            for side, all in sides.items()
        }
        for side, figures in middle.items():
            ratio = (
                f"{middle['kvctl'].rooms_s / figures.rooms_s:.1f} x" if "kvctl" in middle and side != "kvctl" else ""
            )
            print(f"| {work} | {side} | {figures.rooms_s:.2f} | {figures.gb_s:.2f} | {figures.p50_ms:.0f} | {ratio} |")


if __name__ == "__main__":
    main()
