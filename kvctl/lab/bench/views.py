"""Tables of bench results and plans for scripts, and the terminal output with a column per path and captions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvctl.lab.bench.results import Outcome
from kvctl.lab.bench.rows import delta_of, in_rounds
from kvctl.lab.bench.statistics import MIN_ROUNDS, spread
from kvctl.lab.bench.variants import pages_text, sizes_text
from kvctl.lab.ranks.plan import Plan, PlannedShape
from kvctl.render import units
from kvctl.render.report import Block, Grid, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.choices import HOST

DIMENSIONS = (
    *("side", "transport", "cp_mode", "path", "pipeline", "busy_engine"),
    *("prefill", "decode", "device", "page_size", "page_order"),
)
"""Fields in which rows of one load may differ, most important first; a table shows only the fields that do differ."""

_MAX_PATH_COLUMNS = 4
_VERDICT_STYLES = {"False": "bold red", "True": "green"}


def nanoseconds(*keys: str, per: float = 1e6) -> Callable[[Row], int | None]:
    """Returns a function that reads `row[key][key]…` and converts it to nanoseconds; None if the row lacks it.

    Args:
        per: Nanoseconds per unit of the value in the row.
    """

    def value(row: Row) -> int | None:
        number: Any = row
        for key in keys:
            number = number.get(key) if isinstance(number, Mapping) else None
        return None if number is None else round(number * per)

    return value


@dataclass(frozen=True, slots=True, eq=False)
class DeltaColumn(Column):
    """Column with the change of a row against the first row of its load: `{name}_ratio` and `{name}_significant`."""

    def human(self, row: Row) -> str:
        same = _same_text(row)
        return f"= {same}" if same else delta_text(self.value(row), row.get(f"{self.name}_significant"))


def delta_text(ratio: float | None, significant: bool | None) -> str:
    """Formats a change as `+12%`, as `+12%?` after too few rounds, and as `≈` if the spreads of the rounds overlap."""
    if ratio is None:
        return units.UNKNOWN
    return "≈" if significant is False else f"{ratio:+.0%}" + ("" if significant else "?")


def _same_text(row: Row) -> str | None:
    """Names the path, or the pipeline setting if the path is its own, of the row that was the same choice."""
    same = row.get("same_as")
    if not same:
        return None
    return str(same["path"]) if same["path"] != row["path"] else f"pipeline {same['pipeline']}"


def _limit_of_spread(end: int) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        rounds = in_rounds(row, COLUMNS["gb_per_s"].value)
        return spread(rounds)[end] if len(rounds) > 1 else None

    return value


def _wide(name: str, path: str | Callable[[Row], Any] = "", kind: Kind = Kind.TEXT, header: str = "") -> Column:
    return Column(name, kind, Width.WIDE, path=path, header=header)


def _stage(name: str) -> Column:
    return _wide(name, nanoseconds("stages_us", name, "p50", per=1e3), Kind.DURATION)


BENCH = View(
    "bench",
    (
        Column("path"),
        _wide("transport"),
        _wide("cp_mode"),
        _wide("pipeline"),
        _wide("busy_engine"),
        Column("concurrency", Kind.COUNT, header="CONC"),
        Column("tokens", path="tokens_drawn"),
        Column("rooms", Kind.COUNT, Width.NORMAL),
        _wide("failed", kind=Kind.COUNT),
        Column("verified", Kind.FLAG, styles=_VERDICT_STYLES),
        Column("rooms_per_s", Kind.RATE, header="ROOMS/S"),
        Column("gb_per_s", Kind.RATE, header="GB/S"),
        _wide("rounds", lambda row: len(row.get("rounds") or ()), Kind.COUNT),
        Column("low", Kind.RATE, Width.NORMAL, path=_limit_of_spread(0), header="GB/S FROM"),
        Column("high", Kind.RATE, Width.NORMAL, path=_limit_of_spread(1), header="TO"),
        DeltaColumn("delta", Kind.RATIO, path="delta_ratio", header="Δ GB/S"),
        _wide("delta_significant", kind=Kind.FLAG),
        _wide("same_as", _same_text),
        Column("memcpy", Kind.RATIO, Width.NORMAL, path="memcpy_ratio", header="OF MEMCPY"),
        Column("write", Kind.RATIO, Width.NORMAL, path="write_ratio", header="OF WRITE"),
        _wide("p2p", "p2p_ratio", Kind.RATIO, "OF P2P"),
        _wide("floor", "floor_ratio", Kind.NUMBER, "TIMES COPY"),
        _wide("mean", nanoseconds("latency_ms", "mean"), Kind.DURATION),
        Column("p50", Kind.DURATION, path=nanoseconds("latency_ms", "p50")),
        _wide("p90", nanoseconds("latency_ms", "p90"), Kind.DURATION),
        _wide("p95", nanoseconds("latency_ms", "p95"), Kind.DURATION),
        Column("p99", Kind.DURATION, path=nanoseconds("latency_ms", "p99")),
        _wide("done_p50", nanoseconds("done_ms", "p50"), Kind.DURATION),
        _wide("done_p99", nanoseconds("done_ms", "p99"), Kind.DURATION),
        _wide("ttft_mean", nanoseconds("ttft_ms", "mean"), Kind.DURATION),
        _wide("ttft_p95", nanoseconds("ttft_ms", "p95"), Kind.DURATION),
        _wide("tpot", nanoseconds("tpot_ms", "mean"), Kind.DURATION),
        _wide("hidden", nanoseconds("hidden_ms", "mean"), Kind.DURATION),
        _wide("groups", kind=Kind.COUNT),
        _wide("asked", "asked_rooms_per_s", Kind.RATE, "ASKED ROOMS/S"),
        _wide("served", "served_rooms_per_s", Kind.RATE, "SERVED ROOMS/S"),
        _wide("engine_slower", "engine_slowdown_ratio", Kind.RATIO),
        _wide("engine_stall", nanoseconds("engine_stall_ms"), Kind.DURATION),
        _wide("engine_idle_stall", nanoseconds("engine_idle_stall_ms"), Kind.DURATION),
        _wide("engine_call", nanoseconds("engine_call_ms"), Kind.DURATION),
        _wide("prefix_hit", "prefix_hit_ratio", Kind.RATIO),
        _wide("descriptors_per_room", kind=Kind.NUMBER),
        _wide("writes_per_room", kind=Kind.NUMBER),
        _wide("engine_posts_per_room", kind=Kind.NUMBER),
        *map(_stage, ("gather", "gate", "post", "wire", "scatter")),
        _wide("ring_high_water", kind=Kind.BYTES),
        _wide("fallbacks", kind=Kind.COUNT),
        _wide("cpu_seconds", kind=Kind.NUMBER),
        _wide("peak_rss", kind=Kind.BYTES),
        _wide("rss_overhead", kind=Kind.BYTES),
        _wide("verified_parts", kind=Kind.COUNT),
    ),
    empty="no path completed a batch",
)

PLAN = View(
    "bench-plan",
    (
        _wide("fleet"),
        Column("writer"),
        _wide("writer_gpu", kind=Kind.COUNT),
        Column("reader"),
        _wide("reader_gpu", kind=Kind.COUNT),
        Column("segment", width=Width.NORMAL),
        Column("heads", Kind.LAYERS),
        Column("layers", Kind.LAYERS),
        _wide("stripe", lambda row: _stripe_text(row["stripe"]), header="TOKENS"),
        Column("parts", Kind.COUNT),
        _wide("pages", kind=Kind.COUNT),
        _wide("transfer_page", kind=Kind.COUNT),
        _wide("splits", lambda row: ":".join(map(str, row["splits"]))),
        Column("payload", Kind.BYTES, path="bytes", header="BYTES"),
        Column("bulk", Kind.COUNT, path="descriptors.bulk"),
        Column("slice", Kind.COUNT, path="descriptors.slice"),
        Column("staged", Kind.COUNT, path="descriptors.staged"),
        _wide("direct", "descriptors.direct", Kind.COUNT),
    ),
    empty="no rank sends anything",
)

COLUMNS = {column.name: column for column in BENCH.columns}


def distinguishing(rows: Sequence[Row]) -> list[str]:
    """Returns the fields of `DIMENSIONS` in which rows differ, without those that add no further distinction."""
    chosen: list[str] = []
    distinct = 1
    for field in DIMENSIONS:
        count = len({tuple(str(row.get(each)) for each in (*chosen, field)) for row in rows})
        if count > distinct:
            chosen.append(field)
            distinct = count
    return chosen


def contestants(rows: Sequence[Row]) -> list[str]:
    """Returns a name for each row, composed of the values of the fields in which the rows differ."""

    def word(row: Row, field: str) -> str:
        value = row.get(field)
        if field == "busy_engine":
            return "engine idle" if value == "off" else f"busy {value}"
        return str(value or "")

    fields = distinguishing(rows) or ["path"]
    return [" ".join(word(row, field) for field in fields) for row in rows]


def blocks(rows: Sequence[Row], outcome: Outcome) -> list[Block]:
    """Returns the terminal output: the setup, the results and the roofline."""
    every = outcome.rows()
    head = [*_setup(outcome), *_load(rows)]
    table, same = _table(rows)
    foot = [*same, *rounds_text(every), _roofline(outcome), *_cut_short(every)]
    verdict = _verdict(every)
    return [Text([[(line, "")] for line in head]), table, Text([*([(line, "")] for line in foot), verdict])]


# ---- plans ----------------------------------------------------------------------------------------------------------


def plan_rows(plan: Plan, fleet: str) -> list[dict[str, Any]]:
    """Returns a row for each writer and each decode rank that it sends to, with its GPUs, layers, pages and bytes."""
    several = any(rank["instance"] > 0 for rank in plan["ranks"])
    devices = {(rank["instance"], rank["unique"]): rank["device"] for rank in plan["ranks"]}

    def gpu(instance: int, unique: int) -> int | None:
        return None if (number := devices[instance, unique]) == HOST else number

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
    """Returns `PLAN`, with the GPU columns and path direct always shown if the ranks are on GPUs."""
    shown: set[str] = set()
    if any(row["writer_gpu"] is not None for row in rows):
        shown |= {"writer_gpu", "reader_gpu", "direct"}
    if any(row["stripe"] for row in rows):
        shown |= {"stripe", "pages"}
    groups = any(row["segment"] not in ("kv", "draft") and row["transfer_page"] for row in rows)
    if groups or any(row["splits"] != [1, 1] for row in rows):
        shown |= {"pages"}
    return _with_core(PLAN, shown)


def plan_captions(plans: Sequence[Plan]) -> list[str]:
    """Returns a line on the pages of each plan whose two sides do not have equal pages in contiguous pools."""
    lines = []
    for plan in plans:
        text, page = pages_text(plan), plan["transfer_page"]
        if text != f"pages of {page}":
            splits = (
                f"{plan['page_size'] // page} in a prefill page, {plan['decode_page_size'] // page} in a decode page"
            )
            lines.append(f"{text} · transfer pages of {page} token{'s' * (page > 1)}: {splits}")
    return list(dict.fromkeys(lines))


def _stripe_text(stripe: Sequence[int] | None) -> str:
    if stripe is None:
        return "all"
    lo, hi, every = stripe
    return f"{lo if hi - lo == 1 else f'{lo}-{hi - 1}'} of {every}"


# ---- the table ------------------------------------------------------------------------------------------------------


def _rate(name: str) -> Column:
    return Column(name, Kind.NUMBER)


def _quantiles(label: str, section: str, *names: str) -> list[tuple[str, Column, bool]]:
    return [
        (f"{label} {name}", Column(name, Kind.DURATION, path=nanoseconds(section, name)), label not in _WITHOUT_DELTA)
        for name in names
    ]


def _words(name: str) -> Column:
    return Column(name, path=lambda row: " ".join(row[name]))


_WITHOUT_DELTA = ("compute", "hidden behind it,")

# Lines of the table with a column per path: (condition, lines). The lines are shown if the condition is true of any
# row; a line is (label, column, whether a Δ is shown).
_LINES: tuple[tuple[Callable[[Row], bool], Sequence[tuple[str, Column, bool]]], ...] = (
    (
        lambda row: row["failed"] > 0,
        (("rooms ok", Column("ok", Kind.COUNT), False), ("rooms failed", COLUMNS["failed"], False)),
    ),
    (lambda row: True, (("rooms/s", _rate("rooms_per_s"), True),)),
    (
        lambda row: len(row["rounds"]) > 1,
        (("rooms/s by round", Column("spread", path=lambda row: _spread_text(row)), False),),
    ),
    (lambda row: True, (("GB/s", _rate("gb_per_s"), True),)),
    (lambda row: row["device"] == "cpu", (("of one-thread memcpy", COLUMNS["memcpy"], False),)),
    (
        lambda row: row["device"] != "cpu",
        (
            ("of a copy between the GPUs", COLUMNS["p2p"], False),
            ("of a copy within one", Column("device_copy", Kind.RATIO), False),
        ),
    ),
    (lambda row: True, (("of one write", COLUMNS["write"], False),)),
    (lambda row: True, _quantiles("latency", "latency_ms", "mean", "p50", "p90", "p95", "p99")),
    (lambda row: row["floor_ratio"] is not None, (("latency, times one copy's", COLUMNS["floor"], True),)),
    (
        # Requests are not only transferred: they also queue, compute or decode.
        lambda row: bool(row["layer_ms"] or row["decode_ms"] or row["arrivals"] == "open"),
        _quantiles("TTFT", "ttft_ms", "mean", "p95"),
    ),
    (
        lambda row: row["asked_rooms_per_s"] is not None,
        (("asked, rooms/s", _rate("asked_rooms_per_s"), False), ("served, rooms/s", _rate("served_rooms_per_s"), True)),
    ),
    (
        lambda row: row["busy_engine"] != "off",
        (
            ("engine's loop slowed down by", COLUMNS["engine_slower"], False),
            ("  its longest stall", COLUMNS["engine_stall"], False),
            ("  and with an idle agent", COLUMNS["engine_idle_stall"], False),
            ("  its longest step with the agent", COLUMNS["engine_call"], False),
            *_quantiles("success to done on prefill,", "done_ms", "p50", "p99"),
        ),
    ),
    (lambda row: row["tpot_ms"]["mean"] is not None, _quantiles("TPOT", "tpot_ms", "mean")),
    (
        lambda row: row["layer_ms"] > 0 or row["pipeline"] != "off",
        (
            *_quantiles("compute", "compute_ms", "mean"),
            *_quantiles("hidden behind it,", "hidden_ms", "mean"),
            ("layer groups", COLUMNS["groups"], False),
            ("decided by", _words("pipeline_decisions"), False),
        ),
    ),
    (lambda row: row["prefix_hit_ratio"] > 0, (("prefix hits", COLUMNS["prefix_hit"], False),)),
    (
        lambda row: True,
        (
            ("descriptors per room", COLUMNS["descriptors_per_room"], False),
            ("writes per room", COLUMNS["writes_per_room"], False),
            ("engine posts per room", COLUMNS["engine_posts_per_room"], False),
            *((f"{name} p50", COLUMNS[name], False) for name in ("gather", "gate", "post", "wire", "scatter")),
            ("ring high water", COLUMNS["ring_high_water"], False),
            ("fallbacks", COLUMNS["fallbacks"], False),
            ("CPU time", Column("cpu", Kind.DURATION, path=lambda row: row["cpu_seconds"] * 1e9), True),
            ("peak RSS of a rank", COLUMNS["peak_rss"], False),
            ("  beyond its buffers", COLUMNS["rss_overhead"], False),
            ("parts sent by path", _words("paths_taken"), False),
            ("parts verified", COLUMNS["verified_parts"], False),
        ),
    ),
)


def _with_core(view: View, names: Collection[str]) -> View:
    """Returns the view with the named columns shown at any width."""
    columns = (replace(each, width=Width.CORE) if each.name in names else each for each in view.columns)
    return replace(view, columns=tuple(columns))


def _table(rows: Sequence[Row]) -> tuple[Grid, list[str]]:
    """Returns a table with a column per row if there are few rows, all of one load; otherwise with a line per row.

    A row that is the same choice as another one has no column, but one of the returned lines.
    """
    same = [any(row["same_as"] and row["same_as"].items() <= other.items() for other in rows) for row in rows]
    columns = [row for row, merged in zip(rows, same, strict=True) if not merged]
    if len({(row["concurrency"], row["tokens_drawn"]) for row in rows}) == 1 and len(columns) <= _MAX_PATH_COLUMNS:
        lines = [
            f"{name} = {_same_text(row)}: it sent the same parts on the same path, at {_spread_text(row)} rooms/s"
            for name, row, merged in zip(contestants(rows), rows, same, strict=True)
            if merged
        ]
        return Grid(_side_by_side(columns), _lines(columns)), lines
    shown = {name for name in DIMENSIONS if len({row.get(name) for row in rows}) > 1}
    shown |= {"floor"} if any(row["floor_ratio"] is not None for row in rows) else set()
    return Grid(_with_core(BENCH, shown), rows), []


def _side_by_side(rows: Sequence[Row]) -> View:
    columns = [Column("measure", header=" ")]
    names = contestants(rows)
    for number, name in enumerate(names):
        columns.append(Column(f"path{number}", header=name))
        if number:
            columns.append(Column(f"delta{number}", header=f"Δ {names[0]}"))
    return View("bench-paths", tuple(columns))


def _lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    lines = []
    for label, column, compare in (line for applies, group in _LINES if any(map(applies, rows)) for line in group):
        line = {"measure": label}
        for number, row in enumerate(rows):
            line[f"path{number}"] = column.human(row)
            line[f"delta{number}"] = delta_text(*delta_of(rows[0], row, column.value)) if compare else " "
        lines.append(line)
    return lines


def _spread_text(row: Row) -> str:
    rounds = in_rounds(row, lambda each: each["rooms_per_s"])
    return "-".join(dict.fromkeys(map(units.three_digits, spread(rounds)))) if rounds else units.UNKNOWN


def _verdict(rows: Sequence[Row]) -> list[tuple[str, str]]:
    verdicts = [row["verified"] for row in rows]
    if None in verdicts or not verdicts:
        return [("nothing was verified", "yellow")]
    if all(verdicts):
        return [("every byte verified", "green")]
    return [("NOT VERIFIED: " + ", ".join(str(row["path"]) for row in rows if not row["verified"]), "bold red")]


# ---- captions -------------------------------------------------------------------------------------------------------


def layouts_text(outcome: Outcome) -> str:
    """Formats layouts and transports: `prefill tp4 → decode dp4 over nixl`."""
    requests = [each.variant.request for each in outcome.measured]
    layouts = dict.fromkeys(
        f"prefill {' + '.join(map(sizes_text, request.prefill))} → decode {sizes_text(request.decode)}"
        for request in requests
    )
    return f"{' and '.join(layouts)} over {' and '.join(dict.fromkeys(request.transport for request in requests))}"


def shape_words(shape: Mapping[str, Any]) -> Iterator[str]:
    """Yields descriptions of a model's layers and heads, as far as a saved result has them."""
    if "layers" in shape:
        yield f"{shape['layers']} layers"
    if shape.get("kind") == "mla":
        yield f"latents of {shape.get('head_dim')} {shape.get('dtype', '')}".rstrip()
    elif "kv_heads" in shape and "head_dim" in shape:
        dims = dict.fromkeys((shape["head_dim"], shape.get("v_head_dim", shape["head_dim"])))
        yield f"{shape['kv_heads']} KV heads of {' and '.join(map(str, dims))} {shape.get('dtype', '')}".rstrip()


