"""Renders reports for people: tables that fit the terminal, pictures, colour where it is wanted.

Text is made first and written afterwards, so that a redraw does not flicker and a closed pipe is met in one place.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from kvctl.views.kinds import Kind
from kvctl.views.printable import one_line, printable
from kvctl.views.report import Block, Grid, Line
from kvctl.views.view import Column, Row, Width

GAP = 2
# A text that must shrink keeps this much, and one this long is not worth a column of its own being hidden for.
_LEAST = 6
_ENOUGH = 24
_NO_LIMIT = 100_000


def render(blocks: Sequence[Block], columns: Sequence[Sequence[Column]], width: int | None, colour: bool) -> str:
    """Draws blocks one below the other, an empty line between them.

    Args:
        columns: for each block, the columns of its table (ignored for text).
        width: of the terminal; None cuts nothing off, however long the lines get.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=_NO_LIMIT,  # widths are decided here, cells are cut there
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for index, (block, chosen) in enumerate(zip(blocks, columns, strict=True)):
        if index:
            console.print()
        if isinstance(block, Grid):
            _print_table(console, block, chosen, width)
        else:
            for line in block.lines:
                console.print(_assembled(line), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _assembled(line: Line) -> RichText:
    return RichText.assemble(*((printable(text), style) for text, style in line))


def _print_table(console: Console, grid: Grid, columns: Sequence[Column], width: int | None) -> None:
    if grid.title:
        console.print(RichText(printable(grid.title), "bold"), soft_wrap=True)
    if not grid.rows:
        console.print(RichText(grid.view.empty, "dim"), soft_wrap=True)
        return
    whole = natural(columns, grid.rows)
    widths, hidden = fitted(whole, grid.rows, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for column, cells in widths.items():
        table.add_column(
            column.title,
            justify="right" if column.kind.value.numeric else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=cells,
        )
    for row in grid.rows:
        table.add_row(*(RichText(one_line(column.human(row)), style_of(column, row)) for column in widths))
    console.print(table, crop=False)
    cut = [column for column, cells in widths.items() if cells < whole[column]]
    said = [
        f"{what} at this width: {', '.join(column.name for column in those)}"
        for what, those in (("hidden", hidden), ("cut", cut))
        if those
    ]
    if said:
        console.print(RichText(f"{'; '.join(said)} (-o wide shows all)", "dim"), soft_wrap=True)


def style_of(column: Column, row: Row) -> str:
    """Terminal style of one value."""
    value = column.value(row)
    styles = column.styles or {}
    return styles.get(str(value), styles.get("", "")) if value is not None else "dim"


def natural(columns: Sequence[Column], rows: Sequence[Row]) -> dict[Column, int]:
    """Cells that each column would take if there were no end of them."""
    return {
        column: max([cell_len(column.title), *(cell_len(one_line(column.human(row))) for row in rows)])
        for column in columns
    }


def fitted(
    widths: Mapping[Column, int], rows: Sequence[Row], width: int | None
) -> tuple[dict[Column, int], list[Column]]:
    """Chooses columns and their widths, given their natural ones: (width by column, hidden columns).

    Columns that know nothing go first, then ordinary ones, the right before the left; then long texts are shortened.
    Numbers are never cut: half a number is a wrong number.
    """
    columns, widths = list(widths), dict(widths)
    if width is None:
        return widths, []
    hidden: list[Column] = []
    while _needed(widths, _ENOUGH) > width and (column := _least_missed(widths, rows)) is not None:
        del widths[column]
        hidden.append(column)
    while (excess := _needed(widths) - width) > 0:
        longest = max(widths, key=lambda column: widths[column] if _elastic(column) else 0)
        room = widths[longest] - _LEAST
        if not _elastic(longest) or room <= 0:
            break
        # Down to the next longest, so that texts of similar length share the loss.
        others = [widths[column] for column in widths if column is not longest and _elastic(column)]
        widths[longest] -= max(1, min(excess, room, widths[longest] - max(others, default=0)))
    return widths, [column for column in columns if column in hidden]


def _least_missed(widths: Mapping[Column, int], rows: Sequence[Row]) -> Column | None:
    ordinary = [column for column in reversed(list(widths)) if column.width is not Width.CORE]
    core = [column for column in reversed(list(widths)) if column.width is Width.CORE]
    silent = [column for column in (*ordinary, *core) if all(column.value(row) in (None, "", [], {}) for row in rows)]
    return next(iter(silent or ordinary), None)


def _elastic(column: Column) -> bool:
    return column.kind in {Kind.TEXT, Kind.LIST, Kind.MAP}


def _needed(widths: Mapping[Column, int], most: int | None = None) -> int:
    """Cells of a whole row; `most` is what an elastic column counts for at most."""
    cells = (min(size, most) if most and _elastic(column) else size for column, size in widths.items())
    return sum(cells) + GAP * (len(widths) - 1)


def stream_header(columns: Sequence[Column]) -> str:
    """Header of a stream of lines."""
    return " ".join(_padded(column, column.title) for column in columns).rstrip()


def stream_line(columns: Sequence[Column], row: Row, colour: bool) -> str:
    """One line of a stream; columns that do not declare a width follow unpadded."""
    cells = [(_padded(column, one_line(column.human(row))), style_of(column, row)) for column in columns]
    spans = [span for cell in cells for span in (cell, (" ", ""))][:-1]
    if not colour:
        return "".join(text for text, _ in spans).rstrip()
    out = io.StringIO()
    console = Console(file=out, width=_NO_LIMIT, force_terminal=True, color_system="standard", highlight=False)
    console.print(_assembled(spans), soft_wrap=True, end="")
    return out.getvalue()


def _padded(column: Column, text: str) -> str:
    return f"{text:>{column.fixed}}" if column.kind.value.numeric else f"{text:<{column.fixed}}"
