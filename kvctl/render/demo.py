"""Views of `kvctl demo`: one line per second, and the summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.report import Block, Grid, Line, Text
from kvctl.render.view import Column, Kind, View, Width

_BAD = "bold red"

MOMENTS = View(
    "demo-moments",
    (
        Column("elapsed", Kind.DURATION, fixed=8),
        Column("rooms_per_s", Kind.RATE, header="ROOMS/s", fixed=7),
        Column("gb_per_s", Kind.RATE, header="GB/s", fixed=6),
        Column("open", Kind.COUNT, fixed=5),
        Column("done", Kind.COUNT, fixed=8),
        Column("failed", Kind.COUNT, fixed=7),
        Column("unexpected", Kind.COUNT, header="UNEXP.", fixed=6),
        Column("hung", Kind.COUNT, fixed=5),
        Column("corrupt", Kind.COUNT, fixed=7),
        Column("ring", Kind.RATIO, path="ring_ratio", fixed=5),
        Column("quarantined", Kind.BYTES, header="QUARANT.", fixed=9),
        Column("faults", Kind.MAP),
        Column("causes", Kind.MAP, Width.WIDE),
    ),
)

RANKS = View(
    "demo",
    (
        Column("rank"),
        Column("lives", Kind.COUNT),
        Column("slowest", Kind.DURATION, header="SLOWEST RESTART"),
        Column("rss", Kind.BYTES),
        Column("slope", Kind.NUMBER, header="RSS B/s"),
        Column("fds", Kind.COUNT),
        Column("fds_grown", Kind.COUNT, header="FDS +"),
        Column("threads", Kind.COUNT, Width.NORMAL),
        Column("threads_grown", Kind.COUNT, Width.NORMAL, header="THREADS +"),
        Column("ring_used", Kind.BYTES, header="RING"),
        Column("quarantined", Kind.BYTES, header="QUARANT."),
        Column("records", Kind.COUNT, header="ROOMS"),
        Column("leaks", Kind.LIST, styles={}),
    ),
)

FAULTS = View(
    "demo-faults",
    (
        Column("fault"),
        Column("kind", width=Width.WIDE),
        Column("does", Kind.SENTENCE),
        Column("code", width=Width.WIDE, header="HEALTH CODE"),
    ),
)


def blocks(summary: Mapping[str, Any]) -> list[Block]:
    """Formats the summary: injected faults, results of the rooms, and the resources that each rank holds at the end."""
    rooms, restarts = summary["rooms"], summary["restarts"]
    serving = restarts["serving_s"]
    lines: list[Line] = [
        _line("ran", f"{summary['seconds']:.0f} s on {summary['transport']}, seed {summary['seed']}"),
        _line("faults", _counts(summary["faults"]["injected"])),
        _line("struck", _counts(summary["faults"]["struck"])),
        _line(
            "restarts",
            f"{restarts['count']}, {restarts['cut_short']} of them cut short"
            + (f"; serving after {serving['p50']:.1f} s, {serving['max']:.1f} s at most" if serving["max"] else ""),
        ),
        _line(
            "rooms",
            f"{rooms['opened']:,} opened, {rooms['done']:,} done, {rooms['failed_expected']:,} failed as expected",
        ),
        _line("causes", _counts(summary["causes"])),
        _line("verified", units.size(summary["verified_bytes"])),
        _found("unexpected", rooms["failed_unexpected"]),
        _found("hung", rooms["hung"]),
        _found("corrupt", summary["corrupt"]),
        _found("leaks", len(summary["leaks"])),
        _found("crashes", len(summary["crashes"])),
    ]
    if summary["starved_s"]:
        text = f"{summary['starved_s']:.1f} s without a processor: what else runs on this machine has cost rooms"
        lines.append([("starved".ljust(12), "dim"), (text, "yellow")])
    if summary["not_drained"]:
        lines.append([("not drained ".ljust(12), "dim"), (summary["not_drained"], _BAD)])
    lines += [[(finding, _BAD)] for finding in summary["findings"]]
    lines += [
        [(f"crash: {crash['rank']} ended with status {crash['returncode']}: {crash['words']}", _BAD)]
        for crash in summary["crashes"]
    ]
    lines += [_line("evidence", path) for path in summary["evidence"]]
    return [Text(lines), Grid(RANKS, summary["ranks"])]


def _line(name: str, text: str) -> Line:
    return [(name.ljust(12), "dim"), (text, "")]


def _found(name: str, count: int) -> Line:
    return [(name.ljust(12), "dim"), (str(count), _BAD if count else "green")]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or units.UNKNOWN


def totals(summary: Mapping[str, Any]) -> Sequence[str]:
    """Returns lines with the results of the whole fleet, which the table of ranks does not contain."""
    rooms = summary["rooms"]
    return [
        f"{rooms['done']} rooms done, {rooms['failed_expected']} failed as expected, {rooms['failed_unexpected']} "
        f"unexpectedly, {rooms['hung']} hung",
        f"{summary['verified_bytes']} bytes verified, {summary['corrupt']} corruptions, {len(summary['leaks'])} leaks, "
        f"{len(summary['crashes'])} crashes",
        *summary["findings"],
    ]