def shape_text(shape: PlannedShape) -> str:
    """Formats a model's shape: `llama-3.1-8b: 32 layers, 8 KV heads of 128 bf16`."""
    words = list(shape_words(shape))
    if shape["draft"]:
        count = shape["draft"]["layers"]
        words.append(f"{count} draft layer{'s' * (count > 1)}")
    for group in shape["groups"]:
        window = f", window {group['window']}" if group["window"] else ""
        words.append(f"KV group {group['name']} ({len(group['layers'])} layers, pages of {group['page_size']}{window})")
    words += [f"state {state['name']}" for state in shape["states"]]
    model = f"{shape['model']}: " if shape["model"] else ""
    return model + ", ".join(words)


def _setup(outcome: Outcome) -> list[str]:
    """Returns lines that describe layouts, transports, shape, and the GPUs if there are any."""
    plans: list[Plan] = [each.plan for each in outcome.measured]
    shapes = dict.fromkeys(shape_text(plan["shape"]) for plan in plans)
    plan = plans[0]
    lines = [f"{layouts_text(outcome)} · {'; then '.join(shapes)} · {pages_text(plan)}, {plan['page_order']}"]
    if plan["device"] == "cpu":
        return lines
    kinds = ", ".join(dict.fromkeys(gpu["name"] for gpu in outcome.gpus().values()))
    sides = []
    for role in ("prefill", "decode"):
        used = sorted({rank["device"] for rank in plan["ranks"] if rank["role"] == role})
        sides.append(f"{role} on GPU {' and '.join(map(str, used))}")
    gpus = ", ".join(sides) + (f" ({kinds})" if kinds else "")
    return [*lines, gpus]


