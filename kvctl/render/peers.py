"""Views of connections: one row per agent and peer, and the matrix of prefill and decode agents.

The two ends of a connection can report different states, and this difference is often the fault. The matrix therefore
shows the worse of the two states, and has a state of its own for a connection that only one end knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvctl.client.names import natural_key
from kvctl.render import palette
from kvctl.render.report import Line, Span
from kvctl.render.view import Column, Kind, Row, View, Width

PEERS = View(
    "peers",
    (
        Column("agent"),
        Column("peer"),
        Column("state", help="connecting, ready, suspect, lost or refused.", styles=palette.PEER_STATES),
        Column("last_heard", Kind.DURATION, help="Time since the last message from the peer.", header="HEARD"),
        Column("rtt", Kind.DURATION, Width.NORMAL),
        Column("lane", width=Width.NORMAL),
        Column("rooms", Kind.COUNT, help="Active rooms."),
        Column("errors", Kind.COUNT, path="errors_total"),
        Column("control_queue", Kind.COUNT, Width.NORMAL, "Control messages not sent yet.", header="QUEUE"),
        Column("differences", Kind.LIST),
        Column("last_error", Kind.SENTENCE, help="Last error with this peer."),
        Column("lane_gb_per_s", Kind.RATE, Width.WIDE, "Rate of one large write, in GB/s.", header="LANE GB/S"),
        Column(
            "lane_descriptor",
            Kind.DURATION,
            Width.WIDE,
            "Time per scattered descriptor of 512 bytes.",
            header="DESCRIPTOR",
        ),
        Column("lane_measured_age", Kind.DURATION, Width.WIDE, "Time since the measurement.", header="MEASURED"),
        Column(
            "lane_kind", width=Width.WIDE, help="Type of GPU connection: cuda_ipc, rdma or tcp.", header="CARRIED BY"
        ),
        Column(
            "lane_source", width=Width.WIDE, help="Origin of CARRIED BY: engine, or rate of a write.", header="TOLD BY"
        ),
        Column("lane_direct", width=Width.WIDE, header="DIRECT BY"),
        Column(
            "lane_why_not", width=Width.WIDE, help="Why the peer's GPU memory is not mapped here.", header="NOT DIRECT"
        ),
        Column(
            "same_host",
            Kind.FLAG,
            Width.WIDE,
            "Whether the peer's process is visible on this host, so that its end can be proven.",
        ),
        Column("role", width=Width.WIDE, help="Role of the peer.", styles=palette.ROLES),
        Column("clock_offset", Kind.DURATION, Width.WIDE),
        Column("clock_error", Kind.DURATION, Width.WIDE),
        Column(
            "watermark_sent", Kind.LIST, Width.WIDE, "Decode rank: round, tail and sequence of the watermark last sent."
        ),
        Column(
            "watermark_seen",
            Kind.LIST,
            Width.WIDE,
            "Prefill rank: round, tail and sequence of the watermark last received.",
        ),
        Column("incarnation", width=Width.WIDE),
        Column("endpoint", width=Width.WIDE),
        Column("process", width=Width.WIDE, help="Process id and host of the peer."),
        Column(
            "lane_evidence",
            Kind.LIST,
            Width.WIDE,
            "What is known of the lane, and whether from the engine, the rate, a mapping, or the choice of devices.",
            header="EVIDENCE",
        ),
        Column(
            "former",
            Kind.LIST,
            Width.WIDE,
            "Earlier processes with this name that may still write here, because their end is not proven.",
        ),
    ),
    identity=("agent", "peer"),
    sort=("agent", "peer"),
    empty="no peers",
)


ONE_SIDED = "one-sided"
NO_LINK = "none"
# States, worst first: if the two ends differ, the worse state counts.
_RANKING = ("refused", "lost", "suspect", "connecting", ONE_SIDED, "ready", NO_LINK)
_GLYPHS: dict[str, Span] = {
    "ready": ("●", palette.PEER_STATES["ready"]),
    "suspect": ("◐", palette.PEER_STATES["suspect"]),
    "connecting": ("○", palette.PEER_STATES["connecting"]),
    ONE_SIDED: ("◑", "yellow"),
    "lost": ("✕", palette.PEER_STATES["lost"]),
    "refused": ("≠", palette.PEER_STATES["refused"]),
    NO_LINK: ("·", "dim"),
}

MATRIX = View(
    "peers.matrix",
    (
        Column("prefill", help="Name of the prefill agent."),
        Column("decode", help="Name of the decode agent."),
        Column(
            "state",
            help="State of the pair: the worse of the two.",
            styles={**palette.PEER_STATES, ONE_SIDED: "yellow", NO_LINK: "dim"},
        ),
        Column(
            "prefill_sees", width=Width.NORMAL, help="State that the prefill agent reports.", styles=palette.PEER_STATES
        ),
        Column(
            "decode_sees", width=Width.NORMAL, help="State that the decode agent reports.", styles=palette.PEER_STATES
        ),
        Column("lane"),
        Column("lane_direct", width=Width.WIDE, header="DIRECT BY"),
        Column("rtt", Kind.DURATION),
        Column("errors", Kind.COUNT, path="errors_total"),
        Column("differences", Kind.LIST),
    ),
    sort=("prefill", "decode"),
    empty="no pair of a prefill and a decode agent",
)


def gravity(state: str) -> int:
    """Returns the place of a state among all, the worst first."""
    return _RANKING.index(state) if state in _RANKING else 0


def pairs(roles: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row of MATRIX for every pair of a prefill and a decode agent.

    Args:
        roles: roles of the agents that answered, by name; agents known only as a peer are added.
    """
    known, reports = dict(roles), {}
    for row in rows:
        reports[row["agent"], row["peer"]] = row
        known.setdefault(row["peer"], row["role"])
    prefill, decode = (sorted(name for name, role in known.items() if role == each) for each in ("prefill", "decode"))
    return [
        _pair(one, other, reports.get((one, other)), reports.get((other, one)), roles)
        for one in prefill
        for other in decode
    ]


