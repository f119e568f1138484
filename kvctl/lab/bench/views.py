"""How results and plans are shown: columns for programs; for people a column per path, with Δ against the first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from kvctl.lab.bench import captions
from kvctl.lab.bench.outcome import Outcome
from kvctl.lab.bench.preset_views import contestants
from kvctl.lab.ranks.plan import Plan
from kvctl.render import units
from kvctl.render.report import Block, Grid, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.choices import HOST

# What can set rows of one load apart, besides the path; a terminal shows those that do.
_APART = ("fleet", "transport", "cp_mode", "pipeline", "observed")
_MOST_COLUMNS = 4
_VERDICT = {"PASS": "green", "FAIL": "bold red", "False": "bold red", "True": "green"}


def _ns(section: str, name: str, per: float) -> Callable[[Row], int | None]:
    def value(row: Row) -> int | None:
        number = row[section][name]
        return None if number is None else round(number * per)

    return value


def _stage(name: str) -> Callable[[Row], int | None]:
    def value(row: Row) -> int | None:
        number = row["stages_us"][name]["p50"]
        return None if number is None else round(number * 1e3)

    return value


BENCH = View(
    "bench",
    (
        Column("path"),
        Column("fleet", width=Width.WIDE),
        Column("transport", width=Width.WIDE),
        Column("cp_mode", width=Width.WIDE),
        Column("pipeline", width=Width.WIDE),
        Column("observed", kind=Kind.FLAG, width=Width.WIDE),
        Column("concurrency", kind=Kind.COUNT, header="CONC"),
        Column("tokens", "tokens_drawn"),
        Column("rooms", kind=Kind.COUNT, width=Width.NORMAL),
        Column("aborted", kind=Kind.COUNT, width=Width.WIDE),
        Column("failed_by_fault", kind=Kind.COUNT, width=Width.WIDE),
        Column("failed", kind=Kind.COUNT, width=Width.WIDE),
        Column("verified", kind=Kind.FLAG, styles=_VERDICT),
        Column("rooms_per_s", kind=Kind.RATE, header="ROOMS/S"),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
        Column("delta", "delta_ratio", Kind.RATIO, header="Δ GB/S"),
        Column("memcpy", "memcpy_ratio", Kind.RATIO, Width.NORMAL, header="OF MEMCPY"),
        Column("write", "write_ratio", Kind.RATIO, Width.NORMAL, header="OF WRITE"),
        Column("p2p", "p2p_ratio", Kind.RATIO, Width.WIDE, header="OF P2P"),
        Column("floor", "floor_ratio", Kind.NUMBER, Width.WIDE, header="TIMES FLOOR"),
        Column("mean", _ns("latency_ms", "mean", 1e6), Kind.DURATION, Width.WIDE),
        Column("p50", _ns("latency_ms", "p50", 1e6), Kind.DURATION),
        Column("p90", _ns("latency_ms", "p90", 1e6), Kind.DURATION, Width.WIDE),
        Column("p95", _ns("latency_ms", "p95", 1e6), Kind.DURATION, Width.WIDE),
        Column("p99", _ns("latency_ms", "p99", 1e6), Kind.DURATION),
        Column("ttft_mean", _ns("ttft_ms", "mean", 1e6), Kind.DURATION, Width.WIDE),
        Column("ttft_p95", _ns("ttft_ms", "p95", 1e6), Kind.DURATION, Width.WIDE),
        Column("slowdown", "compute_slowdown_ratio", Kind.RATIO, Width.WIDE, header="COMPUTE SLOWER"),
        Column("tpot", _ns("tpot_ms", "mean", 1e6), Kind.DURATION, Width.WIDE),
        Column("hidden", _ns("hidden_ms", "mean", 1e6), Kind.DURATION, Width.WIDE),
        Column("groups", kind=Kind.COUNT, width=Width.WIDE),
        Column("prefix_hit", "prefix_hit_ratio", Kind.RATIO, Width.WIDE),
        Column("descriptors_per_room", kind=Kind.NUMBER, width=Width.WIDE),
        Column("writes_per_room", kind=Kind.NUMBER, width=Width.WIDE),
        Column("engine_posts_per_room", kind=Kind.NUMBER, width=Width.WIDE),
        Column("gather", _stage("gather"), Kind.DURATION, Width.WIDE),
        Column("gate", _stage("gate"), Kind.DURATION, Width.WIDE),
        Column("post", _stage("post"), Kind.DURATION, Width.WIDE),
        Column("wire", _stage("wire"), Kind.DURATION, Width.WIDE),
        Column("scatter", _stage("scatter"), Kind.DURATION, Width.WIDE),
        Column("ring_high_water", kind=Kind.BYTES, width=Width.WIDE),
        Column("fallbacks", kind=Kind.COUNT, width=Width.WIDE),
        Column("cpu_seconds", kind=Kind.NUMBER, width=Width.WIDE),
        Column("peak_rss", kind=Kind.BYTES, width=Width.WIDE),
        Column("rss_overhead", kind=Kind.BYTES, width=Width.WIDE),
        Column("verified_parts", kind=Kind.COUNT, width=Width.WIDE),
        Column("observer_cost", kind=Kind.RATIO, width=Width.WIDE),
        Column("baseline", "baseline.verdict", width=Width.WIDE, styles=_VERDICT),
    ),
    empty="no path ran to the end of a lot",
)

PLAN = View(
    "bench-plan",
    (
        Column("fleet", width=Width.WIDE),
        Column("writer"),
        Column("writer_gpu", kind=Kind.COUNT, width=Width.WIDE),
        Column("reader"),
        Column("reader_gpu", kind=Kind.COUNT, width=Width.WIDE),
        Column("segment", width=Width.NORMAL),
        Column("heads", kind=Kind.LAYERS),
        Column("layers", kind=Kind.LAYERS),
        Column("parts", kind=Kind.COUNT),
        Column("payload", "bytes", Kind.BYTES, header="BYTES"),
        Column("bulk", "descriptors.bulk", Kind.COUNT),
        Column("slice", "descriptors.slice", Kind.COUNT),
        Column("staged", "descriptors.staged", Kind.COUNT),
        Column("direct", "descriptors.direct", Kind.COUNT, Width.WIDE),
    ),
    empty="nothing is owed",
)

# What the table for people shows of each path: label, value, and what a difference is taken of (None: no Δ).
_Line = tuple[str, Callable[[Row], str], Callable[[Row], float | None] | None]


def _plain(name: str, show: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: show(row[name])


def _time(label: str, section: str, name: str) -> _Line:
    value = _ns(section, name, 1e6)
    return f"{label} {name}", lambda row: units.duration(value(row)), value


def _stage_line(name: str) -> _Line:
    value = _stage(name)
    return f"{name} p50", lambda row: units.duration(value(row)), None


def _rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else units.three_digits(value)


def _simulated(row: Row) -> bool:
    """Whether a request does something else than be transferred: queue, compute, decode."""
    return bool(row["layer_ms"] or row["compute"] == "gpu" or row["decode_ms"] or row["arrivals"] == "open")


# Groups of lines, each with the rows that it has something to say of.
_LINES: tuple[tuple[tuple[_Line, ...], Callable[[Row], bool]], ...] = (
    (
        (
            ("rooms ok", _plain("ok", units.count), None),
            ("  aborted", _plain("aborted", units.count), None),
            ("  failed by a fault", _plain("failed_by_fault", units.count), None),
            ("  failed otherwise", _plain("failed", units.count), None),
        ),
        lambda row: bool(row["faults"]),
    ),
    (
        (
            ("rooms/s", _plain("rooms_per_s", _rate), lambda row: float(row["rooms_per_s"])),
            ("GB/s", _plain("gb_per_s", _rate), lambda row: float(row["gb_per_s"])),
        ),
        lambda row: True,
    ),
    ((("of one-thread memcpy", _plain("memcpy_ratio", units.percent), None),), lambda row: row["device"] == "cpu"),
    (
        (
            ("of a copy between the GPUs", _plain("p2p_ratio", units.percent), None),
            ("of a copy within one", _plain("device_copy_ratio", units.percent), None),
        ),
        lambda row: row["device"] != "cpu",
    ),
    (
        (
            ("of one write", _plain("write_ratio", units.percent), None),
            *(_time("latency", "latency_ms", name) for name in ("mean", "p50", "p90", "p95", "p99")),
        ),
        lambda row: True,
    ),
    (
        (("latency, times one copy's", _plain("floor_ratio", _rate), lambda row: row["floor_ratio"]),),
        lambda row: row["floor_ratio"] is not None,
    ),
    ((_time("TTFT", "ttft_ms", "mean"), _time("TTFT", "ttft_ms", "p95")), _simulated),
    ((_time("TPOT", "tpot_ms", "mean"),), lambda row: row["tpot_ms"]["mean"] is not None),
    (
        (
            _time("compute", "compute_ms", "mean"),
            _time("hidden behind it,", "hidden_ms", "mean"),
            ("layer groups", _plain("groups", units.count), None),
            ("decided by", _plain("pipeline_decisions", lambda why: " ".join(why) or units.UNKNOWN), None),
        ),
        lambda row: row["layer_ms"] > 0 or row["compute"] == "gpu" or row["pipeline"] != "off",
    ),
    (
        (("compute slowed down by", _plain("compute_slowdown_ratio", units.percent), None),),
        lambda row: row["compute_slowdown_ratio"] is not None,
    ),
    ((("prefix hits", _plain("prefix_hit_ratio", units.percent), None),), lambda row: row["prefix_hit_ratio"] > 0),
    (
        (
            ("descriptors per room", _plain("descriptors_per_room", _rate), None),
            ("writes per room", _plain("writes_per_room", _rate), None),
            ("engine posts per room", _plain("engine_posts_per_room", _rate), None),
            *(_stage_line(name) for name in ("gather", "gate", "post", "wire", "scatter")),
            ("ring high water", _plain("ring_high_water_bytes", units.size), None),
            ("fallbacks", _plain("fallbacks", units.count), None),
            ("CPU time", _plain("cpu_seconds", lambda value: f"{value:.2f} s"), lambda row: float(row["cpu_seconds"])),
            ("peak RSS of a rank", _plain("peak_rss_bytes", units.size), None),
            ("  beyond its buffers", _plain("rss_overhead_bytes", units.size), None),
            ("parts taken by", _plain("paths_taken", lambda taken: " ".join(taken) or units.UNKNOWN), None),
            ("parts verified", _plain("verified_parts", units.count), None),
        ),
        lambda row: True,
    ),
)


def blocks(rows: Sequence[Row], outcome: Outcome, view: View | None) -> list[Block]:
    """What a terminal shows: what was run, the results, the floors.

    Args:
        rows: lines of `view`, or, where that is None, rows of `BENCH`.
    """
    every = outcome.rows()
    head = captions.head(outcome)
    foot = [captions.floors(outcome), *captions.cut_short(every), *captions.observers(every)]
    if view is None:
        head += captions.load(outcome, rows)
    head += captions.faults(outcome, every)
    table = Grid(view, rows) if view is not None else _table(rows)
    verdict = _verdict(every)
    return [Text([[(line, "")] for line in head]), table, Text([*([(line, "")] for line in foot), verdict])]


def plan_rows(plan: Plan, fleet: str) -> list[dict[str, Any]]:
    """The plan's shares with the ranks' names."""
    several = any(rank["instance"] > 0 for rank in plan["ranks"])
    on = {(rank["instance"], rank["unique"]): rank["device"] for rank in plan["ranks"]}

    def gpu(instance: int, unique: int) -> int | None:
        return None if (number := on[instance, unique]) == HOST else number

    return [
        {
            **share,
            "fleet": fleet,
            "writer": f"p{share['instance']}-prefill-{share['writer']}" if several else f"prefill-{share['writer']}",
            "writer_gpu": gpu(share["instance"], share["writer"]),
            "reader": f"decode-{share['reader']}",
            "reader_gpu": gpu(-1, share["reader"]),
        }
        for share in plan["shares"]
    ]


def plan_table(rows: Sequence[Row]) -> View:
    """`PLAN`, with what only GPUs have where there are any."""
    on_gpus = any(row["writer_gpu"] is not None for row in rows)
    return _with_core(PLAN, {"writer_gpu", "reader_gpu", "direct"} if on_gpus else set())


def _with_core(view: View, names: Collection[str]) -> View:
    """The view with these columns on every terminal."""
    columns = (replace(each, width=Width.CORE) if each.name in names else each for each in view.columns)
    return replace(view, columns=tuple(columns))


def _table(rows: Sequence[Row]) -> Grid:
    """A column per contestant where there are few of one load, else a line each with what sets them apart."""
    loads = {(row["concurrency"], row["tokens_drawn"]) for row in rows}
    if len(loads) == 1 and len(rows) <= _MOST_COLUMNS:
        return Grid(_side_by_side(rows), _lines(rows))
    apart = {name for name in _APART if len({row[name] for row in rows}) > 1}
    apart |= {"floor"} if any(row["floor_ratio"] is not None for row in rows) else set()
    apart |= {"slowdown"} if any(row["compute_slowdown_ratio"] is not None for row in rows) else set()
    return Grid(_with_core(BENCH, apart), rows)


def _side_by_side(rows: Sequence[Row]) -> View:
    columns = [Column("what", header=" ")]
    names = contestants(rows)
    for number, name in enumerate(names):
        columns.append(Column(f"path{number}", header=name))
        if number:
            columns.append(Column(f"delta{number}", header=f"Δ {names[0]}"))
    return View("bench-paths", tuple(columns))


def _lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    lines = []
    for label, show, compare in (line for group, says in _LINES if any(map(says, rows)) for line in group):
        line = {"what": label}
        for number, row in enumerate(rows):
            line[f"path{number}"] = show(row)
            line[f"delta{number}"] = _delta(compare, rows[0], row) if compare else " "
        lines.append(line)
    return lines


def _delta(value: Callable[[Row], float | None], base: Row, row: Row) -> str:
    before, after = value(base), value(row)
    return f"{after / before - 1:+.0%}" if before and after is not None else units.UNKNOWN


def _verdict(rows: Sequence[Row]) -> list[tuple[str, str]]:
    verdicts = [row["verified"] for row in rows]
    if None in verdicts or not verdicts:
        return [("nothing was verified", "yellow")]
    if all(verdicts):
        return [("every byte verified", "green")]
    return [("NOT VERIFIED: " + ", ".join(str(row["path"]) for row in rows if not row["verified"]), "bold red")]
