"""Tables that the presets print, with a line per run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvctl.lab.bench.views import COLUMNS, DeltaColumn, nanoseconds
from kvctl.render.view import Column, Kind, View, Width

_PRESET_COLUMNS = {
    column.name: column
    for column in (
        Column("tokens", Kind.COUNT),
        Column("in_flight", Kind.COUNT),
        Column("cp_size", Kind.COUNT, header="CP"),
        Column("compute", Kind.DURATION, path=nanoseconds("compute_ms", "p50"), header="C"),
        Column("exposed", Kind.DURATION, path=nanoseconds("exposed_ms", "p50")),
        Column("ttft_p50", Kind.DURATION, path=nanoseconds("ttft_ms", "p50"), header="P50"),
        Column("ttft_p99", Kind.DURATION, path=nanoseconds("ttft_ms", "p99"), header="P99"),
        Column("tokens_per_s", Kind.RATE, header="TOK/S"),
        Column("decisions", Kind.MAP, Width.WIDE, path="pipeline_decisions"),
        Column("bytes_per_room", Kind.BYTES, path="bytes_per_room", header="BYTES/ROOM"),
    )
} | {"ttft_delta": DeltaColumn("ttft_delta", Kind.RATIO, path="ttft_delta_ratio", header="Δ TTFT")}


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
_STAGING = "concurrency path tokens_per_s delta ttft_mean ttft_delta rooms transport gb_per_s verified"
STAGING = _table("bench-staging", _STAGING, wide=("transport", "gb_per_s"), delta="Δ TOK/S", ttft_mean="TTFT")
PROMPTS = replace(STAGING, columns=(replace(STAGING.columns[0], header="PROMPTS"), *STAGING.columns[1:]))

PIPELINE = _table(
    "bench-pipeline-sweep",
    "tokens path pipeline transport rooms compute slowdown groups hidden exposed ttft_mean ttft_p95 ttft_delta "
    "tokens_per_s floor decisions verified",
    normal=("transport", "slowdown", "verified"),
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
