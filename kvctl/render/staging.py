"""Views of staging: one row per agent, ring allocation or gated part; the drawing of a ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.render import palette, units
from kvctl.render.bars import legend, merged
from kvctl.render.report import Line, Span
from kvctl.render.view import Column, Kind, Row, View, Width


def oldest(row: Row) -> Mapping[str, Any] | None:
    """Returns the oldest allocation, which holds back the watermark; None if there is none, or no ring."""
    ring = row.get("ring")
    allocations = ring["allocations"] if ring else []
    return next((allocation for allocation in allocations if not allocation["aside"]), None)


def _aside(row: Row) -> int | None:
    ring = row.get("ring")
    return sum(allocation["aside"] for allocation in ring["allocations"]) if ring else None


def _oldest(key: str) -> Callable[[Row], Any]:
    def value(row: Row) -> Any:
        found = oldest(row)
        return found and found[key]

    return value


def _used(row: Row) -> float | None:
    ring = row.get("ring")
    return min(1.0, ring["used_bytes"] / ring["size_bytes"]) if ring and ring["size_bytes"] else None


def _ahead(row: Row) -> int | None:
    """Returns the bytes granted beyond the size of the ring, which cannot be written yet."""
    ring = row.get("ring")
    return max(0, ring["used_bytes"] - ring["size_bytes"]) if ring else None


def _live(row: Row) -> int | None:
    ring = row.get("ring")
    return len(ring["allocations"]) if ring else None


GATED = View(
    "staging_gated",
    (
        Column("agent"),
        Column("room", Kind.ID),
        Column("peer"),
        Column("chunk", Kind.COUNT, Width.NORMAL),
        Column("layers", Kind.LAYERS, Width.NORMAL),
        Column("bytes", Kind.BYTES, Width.NORMAL, "Size of the part."),
        Column("age", Kind.DURATION, help="Time since the part was ready."),
        Column("waiting_for", help="A grant, or the round and tail that the watermark must pass."),
        Column("requests", Kind.COUNT, Width.NORMAL, "Grant requests sent, including resends."),
        Column("asked_age", Kind.DURATION, Width.WIDE, "Time since its grant was first requested."),
    ),
    identity=("agent", "room", "peer", "chunk", "layers"),
    sort=("-age",),
    empty="no gated parts",
)


STAGING = View(
    "staging",
    (
        Column("agent"),
        Column("role", width=Width.NORMAL, styles=palette.ROLES),
        Column("enabled", Kind.FLAG, Width.NORMAL, "Whether staging is configured."),
        Column("ring", Kind.BYTES, help="Size of the ring.", path="ring.size_bytes"),
        Column("used", Kind.RATIO, help="Share of the ring in use.", path=_used),
        Column("live", Kind.COUNT, help="Live allocations.", path=_live),
        Column("oldest", Kind.DURATION, help="Age of the oldest allocation.", path=_oldest("age_ns")),
        Column("oldest_room", Kind.ID, help="Room of the oldest allocation.", path=_oldest("room"), header="OF ROOM"),
        Column(
            "aside",
            Kind.COUNT,
            Width.NORMAL,
            "Allocations of unresponsive writers: the watermark has passed them, but their bytes are not reused.",
            path=_aside,
        ),
        Column(
            "gated",
            Kind.COUNT,
            help="Parts that wait for a grant or the watermark.",
            path=lambda row: len(row["gated"]),
        ),
        Column("buffers", Kind.BYTES, Width.NORMAL, "Size of the staging buffers.", path="buffers.size_bytes"),
        Column("pieces_used", Kind.COUNT, Width.NORMAL, "Pieces in use.", path="buffers.pieces_used"),
        Column("fallbacks", Kind.COUNT, Width.NORMAL, "Parts that were sent on another path.", path="fallbacks_total"),
        Column("oldest_state", width=Width.WIDE, help="State of the oldest allocation.", path=_oldest("state")),
        Column("ahead", Kind.BYTES, Width.WIDE, "Bytes granted beyond the size of the ring.", path=_ahead),
        Column("high_water", Kind.BYTES, Width.WIDE, "Most bytes in use at once.", path="ring.high_water_bytes"),
        Column("head", Kind.BYTES, Width.WIDE, "Offset of the next allocation.", path="ring.head_bytes"),
        Column("round", Kind.COUNT, Width.WIDE, "Rounds begun by the head.", path="ring.round"),
        Column("tail_round", Kind.COUNT, Width.WIDE, "Round of the watermark.", path="ring.watermark.round"),
        Column("tail", Kind.BYTES, Width.WIDE, "Offset of the watermark.", path="ring.watermark.tail"),
        Column("tail_age", Kind.DURATION, Width.WIDE, "Time since the watermark moved.", path="ring.watermark.age_ns"),
        Column("granted", Kind.COUNT, Width.WIDE, "Allocations granted since the start.", path="ring.granted_total"),
        Column("refused", Kind.COUNT, Width.WIDE, "Grants refused since the start.", path="ring.refused_total"),
        Column("revoked", Kind.COUNT, Width.WIDE, "Grants revoked since the start.", path="ring.revoked_total"),
        Column(
            "copies_waiting", Kind.COUNT, Width.WIDE, "Landed parts not yet in their pages.", path="ring.copies.waiting"
        ),
        Column("copying", Kind.DURATION, Width.WIDE, "Age of the oldest copy.", path="ring.copies.copying_age_ns"),
        Column("pieces", Kind.COUNT, Width.WIDE, "Number of buffer pieces.", path="buffers.pieces"),
        Column(
            "pieces_high_water", Kind.COUNT, Width.WIDE, "Most pieces in use at once.", path="buffers.pieces_high_water"
        ),
        Column("piece", Kind.BYTES, Width.WIDE, "Size of one buffer piece.", path="buffers.piece_bytes"),
    ),
    identity=("agent",),
    sort=("agent",),
    also=(("Gated parts", GATED),),
)

ALLOCATIONS = View(
    "staging_map",
    (
        Column("agent"),
        Column("serial", Kind.COUNT, Width.NORMAL, "Number of the allocation; never reused."),
        Column("room", Kind.ID),
        Column("writer", help="Name of the writing agent."),
        Column("chunk", Kind.COUNT, Width.NORMAL),
        Column("layers", Kind.LAYERS, Width.NORMAL),
        Column("state", help="granted, landed, revoking or quarantined.", styles=palette.ALLOCATION_STATES),
        Column(
            "aside",
            Kind.FLAG,
            Width.NORMAL,
            "Whether the watermark has passed the allocation because its writer does not respond.",
        ),
        Column("age", Kind.DURATION, help="Time since the grant."),
        Column("room_state", width=Width.NORMAL, help="State of the room on the decode rank.", styles=palette.STATES),
        Column(
            "posted",
            Kind.FLAG,
            Width.WIDE,
            "Whether the write is already posted, so that the writer cannot give the region back.",
        ),
        Column("size", Kind.BYTES, help="Size of the allocation.", path=lambda row: row["end"] - row["offset"]),
        Column("offset", Kind.BYTES, Width.WIDE, "Offset of the allocation in the ring.", path="offset"),
        Column("round", Kind.COUNT, Width.WIDE, "Round of the ring that the allocation belongs to."),
        Column("nonce", Kind.ID, Width.WIDE),
    ),
    identity=("agent", "serial"),
    sort=("agent", "-age"),
    empty="no live allocations",
)


# Glyphs get darker as data arrives; the two states that do not end without intervention are letters.
ALLOCATION_GLYPHS: dict[str, Span] = {
    "granted": ("░", ""),
    "landed": ("▒", "cyan"),
    "scattering": ("█", "green"),
    "revoking": ("r", "yellow"),
    "quarantined": ("Q", "bold red"),
}
_FREE: Span = ("·", "dim")
_UNKNOWN_STATE: Span = ("?", "bold red")
# Later states take precedence when several allocations share a cell.
_PRECEDENCE = ("granted", "scattering", "landed", "revoking", "quarantined")
_LABELS = 9
# An older allocation counts as stuck.
_PINNED_NS = 1_000_000_000


def draw_ring(answer: Mapping[str, Any], width: int) -> list[Line]:
    """Draws the ring of one decode rank. `answer`: the agent's answer to `staging`, whose `ring` is not None."""
    ring = answer["ring"]
    cells = max(10, width - _LABELS - 1)
    size = ring["size_bytes"]
    ratio = ring["used_bytes"] / size if size else None
    ahead = ", the rest granted ahead" if ring["used_bytes"] > size else ""
    head = ring["head_bytes"] % size if size else 0
    tail = ring["watermark"]["tail"] % size if size else 0
    lines: list[Line] = [
        [
            (answer["agent"], "bold"),
            (f"  {units.size(ring['used_bytes'])} of {units.size(size)} ({units.percent(ratio)}{ahead})", ""),
            (f", {len(ring['allocations'])} live, high water {units.size(ring['high_water_bytes'])}", ""),
        ],
        [(f"{'ring':<{_LABELS}}", "dim"), *merged(_bar(ring["allocations"], size, cells))],
        [(f"{'':<{_LABELS}}", ""), *_markers(head, tail, size, cells)],
        [
            ("head H", "bold"),
            (f" round {ring['round']} at {units.size(head)}   ", ""),
            ("watermark W", "bold"),
            (f" round {ring['watermark']['round']} at {units.size(tail)}", ""),
            (f", moved {units.duration(ring['watermark']['age_ns'])} ago" if ring["allocations"] else "", ""),
        ],
    ]
    aside = [each for each in ring["allocations"] if each["aside"]]
    if aside:
        nbytes = sum(each["end"] - each["offset"] for each in aside)
        writers = ", ".join(sorted({each["writer"] for each in aside}))
        lines.append(
            [
                ("aside", "bold"),
                (f" {len(aside)} of unresponsive writers ({writers}): {units.size(nbytes)}", "bold red"),
            ]
        )
    pin = oldest(answer)
    if pin is not None:
        stuck = pin["age_ns"] >= _PINNED_NS or pin["state"] == "quarantined"
        text = f"allocation {pin['serial']} of room {pin['room']} from {pin['writer']}, {pin['state']}"
        lines.append([("oldest", "bold"), (f" {text}, {units.duration(pin['age_ns'])}", "bold red" if stuck else "")])
    return lines


