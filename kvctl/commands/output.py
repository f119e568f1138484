"""Prints reports on stdout in the selected format, and messages on stderr; redraws watched reports in place."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from kvctl.client.faults import Fault
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error, silence_stdout, unwritable
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render.data import comma_separated, json_document, json_lines, projected, tsv
from kvctl.render.report import Grid, Report, Text
from kvctl.render.sanitize import printable_lines
from kvctl.render.selection import ExpressionError, Selection, data_columns, select, table_columns
from kvctl.render.view import Column, Row, View

_PIPE_WIDTH = 120
_HEADER_EVERY = 20
_HUMAN = frozenset({"table", "wide"})
_NO_MATCH = Text([[("no rows match --filter", "dim")]])

# Control sequences of a drawing, whose lines are truncated instead of wrapped.
_BEGIN, _CLEAR_LINE, _END = "\x1b[H\x1b[?7l", "\x1b[K", "\x1b[J\x1b[?7h"
_MESSAGE_LINES = 4  # left free below a drawing


class Output:
    """Output of one command: data on stdout in the selected format, messages on stderr."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.format = settings.output
        self._terminal = to_terminal()
        supported = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.colour = settings.color == "always" or (settings.color == "auto" and supported)
        self._printed = 0

    @property
    def human(self) -> bool:
        return self.format in _HUMAN

    @property
    def document(self) -> bool:
        """Whether the format (JSON) contains the errors, and is therefore printed even if there are no rows."""
        return self.format == "json"

    @property
    def width(self) -> int | None:
        """Maximum width of tables; None for unlimited, with `-o wide` and if stdout is not a terminal."""
        return self._picture_width if self._terminal and self.format != "wide" else None

    @property
    def _picture_width(self) -> int:
        return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns

    def selection(self, view: View) -> Selection:
        """Returns the columns, filters and order that the user selected for a view.

        Raises:
            click.UsageError: they are not valid for this view.
        """
        settings = self._settings
        try:
            return select(view, settings.columns, settings.sort_by, settings.filters)
        except ExpressionError as error:
            raise click.UsageError(str(error)) from error

    def emit(self, report: Report, compact: bool = False) -> None:
        """Prints a report; `compact` prints JSON on one line, for streams of documents."""
        self.write(self.text(report, compact))

    def text(self, report: Report, compact: bool = False) -> str:
        """Formats a report in the selected format."""
        selection = self.selection(report.view)
        rows = selection.rows(report.rows)
        if self.human:
            return self._tables(report, selection, rows)
        if self.format == "prom" and report.prometheus is not None:
            return report.prometheus(rows)
        objects = report.objects if selection.columns is None else None
        return self._data(report.view, selection, rows, objects, report.faults, report.at_ns, compact)

    def _data(
        self,
        view: View,
        selection: Selection,
        rows: Sequence[Row],
        objects: Callable[[Sequence[Row]], Sequence[Any]] | None = None,
        faults: Sequence[Fault] = (),
        at_ns: int | None = None,
        compact: bool = True,
        header: bool = True,
    ) -> str:
        """Formats rows for programs: TSV, CSV, JSON or JSON lines.

        Raises:
            click.UsageError: the format is `prom`, which needs a report with metrics.
        """
        match self.format:
            case "tsv":
                return tsv(data_columns(view, selection), rows, header)
            case "csv":
                return comma_separated(data_columns(view, selection), rows, header)
            case "prom":
                raise click.UsageError("-o prom is for metrics: kvctl metrics -o prom")
        data = objects(rows) if objects is not None else projected(selection.columns, rows)
        if self.format == "jsonl":
            return json_lines(data)
        return json_document(view, data, faults, at_ns or time.time_ns(), indent=not compact)

    def _tables(self, report: Report, selection: Selection, rows: Sequence[Row]) -> str:
        from kvctl.render.terminal import render

        view = report.view
        custom = report.blocks is not None and selection.columns is None
        blocks = report.blocks(rows, self._picture_width) if custom and report.blocks else [Grid(view, rows)]
        if report.rows and not rows:
            blocks = [_NO_MATCH if isinstance(each, Grid) and each.view is view else each for each in blocks]
        wide = self.format == "wide"
        everything = Selection(None, (), ())
        columns: list[Sequence[Column]] = [
            table_columns(block.view, selection if block.view is view else everything, wide)
            if isinstance(block, Grid)
            else ()
            for block in blocks
        ]
        return render(blocks, columns, self.width, self.colour)

    def stream(self, view: View, rows: Sequence[Row], at_ns: int | None = None) -> None:
        """Prints further rows of a stream; prints the header once, or on a terminal every 20 lines.

        Args:
            view: view of the rows.
            rows: the new rows.
            at_ns: wall clock of the answers; None means now.
        """
        selection = self.selection(view)
        for row in selection.rows(rows):
            if self.human:
                self._stream_line(table_columns(view, selection, self.format == "wide"), row)
            else:
                self.write(self._data(view, selection, [row], at_ns=at_ns, header=self._printed == 0))
            self._printed += 1

    def _stream_line(self, columns: Sequence[Column], row: Row) -> None:
        from kvctl.render.terminal import stream_header, stream_line

        gap = " " if self._terminal else "  "  # lines fit 80 cells of a terminal; scripts split at two spaces
        due = self._printed % _HEADER_EVERY == 0 if self._terminal else self._printed == 0
        header = f"{stream_header(columns, gap)}\n" if due else ""
        self.write(f"{header}{stream_line(columns, row, self.colour, gap)}\n")

    def redraw(self, report: Report, title: str) -> None:
        """Prints the report; on a terminal that supports it, in place of the previous report."""
        text = self.text(report, compact=True)
        if not self.human:
            if self._printed and self.format in {"tsv", "csv"}:
                text = text.partition("\n")[2]
            self.write(text)
        elif self._terminal and os.environ.get("TERM") not in {None, "", "dumb"}:
            self._draw(f"{title}\n\n{text}")
        else:
            self.write(f"{title}\n\n{text}\n")
        self._printed += 1

    def _draw(self, text: str) -> None:
        """Draws text from the top of the screen, truncated to its height; what it showed goes into the scrollback."""
        height = shutil.get_terminal_size().lines
        lines = printable_lines(text, styled=self.colour).rstrip("\n").split("\n")
        if (more := len(lines) - max(2, height - _MESSAGE_LINES)) > 0:
            lines[-more - 1 :] = [f"... {more + 1} more lines: use --filter, or a taller terminal"]
        begin = _BEGIN if self._printed else "\n" * height + _BEGIN
        self._put(begin + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _END)

    def write(self, text: str) -> None:
        """Writes data with unprintable characters replaced; exits quietly if the reader has closed the pipe."""
        self._put(printable_lines(text, styled=self.colour))

    def _put(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            silence_stdout()
            raise click.exceptions.Exit(ExitCode.OK) from None
        except OSError as error:
            silence_stdout()
            raise CliError(unwritable(error)) from error

    def note(self, text: str) -> None:
        """Prints a remark on stderr, except with `-q`."""
        if not self._settings.quiet:
            self.error(text)

    def detail(self, text: str) -> None:
        """Prints a detail on stderr, only with `-v`."""
        if self._settings.verbose:
            self.error(text)

    def error(self, text: str) -> None:
        """Prints an error on stderr."""
        print_error(text)


def to_terminal() -> bool:
    """Returns whether stdout is a terminal."""
    return sys.stdout.isatty()
