"""The columns of published tables: one line per run, or contestants side by side with Δ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvctl.render.view import Column, Kind, Row, View, Width

Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that contestants are compared by; `better` is what a reader hopes for."""

    name: str
    value: Value
    better: Literal["more", "less"]

    @property
    def kind(self) -> Kind:
        return Kind.RATE if self.better == "more" else Kind.DURATION


def milliseconds(section: str, name: str) -> Value:
    """A figure of one of a row's summaries, in nanoseconds."""

    def value(row: Row) -> int | None:
        number = row[section][name]
        return None if number is None else round(number * 1e6)

    return value


def _nanoseconds(name: str) -> Value:
    """A figure in milliseconds that not every row has."""

    def value(row: Row) -> int | None:
        number = row.get(name)
        return None if number is None else round(number * 1e6)

    return value


def tokens_per_s(row: Row) -> float | None:
    """Prompt tokens per second."""
    return float(row["tokens_per_s"])


def best_tokens_per_s(row: Row) -> float | None:
    """Prompt tokens per second of the best repeat."""
    return float(row["best"]["tokens_per_s"])


def best_ttft(row: Row) -> float | None:
    """Mean time to the first token in the best repeat, in nanoseconds."""
    number = row["best"]["ttft_ms"]["mean"]
    return None if number is None else round(number * 1e6)


ttft = milliseconds("ttft_ms", "mean")

_VERIFIED = Column("verified", kind=Kind.FLAG, styles={"False": "bold red", "True": "green"}, width=Width.NORMAL)

PIPELINE = View(
    "bench-pipeline-sweep",
    (
        Column("tokens", kind=Kind.COUNT),
        Column("concurrency", kind=Kind.COUNT, header="CONC"),
        Column("ratio", kind=Kind.NUMBER, header="T:C"),
        Column("pipeline"),
        Column("path", width=Width.WIDE),
        Column("transport", width=Width.WIDE),
        Column("compute", milliseconds("compute_ms", "p50"), Kind.DURATION, header="C"),
        Column("transfer", _nanoseconds("transfer_ms"), Kind.DURATION, header="T"),
        Column("groups", kind=Kind.COUNT, header="N"),
        Column("exposed", milliseconds("exposed_ms", "p50"), Kind.DURATION),
        Column("model", _nanoseconds("model_exposed_ms"), Kind.DURATION),
        Column("off_model", "off_model_ratio", Kind.RATIO, header="OFF MODEL"),
        Column("off_total", "off_total_ratio", Kind.RATIO, header="OF TOTAL"),
        Column("ttft_mean", ttft, Kind.DURATION, header="TTFT"),
        Column("ttft_p95", milliseconds("ttft_ms", "p95"), Kind.DURATION, header="P95"),
        Column("tokens_per_s", kind=Kind.RATE, header="TOK/S"),
        Column("delta", "ttft_delta_ratio", Kind.RATIO, header="Δ TTFT"),
        Column("decisions", "pipeline_decisions", Kind.MAP, Width.WIDE),
        _VERIFIED,
    ),
)

PIPELINE_COMPUTED = View(
    "bench-pipeline-computed",
    (
        Column("tokens", kind=Kind.COUNT),
        Column("path"),
        Column("pipeline"),
        Column("transport", width=Width.NORMAL),
        Column("rooms", kind=Kind.COUNT, width=Width.WIDE),
        Column("compute", milliseconds("compute_ms", "p50"), Kind.DURATION, header="C"),
        Column("slowdown", "compute_slowdown_ratio", Kind.RATIO, header="SLOWER BY"),
        Column("groups", kind=Kind.COUNT, header="N"),
        Column("hidden", milliseconds("hidden_ms", "mean"), Kind.DURATION),
        Column("exposed", milliseconds("exposed_ms", "p50"), Kind.DURATION),
        Column("ttft_mean", ttft, Kind.DURATION, header="TTFT"),
        Column("ttft_p95", milliseconds("ttft_ms", "p95"), Kind.DURATION, header="P95"),
        Column("delta", "ttft_delta_ratio", Kind.RATIO, header="Δ TTFT"),
        Column("tokens_per_s", kind=Kind.RATE, header="TOK/S"),
        Column("floor", "floor_ratio", Kind.NUMBER, Width.WIDE, header="TIMES FLOOR"),
        Column("decisions", "pipeline_decisions", Kind.MAP, Width.WIDE),
        _VERIFIED,
    ),
)

MULTI_TURN = View(
    "bench-multi-turn",
    (
        Column("path"),
        Column("transport", width=Width.NORMAL),
        Column("rooms", kind=Kind.COUNT, header="TURNS"),
        Column("prefix_hit", "prefix_hit_ratio", Kind.RATIO, header="HIT"),
        Column("rooms_per_s", kind=Kind.RATE, header="TURNS/S"),
        Column("tokens_per_s", kind=Kind.RATE, header="TOK/S"),
        Column("delta", "delta_ratio", Kind.RATIO, header="Δ GB/S"),
        Column("ttft_mean", ttft, Kind.DURATION, header="TTFT"),
        Column("ttft_p50", milliseconds("ttft_ms", "p50"), Kind.DURATION, header="P50"),
        Column("ttft_p95", milliseconds("ttft_ms", "p95"), Kind.DURATION, header="P95"),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
        _VERIFIED,
    ),
)

