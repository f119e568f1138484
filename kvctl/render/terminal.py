"""Renders reports for people: tables that fit the terminal, pictures, colour where it is wanted.

Text is made first and written afterwards, so that a redraw does not flicker and a closed pipe is met in one place.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from kvctl.render.kinds import Kind
from kvctl.render.report import Block, Grid, Line, Span
from kvctl.render.sanitize import one_line, printable
from kvctl.render.view import Column, Row, Width

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
    lines: list[Line] = []
    for index, (block, chosen) in enumerate(zip(blocks, columns, strict=True)):
        if index:
            lines.append([])
        lines += _table(block, chosen, width) if isinstance(block, Grid) else block.lines
    return _written(lines, colour)


def _written(lines: Sequence[Line], colour: bool) -> str:
    """The lines as text, in colour if wanted; spaces at their ends are left out."""
    safe = [[(printable(text), style) for text, style in line] for line in lines]
    if colour:
        return _coloured(safe)
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in safe)


def _coloured(lines: Sequence[Line]) -> str:
    from rich.console import Console  # 40 ms, which output without colour does not need
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        width=_NO_LIMIT,  # widths are decided here
        force_terminal=True,
        color_system="standard",
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _table(grid: Grid, columns: Sequence[Column], width: int | None) -> list[Line]:
    lines: list[Line] = [[(grid.title, "bold")]] if grid.title else []
    if not grid.rows:
        return [*lines, [(grid.view.empty, "dim")]]
    whole = natural(columns, grid.rows)
    widths, hidden = fitted(whole, grid.rows, width)
    lines += [table_header(widths), *(table_row(row, widths) for row in grid.rows)]
    cut = [column for column, cells in widths.items() if cells < whole[column]]
    said = [
        f"{what} at this width: {', '.join(column.name for column in those)}"
        for what, those in (("hidden", hidden), ("cut", cut))
        if those
    ]
    return [*lines, [(f"{'; '.join(said)} (-o wide shows all)", "dim")]] if said else lines


def table_header(widths: Mapping[Column, int], marks: Mapping[Column, str] | None = None) -> Line:
    """Titles above their columns; `marks` follow some of them."""
    return [
        span
        for column, cells in widths.items()
        for span in _cell(column, column.title + (marks or {}).get(column, ""), cells, "bold")
    ]


def table_row(row: Row, widths: Mapping[Column, int], texts: Mapping[Column, str] | None = None) -> list[Span]:
    """One row; `texts` replace what some columns would print."""
    return [
        span
        for column, cells in widths.items()
        for span in _cell(
            column, (texts or {}).get(column) or one_line(column.human(row)), cells, style_of(column, row)
        )
    ]


def _cell(column: Column, text: str, cells: int, style: str) -> list[Span]:
    """A text in its cells and the gap after it: numbers at the right, what is too long cut."""
    size = cell_len(text)
    if size > cells:
        text, size = set_cell_size(text, cells - 1) + "…", cells
    space = " " * (cells - size)
    gap = (" " * GAP, "")
    return [(space, ""), (text, style), gap] if column.kind.value.numeric else [(text, style), (space, ""), gap]


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


def stream_header(columns: Sequence[Column], gap: str = " ") -> str:
    """Header of a stream of lines."""
    return gap.join(_padded(column, column.title) for column in columns).rstrip()


def stream_line(columns: Sequence[Column], row: Row, colour: bool, gap: str = " ") -> str:
    """One line of a stream; columns that do not declare a width follow unpadded."""
    cells = [(_padded(column, one_line(column.human(row))), style_of(column, row)) for column in columns]
    line = [span for cell in cells for span in (cell, (gap, ""))][:-1]
    return _written([line], colour).removesuffix("\n")


def _padded(column: Column, text: str) -> str:
    return f"{text:>{column.fixed}}" if column.kind.value.numeric else f"{text:<{column.fixed}}"
