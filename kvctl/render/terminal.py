"""Renders reports for terminals: tables that fit the width, pictures, colours.

The whole text is built before it is written, so that a redraw does not flicker and a closed pipe is handled in one
place.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.cells import cell_len, set_cell_size

from kvctl.render.report import Block, Grid, Line, Span
from kvctl.render.sanitize import one_line, printable
from kvctl.render.view import Column, Kind, Row, Width

GAP = 2
_MIN_TEXT = 6  # of a shortened text
# Widths above which texts are shortened, and sentences continued on a further line, before a column is hidden.
_READABLE = {Kind.TEXT: 24, Kind.LIST: 24, Kind.MAP: 24, Kind.SENTENCE: 36}


def render(blocks: Sequence[Block], columns: Sequence[Sequence[Column]], width: int | None, colour: bool) -> str:
    """Formats blocks with an empty line between them.

    Args:
        columns: for each block, the columns of its table; ignored for texts.
        width: width of the terminal, in columns; None for unlimited.
    """
    lines: list[Line] = []
    for index, (block, chosen) in enumerate(zip(blocks, columns, strict=True)):
        if index:
            lines.append([])
        lines += _table(block, chosen, width) if isinstance(block, Grid) else block.lines
    return _written(lines, colour)


def _written(lines: Sequence[Line], colour: bool) -> str:
    """Formats lines as text without trailing spaces, optionally in colour."""
    style = _styled if colour else lambda text, style: text
    return "".join("".join(style(printable(text), name) for text, name in line).rstrip() + "\n" for line in lines)


def _styled(text: str, style: str) -> str:
    from rich.color import ColorSystem  # takes 17 ms to import; output without colour does not need it
    from rich.style import Style

    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def _table(grid: Grid, columns: Sequence[Column], width: int | None) -> list[Line]:
    lines: list[Line] = [[(grid.title, "bold")]] if grid.title else []
    if not grid.rows:
        return [*lines, [(grid.view.empty, "dim")]]
    whole = natural_widths(columns, grid.rows)
    widths, hidden = fit_widths(whole, grid.rows, width)
    lines.append(table_header(widths))
    for row in grid.rows:
        lines += _table_rows(row, widths)
    cut = [column for column, cells in widths.items() if cells < whole[column] and column.kind is not Kind.SENTENCE]
    notes = [
        f"{verb} at this width: {', '.join(column.name for column in affected)}"
        for verb, affected in (("hidden", hidden), ("cut", cut))
        if affected
    ]
    return [*lines, [(f"{'; '.join(notes)} (-o wide shows all)", "dim")]] if notes else lines


def table_header(widths: Mapping[Column, int], marks: Mapping[Column, str] | None = None) -> Line:
    """Formats the header of a table; `marks` are texts that are appended to the titles of some columns."""
    return [
        span
        for column, cells in widths.items()
        for span in _cell(column, column.title + (marks or {}).get(column, ""), cells, "bold")
    ]


def _table_rows(row: Row, widths: Mapping[Column, int]) -> Iterator[Line]:
    """Formats one row of a table, with further lines for sentences that are longer than their column."""
    sentences = {
        column: textwrap.wrap(one_line(column.human(row)), cells, break_on_hyphens=False)
        for column, cells in widths.items()
        if column.kind is Kind.SENTENCE
    }
    yield table_row(row, widths, {column: pieces[0] for column, pieces in sentences.items() if pieces})
    for number in range(1, max(map(len, sentences.values()), default=0)):
        texts = {column: pieces[number] for column, pieces in sentences.items() if number < len(pieces)}
        yield table_row(row, widths, {column: texts.get(column, "") for column in widths})


def table_row(row: Row, widths: Mapping[Column, int], texts: Mapping[Column, str] = MappingProxyType({})) -> list[Span]:
    """Formats one row of a table; `texts` replace the values of some columns."""
    return [
        span
        for column, cells in widths.items()
        for span in _cell(
            column, texts[column] if column in texts else one_line(column.human(row)), cells, style_of(column, row)
        )
    ]


def _cell(column: Column, text: str, cells: int, style: str) -> list[Span]:
    """Formats a value and the gap after it: numbers right-aligned, long texts shortened."""
    size = cell_len(text)
    if size > cells:
        text, size = _shortened(text, cells), cells
    space = " " * (cells - size)
    gap = (" " * GAP, "")
    return [(space, ""), (text, style), gap] if column.kind.value.numeric else [(text, style), (space, ""), gap]


def _shortened(text: str, cells: int) -> str:
    """Returns `cells` cells of a longer text: its beginning, and of a name also its end, where names mostly differ."""
    end = (cells - 1) // 2 if text.isascii() and not {" ", ","} & set(text) else 0
    return set_cell_size(text, cells - 1 - end) + "…" + text[len(text) - end :]


def style_of(column: Column, row: Row) -> str:
    """Returns the terminal style of one value."""
    value = column.value(row)
    styles = column.styles or {}
    return styles.get(str(value), styles.get("", "")) if value is not None else "dim"


def natural_widths(columns: Sequence[Column], rows: Sequence[Row]) -> dict[Column, int]:
    """Returns the width that each column needs to show all its values in full."""
    return {
        column: max([cell_len(column.title), *(cell_len(one_line(column.human(row))) for row in rows)])
        for column in columns
    }


def fit_widths(
    widths: Mapping[Column, int], rows: Sequence[Row], width: int | None
) -> tuple[dict[Column, int], list[Column]]:
    """Chooses the columns of a table and their widths so that it fits the terminal.

    Empty columns are hidden first, then ordinary ones from right to left; then long texts are shortened. Numbers are
    never truncated, and sentences continue on further lines.

    Returns:
        The width by column, and the hidden columns.
    """
    columns, widths = list(widths), dict(widths)
    if width is None:
        return widths, []
    hidden: list[Column] = []
    while _needed(widths, readable=True) > width and (column := _least_important(widths, rows)) is not None:
        del widths[column]
        hidden.append(column)
    while (excess := _needed(widths) - width) > 0:
        longest = max(widths, key=lambda column: widths[column] if _elastic(column) else 0)
        room = widths[longest] - _MIN_TEXT
        if not _elastic(longest) or room <= 0:
            break
        # Shorten to the length of the next longest, so that texts of similar length are shortened alike.
        others = [widths[column] for column in widths if column is not longest and _elastic(column)]
        widths[longest] -= max(1, min(excess, room, widths[longest] - max(others, default=0)))
    return widths, [column for column in columns if column in hidden]


def _least_important(widths: Mapping[Column, int], rows: Sequence[Row]) -> Column | None:
    """Returns the column to hide next: the last column without values, or else the last that is not a core column.

    Returns None if neither exists.
    """
    ordinary = [column for column in reversed(list(widths)) if column.width is not Width.CORE]
    core = [column for column in reversed(list(widths)) if column.width is Width.CORE]
    empty = [column for column in (*ordinary, *core) if all(column.value(row) in (None, "", [], {}) for row in rows)]
    return next(iter(empty or ordinary), None)


def _elastic(column: Column) -> bool:
    return column.kind in _READABLE


def _needed(widths: Mapping[Column, int], readable: bool = False) -> int:
    """Returns the width of a whole row; `readable`: with long texts shortened as far as before a column is hidden."""
    cells = (min(size, _READABLE.get(column.kind, size)) if readable else size for column, size in widths.items())
    return sum(cells) + GAP * (len(widths) - 1)


def stream_header(columns: Sequence[Column], gap: str = " ") -> str:
    """Formats the header of a table that is printed line by line."""
    return gap.join(_padded(column, column.title) for column in columns).rstrip()


def stream_line(columns: Sequence[Column], row: Row, colour: bool, gap: str = " ") -> str:
    """Formats one line of such a table; columns without a fixed width are not padded."""
    cells = [(_padded(column, one_line(column.human(row))), style_of(column, row)) for column in columns]
    line = [span for cell in cells for span in (cell, (gap, ""))][:-1]
    return _written([line], colour).removesuffix("\n")


def _padded(column: Column, text: str) -> str:
    return f"{text:>{column.fixed}}" if column.kind.value.numeric else f"{text:<{column.fixed}}"
