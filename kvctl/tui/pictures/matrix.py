"""Who reaches whom: prefill ranks down, decode ranks across, one glyph for the worse of the two directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.render import palette
from kvctl.render.report import Line, Span
from kvctl.render.view import Row

# From bad to good; shapes differ, so that colour is not needed.
GLYPHS: Mapping[str, str] = {
    "refused": "✗",
    "lost": "✗",
    "suspect": "◐",
    "connecting": "○",
    "ready": "●",
}
_DIFFERS: Span = ("≠", "bold red")
_UNKNOWN: Span = ("·", "dim")


@dataclass(frozen=True, slots=True)
class Matrix:
    """All pairs.

    Attributes:
        pairs: by (prefill, decode), what each end says of the other: one row or two.
    """

    prefill: Sequence[str]
    decode: Sequence[str]
    pairs: Mapping[tuple[str, str], Sequence[Row]]

    def glyph(self, prefill: str, decode: str) -> Span:
        """The pair in one cell."""
        rows = self.pairs.get((prefill, decode), ())
        if not rows:
            return _UNKNOWN
        state = min((row["state"] for row in rows), key=lambda state: _severity(state))
        if any(row["differences"] for row in rows) and state not in {"lost", "refused"}:
            return _DIFFERS
        return (GLYPHS.get(state, "?"), palette.PEER_STATES.get(state, "bold red"))


def matrix(rows: Sequence[Row], roles: Mapping[str, str]) -> Matrix:
    """Sorts rows of `peers` into pairs; agents that only others speak of are in it, too."""
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        ends = (row["agent"], row["peer"])
        pair = ends if row["role"] == "decode" else ends[::-1]
        pairs.setdefault(pair, []).append(row)
    prefill = sorted(
        {pair[0] for pair in pairs} | {name for name, role in roles.items() if role == "prefill"}, key=_order
    )
    decode = sorted(
        {pair[1] for pair in pairs} | {name for name, role in roles.items() if role == "decode"}, key=_order
    )
    return Matrix(prefill, decode, pairs)


def draw(found: Matrix, chosen: tuple[str, str] | None) -> list[Line]:
    """The matrix; the chosen pair's cell, row and column stand out."""
    if not found.prefill or not found.decode:
        return [[("no pairs: there must be a prefill and a decode rank", "dim")]]
    label = max(len(name) for name in found.prefill) + 2
    lines: list[Line] = []
    short = _short(found.decode)
    for row in range(max(map(len, short))):
        spans: list[Span] = [(" " * label, "")]
        for name, letters in zip(found.decode, short, strict=True):
            style = "bold accent" if chosen and name == chosen[1] else "dim"
            spans.append((f" {letters[row] if row < len(letters) else ' '} ", style))
        lines.append(spans)
    for prefill in found.prefill:
        mine = chosen is not None and prefill == chosen[0]
        spans = [(f"{prefill:<{label}}", "bold accent" if mine else "")]
        for decode in found.decode:
            glyph, style = found.glyph(prefill, decode)
            here = mine and chosen is not None and decode == chosen[1]
            spans.append((f"[{glyph}]", f"{style} cursor") if here else (f" {glyph} ", style))
        lines.append(spans)
    return lines


def legend() -> Line:
    """What the glyphs mean."""
    spans: list[Span] = []
    for state, glyph in reversed(list(GLYPHS.items())):
        if state != "lost":
            words = "lost, refused" if state == "refused" else state
            spans += [(glyph, palette.PEER_STATES.get(state, "")), (f" {words}  ", "dim")]
    return [*spans, _DIFFERS, (" incompatible  ", "dim"), _UNKNOWN, (" never met", "dim")]


def _severity(state: str) -> int:
    return list(GLYPHS).index(state) if state in GLYPHS else 0


def _short(names: Sequence[str]) -> list[str]:
    """Names read from top to bottom, without what they all begin with; the whole name of one alone."""
    common = 0
    while len(set(names)) > 1 and len({name[: common + 1] for name in names}) == 1:
        common += 1
    return [f"{name[0]}{name[common:]}" if common > 1 else name for name in names]


def _order(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    tail = name[len(head) :]
    return (head, int(tail) if tail else -1, name)
