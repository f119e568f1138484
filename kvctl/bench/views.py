"""How results and plans are shown: columns for programs; for people a column per path, with Δ against the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.views import units
from kvctl.views.kinds import Kind
from kvctl.views.report import Block, Grid, Text
from kvctl.views.view import Column, Row, View, Width
from kvctl_agent.contract.rig import Plan, PlanRequest, Sizes

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
        Column("concurrency", kind=Kind.COUNT, header="CONC"),
        Column("tokens", "tokens_drawn"),
        Column("rooms", kind=Kind.COUNT, width=Width.NORMAL),
        Column("failed", kind=Kind.COUNT, width=Width.WIDE),
        Column("verified", kind=Kind.FLAG, styles=_VERDICT),
        Column("rooms_per_s", kind=Kind.RATE, header="ROOMS/S"),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
        Column("delta", "delta_ratio", Kind.RATIO, header="Δ GB/S"),
        Column("memcpy", "memcpy_ratio", Kind.RATIO, Width.NORMAL, header="OF MEMCPY"),
        Column("write", "write_ratio", Kind.RATIO, Width.NORMAL, header="OF WRITE"),
        Column("mean", _ns("latency_ms", "mean", 1e6), Kind.DURATION, Width.WIDE),
        Column("p50", _ns("latency_ms", "p50", 1e6), Kind.DURATION),
        Column("p90", _ns("latency_ms", "p90", 1e6), Kind.DURATION, Width.WIDE),
        Column("p95", _ns("latency_ms", "p95", 1e6), Kind.DURATION, Width.WIDE),
        Column("p99", _ns("latency_ms", "p99", 1e6), Kind.DURATION),
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
        Column("baseline", "baseline.verdict", width=Width.WIDE, styles=_VERDICT),
    ),
    empty="no path ran to the end of a lot",
)

PLAN = View(
    "bench-plan",
    (
        Column("writer"),
        Column("reader"),
        Column("heads", kind=Kind.LAYERS),
        Column("layers", kind=Kind.LAYERS),
        Column("parts", kind=Kind.COUNT),
        Column("payload", "bytes", Kind.BYTES, header="BYTES"),
        Column("bulk", "descriptors.bulk", Kind.COUNT),
        Column("slice", "descriptors.slice", Kind.COUNT),
        Column("staged", "descriptors.staged", Kind.COUNT),
    ),
    empty="nothing is owed",
)

# What the table for people shows of each path: label, value, and what a difference is taken of (None: no Δ).
_Line = tuple[str, Callable[[Row], str], Callable[[Row], float | None] | None]


def _plain(name: str, show: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: show(row[name])


def _latency(name: str) -> _Line:
    value = _ns("latency_ms", name, 1e6)
    return f"latency {name}", lambda row: units.duration(value(row)), value


def _stage_line(name: str) -> _Line:
    value = _stage(name)
    return f"{name} p50", lambda row: units.duration(value(row)), None


def _rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else units.three_digits(value)


_LINES: tuple[_Line, ...] = (
    ("rooms/s", _plain("rooms_per_s", _rate), lambda row: float(row["rooms_per_s"])),
    ("GB/s", _plain("gb_per_s", _rate), lambda row: float(row["gb_per_s"])),
    ("of one-thread memcpy", _plain("memcpy_ratio", units.percent), None),
    ("of one write", _plain("write_ratio", units.percent), None),
    *(_latency(name) for name in ("mean", "p50", "p90", "p95", "p99")),
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
)


def with_delta(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its GB/s against the first path of the same load (None for that path itself)."""
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    compared = []
    for row in rows:
        base = first.setdefault((row["concurrency"], row["tokens_drawn"]), row)
        same = base is row or not base["gb_per_s"]
        compared.append({**row, "delta_ratio": None if same else row["gb_per_s"] / base["gb_per_s"] - 1})
    return compared


def blocks(rows: Sequence[Row], plan: Plan, request: PlanRequest, floors: Mapping[str, float | None]) -> list[Block]:
    """What a terminal shows: what was run, the results, the floors."""
    shape = plan["shape"]
    model = f"{shape['model']}: " if shape["model"] else ""
    head = [
        f"prefill {_sizes(request.prefill)} → decode {_sizes(request.decode)} over {plan['transport']} · {model}"
        f"{shape['layers']} layers, {shape['kv_heads']} KV heads of {shape['head_dim']} {shape['dtype']} · "
        f"pages of {plan['page_size']}, {plan['page_order']}"
    ]
    if len(plan["loads"]) == 1 and rows:
        row = rows[0]
        head.append(
            f"{row['rooms']} rooms of {row['tokens_drawn']} tokens, {units.size(row['bytes_per_room'])} each, "
            f"{row['in_flight']} in flight"
        )
    table = Grid(_side_by_side(rows), _lines(rows)) if len(plan["loads"]) == 1 and rows else Grid(BENCH, rows)
    foot = (
        f"floors of this machine in the same run: memcpy {_rate(floors['memcpy'])} GB/s on one thread, "
        f"one write over {plan['transport']} {_rate(floors['write'])} GB/s"
    )
    return [Text([[(line, "")] for line in head]), table, Text([[(foot, "")], _verdict(rows)])]


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """The plan's shares with the ranks' names."""
    return [
        {**share, "writer": f"prefill-{share['writer']}", "reader": f"decode-{share['reader']}"}
        for share in plan["shares"]
    ]


def _side_by_side(rows: Sequence[Row]) -> View:
    columns = [Column("what", header=" ")]
    for number, row in enumerate(rows):
        columns.append(Column(f"path{number}", header=row["path"]))
        if number:
            columns.append(Column(f"delta{number}", header=f"Δ {rows[0]['path']}"))
    return View("bench-paths", tuple(columns))


def _lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    lines = []
    for label, show, compare in _LINES:
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


def _sizes(sizes: Sizes) -> str:
    axes = {"dp": sizes.dp, "pp": sizes.pp, "cp": sizes.cp, "tp": sizes.tp}
    return " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "tp1"
