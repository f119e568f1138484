"""Tables that the presets print: a line per run, or a line per load that compares the contestants in columns.

A contestant is one of the settings that a preset compares, such as a path or a fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvctl.lab.bench.rows import Delta, delta_of
from kvctl.lab.bench.views import COLUMNS, DeltaColumn, contestants, nanoseconds
from kvctl.render.view import Column, Kind, Row, View, Width

Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure by which contestants are compared: its name, its value in a row, and whether more or less is better."""

    name: str
    value: Value
    better: Literal["more", "less"]

    @property
    def kind(self) -> Kind:
        return Kind.RATE if self.better == "more" else Kind.DURATION


def tokens_per_s(row: Row) -> float | None:
    """Returns the prompt tokens per second of the median repeat."""
    return float(row["tokens_per_s"])


ttft = nanoseconds("ttft_ms", "mean")

_PRESET_COLUMNS = {
    column.name: column
    for column in (
        Column("tokens", kind=Kind.COUNT),
        Column("in_flight", kind=Kind.COUNT),
        Column("ratio", kind=Kind.NUMBER, header="T:C"),
        Column("cp_size", kind=Kind.COUNT, header="CP"),
        Column("compute", nanoseconds("compute_ms", "p50"), Kind.DURATION, header="C"),
        Column("transfer", nanoseconds("transfer_ms"), Kind.DURATION, header="T"),
        Column("exposed", nanoseconds("exposed_ms", "p50"), Kind.DURATION),
        Column("model", nanoseconds("model_exposed_ms"), Kind.DURATION),
        Column("off_model", "off_model_ratio", Kind.RATIO),
        Column("off_total", "off_total_ratio", Kind.RATIO, header="OF TOTAL"),
        Column("ttft_p50", nanoseconds("ttft_ms", "p50"), Kind.DURATION, header="P50"),
        Column("ttft_p99", nanoseconds("ttft_ms", "p99"), Kind.DURATION, header="P99"),
        Column("tokens_per_s", kind=Kind.RATE, header="TOK/S"),
        Column("decisions", "pipeline_decisions", Kind.MAP, Width.WIDE),
        Column("bytes_per_room", "bytes_per_room", Kind.BYTES, header="BYTES/ROOM"),
    )
} | {
    "ttft_delta": DeltaColumn(
        "delta",
        "ttft_delta_ratio",
        Kind.RATIO,
        header="Δ TTFT",
        delta=lambda row: Delta(row["ttft_delta_ratio"], row.get("ttft_delta_significant")),
    )
}


def _table(name: str, columns: str, normal: Collection[str] = (), wide: Collection[str] = (), **headers: str) -> View:
    """Returns a view of the named columns of the presets' tables and of `kvctl bench`.

    Args:
        columns: Names of the columns, separated by spaces.
        normal, wide: Columns shown only on terminals of at least that width; all others are always shown.
        headers: Headers that replace the columns' own, by column name.
    """
    chosen = []
    for each in columns.split():
        column = _PRESET_COLUMNS.get(each) or COLUMNS[each]
        width = Width.NORMAL if each in normal else Width.WIDE if each in wide else Width.CORE
        chosen.append(replace(column, width=width, header=headers.get(each, column.header)))
    return View(name, tuple(chosen))


_TTFT = {"ttft_mean": "TTFT", "ttft_p95": "P95"}
PIPELINE = _table(
    "bench-pipeline-sweep",
    "tokens concurrency ratio pipeline path transport compute transfer groups exposed model off_model off_total "
    "ttft_mean ttft_p95 tokens_per_s ttft_delta decisions verified",
    normal=("verified",),
    wide=("path", "transport", "decisions"),
    groups="N",
    **_TTFT,
)

PIPELINE_COMPUTED = _table(
    "bench-pipeline-computed",
    "tokens path pipeline transport rooms compute slowdown groups hidden exposed ttft_mean ttft_p95 ttft_delta "
    "tokens_per_s floor decisions verified",
    normal=("transport", "verified"),
    wide=("rooms", "floor", "decisions"),
    slowdown="SLOWER BY",
    groups="N",
    **_TTFT,
)

MULTI_TURN = _table(
    "bench-multi-turn",
    "path transport rooms prefix_hit rooms_per_s tokens_per_s delta ttft_mean ttft_p50 ttft_p95 gb_per_s verified",
    normal=("transport", "verified"),
    rooms="TURNS",
    prefix_hit="HIT",
    rooms_per_s="TURNS/S",
    **_TTFT,
)

STRESS = _table(
    "bench-stress",
    "path transport concurrency in_flight tokens rooms failed gb_per_s delta ttft_mean ttft_p99 ring_high_water "
    "fallbacks verified",
    normal=("transport", "verified"),
    ttft_mean="TTFT",
    ring_high_water="RING",
)

CP = _table(
    "bench-cp",
    "cp_size cp_mode path transport gb_per_s delta p50 p99 writes_per_room bytes_per_room verified",
    normal=("transport", "verified"),
    cp_mode="MODE",
    writes_per_room="WRITES/ROOM",
)


def comparison_view(
    name: str,
    by: tuple[str, str],
    measures: Sequence[Measure],
    names: Sequence[str],
    cut_short: Collection[str] = (),
) -> View:
    """Returns the view of lines from `side_by_side`: each measure of each contestant, with Δ against the first.

    Args:
        name: Name of the preset.
        by: Field of a line that identifies its load, and the field's header.
        names: The contestants.
        cut_short: Contestants that did not run all rooms; their number of rooms is always shown.
    """
    field, header = by
    columns = [Column(field, kind=Kind.COUNT, header=header)]
    for measure in measures:
        word = measure.name.lower().replace("/", "_per_")
        for each in names:
            value = _of(each, measure.value)
            columns.append(Column(f"{each}_{word}", value, measure.kind, header=f"{each} {measure.name}"))
            if each != names[0]:
                columns.append(_delta_column(f"{each}_{word}_delta", names[0], each, measure))
    columns += [
        Column(
            f"{each}_rooms",
            _of(each, lambda run: int(run["rooms"])),
            Kind.COUNT,
            Width.CORE if each in cut_short else Width.WIDE,
            header=f"{each} rooms",
        )
        for each in names
    ]
    return View(f"bench-{name}", tuple(columns))


def side_by_side(rows: Sequence[Row], by: str) -> list[dict[str, Any]]:
    """Returns a line per load; its `runs` maps each contestant to its row.

    Args:
        by: Field of the line that is set to the load's concurrency.
    """
    lines: dict[Any, dict[str, Any]] = {}
    for row, name in zip(rows, contestants(rows), strict=True):
        load = (row["concurrency"], row["tokens_drawn"])
        line = lines.setdefault(load, {by: row["concurrency"], "tokens": row["tokens"], "runs": {}})
        line["runs"][name] = row
    return list(lines.values())


def _of(contestant: str, value: Value) -> Value:
    def of_line(line: Mapping[str, Any]) -> float | None:
        run = line["runs"].get(contestant)
        return None if run is None else value(run)

    return of_line


def _delta_column(name: str, first: str, contestant: str, measure: Measure) -> Column:
    def delta(line: Row) -> Delta:
        before, after = (line["runs"].get(each) for each in (first, contestant))
        return Delta(None, None) if before is None or after is None else delta_of(before, after, measure.value)

    return DeltaColumn(name, lambda line: delta(line).ratio, Kind.RATIO, header=f"Δ {measure.name}", delta=delta)