def allocation_legend() -> Line:
    """Returns the legend of the glyphs in the drawing of a ring."""
    return legend({"free": _FREE, **ALLOCATION_GLYPHS})


def _bar(allocations: Sequence[Mapping[str, Any]], size: int, cells: int) -> list[Span]:
    bar = [_FREE] * cells
    precedence = {state: rank for rank, state in enumerate(_PRECEDENCE)}
    for allocation in sorted(allocations, key=lambda each: precedence.get(each["state"], len(precedence))):
        glyph = ALLOCATION_GLYPHS.get(allocation["state"], _UNKNOWN_STATE)
        for first, last in _cells(allocation["offset"], allocation["end"], size, cells):
            bar[first:last] = [glyph] * (last - first)
    return bar


def _cells(offset: int, end: int, size: int, cells: int) -> list[tuple[int, int]]:
    """Returns the ranges of cells that the bytes [offset, end) cover: two ranges if they cross the end of the ring.

    Each range has at least one cell.
    """
    if size <= 0 or end <= offset:
        return []
    start = offset % size
    stop = start + end - offset
    runs = [(start, min(stop, size))] + ([(0, min(stop - size, size))] if stop > size else [])
    return [(low * cells // size, max(low * cells // size + 1, -(-high * cells // size))) for low, high in runs]


def _markers(head: int, tail: int, size: int, cells: int) -> list[Span]:
    row = [" "] * cells
    places = {"W": tail, "H": head}
    at = {letter: min(cells - 1, place * cells // size) if size else 0 for letter, place in places.items()}
    if at["W"] == at["H"]:
        row[at["W"]] = "*"
        return [("".join(row).rstrip(), "bold"), (" H and W" if at["W"] < cells - 10 else "", "dim")]
    for letter, place in at.items():
        row[place] = letter
    return [("".join(row).rstrip(), "bold")]