def _pair(
    prefill: str,
    decode: str,
    by_prefill: Mapping[str, Any] | None,
    by_decode: Mapping[str, Any] | None,
    asked: Mapping[str, str],
) -> dict[str, Any]:
    ends = [end for end in (by_prefill, by_decode) if end is not None]
    states = [end["state"] for end in ends] or [NO_LINK]
    if len(ends) == 1 and prefill in asked and decode in asked:
        states.append(ONE_SIDED)
    differences = [text for end in ends for text in end["differences"]]
    errors = [end["errors_total"] for end in ends]
    return {
        "prefill": prefill,
        "decode": decode,
        "state": min(states, key=gravity),
        "prefill_sees": by_prefill["state"] if by_prefill else None,
        "decode_sees": by_decode["state"] if by_decode else None,
        "lane": next((end["lane"] for end in ends if end["lane"]), None),
        "lane_direct": by_prefill.get("lane_direct") if by_prefill else None,
        "rtt_ns": next((end["rtt_ns"] for end in ends if end["rtt_ns"] is not None), None),
        "errors_total": None if None in errors else sum(errors),
        "differences": list(dict.fromkeys(differences)),
    }


def draw_matrix(rows: Sequence[Row], width: int) -> list[Line]:
    """Draws the pairs as a grid: a line per prefill rank, a column per decode rank; splits a grid that is too wide."""
    if not rows:
        return [[(MATRIX.empty, "dim")]]
    cells = {(row["prefill"], row["decode"]): row for row in rows}
    prefill, decode = (sorted({row[side] for row in rows}, key=natural_key) for side in ("prefill", "decode"))
    lanes = _letters(row["lane"] for row in rows)
    margin = min(max(map(len, prefill)), max(8, width // 3))
    headings, prefix = _headings(decode)
    size = max(1 + (len(lanes) > 1), *map(len, headings)) + 1
    per_grid = max(1, (width - margin - 1) // size)
    lines: list[Line] = []
    for first in range(0, len(decode), per_grid):
        names, heads = decode[first : first + per_grid], headings[first : first + per_grid]
        if lines:
            lines.append([("", "")])
        if prefix:
            lines.append([(f"{'':<{margin}}  {prefix}…", "bold")])
        lines.append([(f"{'':<{margin}}  " + "".join(f"{head:<{size}}" for head in heads).rstrip(), "bold")])
        for name in prefill:
            label = name if len(name) <= margin else f"{name[: margin - 1]}…"
            line: list[Span] = [(f"{label:<{margin}}  ", "")]
            for other in names:
                line += _matrix_cell(cells.get((name, other)), lanes, size)
            lines.append(line)
    return [*lines, [("", "")], *_matrix_legend(rows, lanes)]


def _matrix_cell(row: Row | None, lanes: Mapping[str, str], size: int) -> list[Span]:
    state = row["state"] if row is not None else NO_LINK
    glyph, style = _GLYPHS.get(state, ("?", "bold red"))
    lane = lanes.get(row["lane"] or "", "") if row is not None and len(lanes) > 1 else ""
    return [(glyph, style), (f"{lane:<{size - 1}}", "dim")]


def _letters(lanes: Iterable[str | None]) -> dict[str, str]:
    """Assigns each lane a letter of its name, or a digit if all its letters are taken."""
    letters: dict[str, str] = {}
    for lane in sorted({lane for lane in lanes if lane}):
        free = (each for each in (*lane, *"0123456789") if each.isalnum() and each not in letters.values())
        letters[lane] = next(free, "?")
    return letters


def _headings(names: Sequence[str]) -> tuple[list[str], str]:
    """Returns the names without the prefix that all share, as column headings, and that prefix."""
    size = next((i for i, each in enumerate(zip(*names, strict=False)) if len(set(each)) > 1), 0)
    prefix = names[0][:size].rstrip("0123456789")
    return [name[len(prefix) :] or name for name in names], prefix


def _matrix_legend(rows: Sequence[Row], lanes: Mapping[str, str]) -> list[Line]:
    counts = {state: sum(row["state"] == state for row in rows) for state in reversed(_RANKING)}
    spans: list[Span] = []
    for state, count in counts.items():
        if count:
            spans += [_GLYPHS[state], (f" {count} {'no link' if state == NO_LINK else state}   ", "dim")]
    lines: list[Line] = [spans]
    if len(lanes) > 1:
        lines.append([("lanes: " + "  ".join(f"{letter} {lane}" for lane, letter in lanes.items()), "dim")])
    elif lanes:
        lines.append([(f"lane: {next(iter(lanes))}", "dim")])
    for row in rows:
        if row["differences"]:
            lines.append(
                [
                    ("≠ ", palette.PEER_STATES["refused"]),
                    (f"{row['prefill']} and {row['decode']}: {'; '.join(row['differences'])}", ""),
                ]
            )
    return lines