STRESS = View(
    "bench-stress",
    (
        Column("path"),
        Column("transport", width=Width.NORMAL),
        Column("concurrency", kind=Kind.COUNT, header="CONC"),
        Column("in_flight", kind=Kind.COUNT),
        Column("tokens", kind=Kind.COUNT),
        Column("rooms", kind=Kind.COUNT),
        Column("failed", kind=Kind.COUNT),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
        Column("delta", "delta_ratio", Kind.RATIO, header="Δ GB/S"),
        Column("ttft_mean", ttft, Kind.DURATION, header="TTFT"),
        Column("ttft_p99", milliseconds("ttft_ms", "p99"), Kind.DURATION, header="P99"),
        Column("ring_high_water", kind=Kind.BYTES, header="RING"),
        Column("fallbacks", kind=Kind.COUNT),
        _VERIFIED,
    ),
)

CP = View(
    "bench-cp",
    (
        Column("cp_size", kind=Kind.COUNT, header="CP"),
        Column("cp_mode", header="MODE"),
        Column("path"),
        Column("transport", width=Width.NORMAL),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
        Column("delta", "delta_ratio", Kind.RATIO, header="Δ GB/S"),
        Column("p50", milliseconds("latency_ms", "p50"), Kind.DURATION),
        Column("p99", milliseconds("latency_ms", "p99"), Kind.DURATION),
        Column("writes_per_room", kind=Kind.NUMBER, header="WRITES/ROOM"),
        Column("bytes_per_room", "bytes_per_room", Kind.BYTES, header="BYTES/ROOM"),
        _VERIFIED,
    ),
)


def comparison_view(
    name: str,
    by: tuple[str, str],
    measures: Sequence[Measure],
    contestants: Sequence[str],
    cut_short: Collection[str] = (),
) -> View:
    """Columns for lines from `side_by_side`: each measure of each contestant, then Δ against the first of them.

    Args:
        cut_short: contestants that did not run all rooms, so that people should see how many they ran.
    """
    field, header = by
    columns = [Column(field, kind=Kind.COUNT, header=header)]
    for measure in measures:
        word = measure.name.lower().replace("/", "_per_")
        for contestant in contestants:
            columns.append(
                Column(
                    f"{contestant}_{word}",
                    _of(contestant, measure),
                    measure.kind,
                    header=f"{contestant} {measure.name}",
                )
            )
            if contestant != contestants[0]:
                columns.append(
                    Column(
                        f"{contestant}_{word}_delta",
                        _delta(contestants[0], contestant, measure),
                        Kind.RATIO,
                        header=f"Δ {measure.name}",
                    )
                )
    columns += [
        Column(
            f"{contestant}_rooms",
            _rooms(contestant),
            Kind.COUNT,
            Width.CORE if contestant in cut_short else Width.WIDE,
            header=f"{contestant} rooms",
        )
        for contestant in contestants
    ]
    return View(f"bench-{name}", tuple(columns))


def side_by_side(rows: Sequence[Row], by: str) -> list[dict[str, Any]]:
    """One line per load, with its runs by contestant."""
    names = contestants(rows)
    lines: dict[Any, dict[str, Any]] = {}
    for row, name in zip(rows, names, strict=True):
        load = (row["concurrency"], row["tokens_drawn"])
        line = lines.setdefault(load, {by: row["concurrency"], "tokens": row["tokens"], "runs": {}})
        line["runs"][name] = row
    return list(lines.values())


def contestants(rows: Sequence[Row]) -> list[str]:
    """What to call each row among those it is compared with: only by what sets them apart."""
    chosen: list[str] = []
    for field in ("fleet", "transport", "cp_mode", "path", "pipeline", "observed"):
        known = {tuple(row.get(each) for each in chosen) for row in rows}
        if len({tuple(row.get(each) for each in (*chosen, field)) for row in rows}) > len(known):
            chosen.append(field)
    return [" ".join(_word(row, field) for field in chosen or ["path"]) for row in rows]


def _word(row: Row, field: str) -> str:
    if field == "observed":
        return "watched" if row[field] else "alone"
    return str(row[field])


def _rooms(contestant: str) -> Callable[[Row], int | None]:
    def value(line: Row) -> int | None:
        run = line["runs"].get(contestant)
        return None if run is None else int(run["rooms"])

    return value


def _of(contestant: str, measure: Measure) -> Value:
    def value(line: Row) -> float | None:
        run = line["runs"].get(contestant)
        return None if run is None else measure.value(run)

    return value


def _delta(base: str, contestant: str, measure: Measure) -> Value:
    def value(line: Row) -> float | None:
        before, after = _of(base, measure)(line), _of(contestant, measure)(line)
        return after / before - 1 if before and after is not None else None

    return value
