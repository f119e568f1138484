"""A small table within a picture."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.render.report import Line
from kvctl.render.terminal import fitted, natural, table_header, table_row
from kvctl.render.view import Row, View, Width


def grid(view: View, rows: Sequence[Row], width: int) -> list[Line]:
    """The rows in columns that fit the width."""
    if not rows:
        return [[(view.empty, "dim")]]
    columns = [column for column in view.columns if column.width is not Width.WIDE]
    widths, _ = fitted(natural(columns, rows), rows, width)
    return [table_header(widths), *(table_row(row, widths) for row in rows)]
