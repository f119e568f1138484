"""Views of `kvctl demo`: one line per second, and the list of faults."""

from __future__ import annotations

from kvctl.render.view import Column, Kind, View, Width

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

FAULTS = View(
    "demo-faults",
    (
        Column("fault"),
        Column("kind", width=Width.WIDE),
        Column("does", Kind.SENTENCE),
        Column("code", width=Width.WIDE, header="HEALTH CODE"),
    ),
)
