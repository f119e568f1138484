"""The results as a table: the columns, order and spelling of the terminal's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvctl.lab.bench.html.loads import Run, same_load
from kvctl.lab.bench.html.markup import Markup, tag
from kvctl.lab.bench.html.numbers import lookup
from kvctl.lab.bench.html.series import DIMENSIONS, varied_dimensions
from kvctl.lab.bench.views import BENCH
from kvctl.render.units import UNKNOWN
from kvctl.render.view import Column, Kind, Width

_TEXT = (Kind.TEXT, Kind.FLAG, Kind.LIST, Kind.MAP)
_SHADES = {"True": "good", "False": "bad", "PASS": "good", "FAIL": "bad"}


def results(runs: Sequence[Run]) -> Markup | None:
    """The table of all runs, without columns that say the same nothing for each; None without runs."""
    if not runs:
        return None
    columns = list(_columns(runs))
    known = [column for column in columns if any(_cell(column, row) not in {UNKNOWN, ""} for row in runs)]
    head = tag("tr", *(tag("th", column.title, scope="col", class_=_style(column)) for column in known))
    body = [tag("tr", *(_data(column, row, runs) for column in known)) for row in runs]
    whole = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("section", tag("h2", "Results"), tag("div", whole, class_="table", tabindex="0"))


def _columns(runs: Sequence[Run]) -> Iterator[Column]:
    """The terminal's columns, with what tells runs apart behind the path, and without what is the same for all."""
    declared = {column.name: column for column in BENCH.columns}
    for column in BENCH.columns:
        if column.name not in DIMENSIONS or column.name == "path":
            yield column
        if column.name == "path":
            apart = (name for name in varied_dimensions(runs) if name != "path")
            # Never left out on paper, whatever a terminal has room for.
            yield from (replace(declared.get(name, Column(name)), width=Width.CORE) for name in apart)
        if column.name == "tokens" and len({run.get("ratio") for run in runs}) > 1:
            yield Column("ratio", kind=Kind.NUMBER, header="TRANSFER : COMPUTE")


def _cell(column: Column, row: Run) -> str:
    try:
        return column.human(row)
    except (KeyError, TypeError, ValueError):
        return UNKNOWN  # the document is older than the column


def _data(column: Column, row: Run, runs: Sequence[Run]) -> Markup:
    text = _cell(column, row)
    styles = [_style(column)]
    if column.styles is not None:
        styles.append(_SHADES.get(str(column.value(row)), ""))
    if column.name == "gb_per_s" and _fastest(row, runs):
        styles.append("best")
    return tag("td", text, class_=" ".join(filter(None, styles)))


def _fastest(row: Run, runs: Sequence[Run]) -> bool:
    """Whether no run of the same load was faster, and there was one to be faster than."""
    rivals = [lookup(run, "gb_per_s") or 0.0 for run in runs if same_load(run, row)]
    return len(rivals) > 1 and (lookup(row, "gb_per_s") or 0.0) == max(rivals)


def _style(column: Column) -> str:
    width = "extra" if column.width is Width.WIDE else ""
    return f"{'' if column.kind in _TEXT else 'number'} {width}".strip()
