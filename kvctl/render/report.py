"""Result of a command: rows of a view, and optionally other contents for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvctl.client.faults import Fault
from kvctl.render.view import Row, View

Span = tuple[str, str]  # text, terminal style
Line = Sequence[Span]


@dataclass(frozen=True, slots=True)
class Text:
    """Styled lines in a report, such as a picture or a summary."""

    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Grid:
    """Table in a report, with its own view; `title` is printed above it."""

    view: View
    rows: Sequence[Row]
    title: str = ""


Block = Text | Grid


@dataclass(slots=True)
class Report:
    """Result of one query.

    Attributes:
        rows: rows for TSV, CSV and tables, before filters.
        objects: builds the JSON data from the filtered rows, if JSON contains more than the rows.
        blocks: builds the terminal output from the filtered rows and the width in columns, instead of a plain table.
        prometheus: builds Prometheus text, for commands that support it.
        failure: error text if the command failed although agents answered.
        wrong: whether a problem was found, as by doctor and health: exit code 1 without a message.
        at_ns: wall clock of the answers; None means now.
    """

    view: View
    rows: Sequence[Row]
    answered: int
    faults: Sequence[Fault] = ()
    objects: Callable[[Sequence[Row]], Sequence[Any]] | None = None
    blocks: Callable[[Sequence[Row], int], Sequence[Block]] | None = None
    prometheus: Callable[[Sequence[Row]], str] | None = None
    failure: str | None = None
    wrong: bool = False
    notes: list[str] = field(default_factory=list)
    at_ns: int | None = None
