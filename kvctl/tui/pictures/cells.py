"""A declared view as lines: the header and a row each, in columns that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from kvctl.views.printable import one_line
from kvctl.views.report import Line, Span
from kvctl.views.terminal import GAP, fitted, natural, style_of
from kvctl.views.view import Column, Row, View, Width


def header(widths: Mapping[Column, int], marks: Mapping[Column, str] | None = None) -> Line:
    """Titles above their columns; `marks` follow some of them."""
    return [
        (_gapped(_placed(column, column.title + (marks or {}).get(column, ""), widths)), "bold") for column in widths
    ]


def cells(row: Row, widths: Mapping[Column, int], texts: Mapping[Column, str] | None = None) -> list[Span]:
    """One row; `texts` stand for what some columns would say."""
    spans = []
    for column in widths:
        text = (texts or {}).get(column) or one_line(column.human(row))
        spans.append((_gapped(_placed(column, text, widths)), style_of(column, row)))
    return spans


def grid(view: View, rows: Sequence[Row], width: int) -> list[Line]:
    """A small table within a picture."""
    if not rows:
        return [[(view.empty, "dim")]]
    columns = [column for column in view.columns if column.width is not Width.WIDE]
    widths, _ = fitted(natural(columns, rows), rows, width)
    return [header(widths), *(cells(row, widths) for row in rows)]


def _placed(column: Column, text: str, widths: Mapping[Column, int]) -> str:
    room = widths[column]
    size = cell_len(text)
    if size > room:
        return set_cell_size(text, room - 1) + "…"
    return " " * (room - size) + text if column.kind.value.numeric else text + " " * (room - size)


def _gapped(text: str) -> str:
    return text + " " * GAP
