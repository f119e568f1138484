"""View of a preflight: one row per pair of ranks, and the matrix of their rates."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.client.names import natural_key
from kvctl.render import palette
from kvctl.render.report import Line, Span
from kvctl.render.units import three_digits
from kvctl.render.view import Column, Kind, Row, View, Width

PREFLIGHT = View(
    "preflight",
    (
        Column("prefill", help="Prefill rank, which writes."),
        Column("decode", help="Decode rank, whose memory is written."),
        Column("prefill_host", width=Width.NORMAL, help="Host of the prefill rank.", header="FROM"),
        Column("decode_host", width=Width.NORMAL, help="Host of the decode rank.", header="TO"),
        Column(
            "verdict",
            Kind.VERDICT,
            help="ok; warning: slower than other pairs; critical: no bytes, or wrong ones; unknown: not measured.",
            styles=palette.VERDICTS,
        ),
        Column("gb_per_s", Kind.RATE, help="Rate of one large write, in GB/s.", header="GB/S"),
        Column("latency", Kind.DURATION, help="Shortest time of a write of 64 bytes."),
        Column("lane", help="rdma, tcp, cuda_ipc or tcp through the host; empty: no network device, or unknown."),
        Column(
            "devices",
            Kind.LIST,
            help="Network devices of the prefill host that carried the bytes.",
            path=lambda row: list(row["carried"]),
        ),
        Column(
            "lane_source",
            width=Width.NORMAL,
            help="Origin of LANE: counters of the devices, engine, or rate.",
            header="KNOWN FROM",
        ),
        Column("problem", Kind.SENTENCE, help="What is wrong with the pair."),
        Column("others_gb_per_s", Kind.RATE, Width.WIDE, "Rate of the fast pairs of this kind.", header="OTHERS GB/S"),
        Column("first", Kind.DURATION, Width.WIDE, "Time of the first write, which waits for the connection."),
        Column("rtt", Kind.DURATION, Width.WIDE, "Round trip of a small TCP message between the hosts."),
        Column("mtu", Kind.COUNT, Width.WIDE, "Largest packet on the path, as the kernel knows it, in bytes."),
        Column("carried", Kind.MAP, Width.WIDE, "Bytes that each device carried meanwhile."),
        Column("moved", Kind.BYTES, Width.WIDE, "Bytes that the prefill rank wrote meanwhile."),
    ),
    sort=("prefill", "decode"),
    empty="no pair of ranks transfers",
)

_MARKS = {"warning": "!", "critical": "✗", "unknown": "?"}


def draw_rates(rows: Sequence[Row], width: int) -> list[Line]:
    """Draws the rates in GB/s: a line per prefill rank, a column per decode rank; odd pairs are marked.

    Returns no lines if the matrix is wider than `width`.
    """
    cells = {(row["prefill"], row["decode"]): row for row in rows}
    prefill, decode = (sorted({row[side] for row in rows}, key=natural_key) for side in ("prefill", "decode"))
    margin = max(map(len, ("GB/s", *prefill)), default=0)
    size = max((8, *(len(name) + 1 for name in decode)))
    if not rows or margin + 1 + size * len(decode) > width:
        return []
    lines: list[Line] = [[(f"{'GB/s':<{margin}} " + "".join(f"{name:>{size}}" for name in decode), "bold")]]
    for name in prefill:
        lines.append([(f"{name:<{margin}} ", ""), *(_cell(cells.get((name, other)), size) for other in decode)])
    return lines


def _cell(row: Row | None, size: int) -> Span:
    if row is None:
        return f"{'·':>{size}}", "dim"
    rate = "" if row["gb_per_s"] is None else three_digits(row["gb_per_s"])
    return f"{_MARKS.get(row['verdict'], '') + rate:>{size}}", palette.VERDICTS[row["verdict"]]
