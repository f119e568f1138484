"""What a command hands over to be printed: rows of a view, and optionally how a terminal should show them."""

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
    """Lines of a picture or a summary."""

    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of its own view; `title` stands above it."""

    view: View
    rows: Sequence[Row]
    title: str = ""


Block = Text | Grid


@dataclass(slots=True)
class Report:
    """Outcome of one reading.

    Attributes:
        rows: what TSV, CSV and tables show, before filters.
        answered: how many agents contributed.
        objects: what JSON shows, when that is richer than the rows; gets the rows that passed the filters.
        blocks: what a terminal shows instead of the plain table; gets those rows and the width in columns.
        prometheus: the exposition text, where the command has one.
        failure: why the operation failed although agents answered.
        wrong: what the command looks for was found, as doctor and health do: exit code 1, and no message.
        notes: remarks for stderr.
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