def _load(rows: Sequence[Row]) -> list[str]:
    """Returns a line that describes the load; empty if the rows have different loads."""
    if not rows or len({(row["concurrency"], row["tokens_drawn"]) for row in rows}) > 1:
        return []
    row = rows[0]
    line = (
        f"{row['rooms']} rooms of {row['tokens_drawn']} tokens, {units.size(row['bytes_per_room'])} each, "
        f"{row['in_flight']} in flight"
    )
    return [line + (", arriving in an open loop" if row["arrivals"] == "open" else "")]


def rounds_text(rows: Sequence[Row], turns: bool = True) -> list[str]:
    """Returns a line on the rounds that a table's Δ rest on; empty if there is nothing to compare.

    Args:
        turns: whether what is compared took turns; otherwise it ran one after another.
    """
    counts = sorted({len(row.get("rounds") or ()) for row in rows})
    if len(rows) < 2:
        return []
    rounds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    text = (
        "Δ of one round"
        if counts[-1] == 1
        else f"Δ over {rounds} rounds{' in turns' if turns else ', one side after another'}"
    )
    few = f"? below {MIN_ROUNDS} rounds, where it may be chance: --repeat {MIN_ROUNDS}"
    marks = ["≈ where their spreads overlap"] * (counts[-1] >= MIN_ROUNDS) + [few] * (counts[0] < MIN_ROUNDS)
    return [f"{text}: {', '.join(marks)}"]


def _roofline(outcome: Outcome) -> str:
    """Returns a line with the measured limits of the machine and its transports."""
    writes = ", ".join(
        f"over {transport} {units.three_digits(each['write'])} GB/s" for transport, each in outcome.roofline().items()
    )
    copies = f"memcpy {units.three_digits(outcome.best_roofline('memcpy'))} GB/s on one thread"
    if outcome.measured[0].plan["device"] != "cpu":
        within, between = (units.three_digits(outcome.best_roofline(kind)) for kind in ("device", "peer"))
        copies = f"copy within the GPU {within} GB/s, to the decode rank's {between} GB/s"
    return f"limits of this machine, measured in the same run: {copies}, one write {writes}"


def _cut_short(rows: Sequence[Row]) -> list[str]:
    """Returns a line on the paths that ran fewer rooms than planned because of --point-seconds; empty without any."""
    cut: dict[str, list[Row]] = {}
    for row in rows:
        if row["rooms"] < row["planned_rooms"]:
            cut.setdefault(row["path"], []).append(row)
    counts = [
        f"{path} {units.count(sum(row['rooms'] for row in runs))} of "
        f"{units.count(sum(row['planned_rooms'] for row in runs))} in {len(runs)} run{'s' * (len(runs) > 1)}"
        for path, runs in cut.items()
    ]
    return [f"rooms left out because of --point-seconds: {', '.join(counts)} (saved in ROOMS)"] if counts else []
