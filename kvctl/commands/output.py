"""Prints reports on stdout in the selected format, and messages on stderr; redraws watched reports in place."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import click

from kvctl.client.faults import Fault
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error, silence_stdout, unwritable
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render.data import comma_separated, json_document, json_lines, projected, tsv, yaml_document
from kvctl.render.report import Grid, Report, Text
from kvctl.render.sanitize import printable, printable_lines
from kvctl.render.selection import ExpressionError, Selection, data_columns, select, table_columns
from kvctl.render.view import Column, Row, View

_PIPE_WIDTH = 120
_HEADER_EVERY = 20
_HUMAN = frozenset({"table", "wide"})
_DOCUMENTS = frozenset({"json", "yaml"})
_NO_MATCH = Text([[("no rows match --filter", "dim")]])

# Control sequences of the alternate screen: without a cursor; too long lines are truncated instead of wrapped.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Output:
    """Output of one command: data on stdout in the selected format, messages on stderr."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.format = settings.output
        self._terminal = to_terminal()
        self.colour = settings.color == "always" or (settings.color == "auto" and _colour_supported())
        self._printed = 0
        self._screen: Screen | None = None
        self._messages: list[str] = []  # printed below the next drawing
        self._last: tuple[str, tuple[str, ...]] = "", ()  # the last drawing and its messages

    @property
    def human(self) -> bool:
        return self.format in _HUMAN

    @property
    def document(self) -> bool:
        """Whether the format (JSON, YAML) contains the errors, and is therefore printed even if there are no rows."""
        return self.format in _DOCUMENTS

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
        """Formats rows for programs: TSV, CSV, JSON, JSON lines or YAML.

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
        now_ns = at_ns or time.time_ns()
        if self.format == "yaml":
            return yaml_document(view, data, faults, now_ns)
        return json_document(view, data, faults, now_ns, indent=not compact)

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
        elif self._screen is not None:
            self._last = f"{title}\n\n{text}", tuple(self._messages)
            self._messages.clear()
            shown = [printable(f"kvctl: {message}") for message in self._last[1]]
            self._screen.draw(printable_lines(self._last[0], styled=self.colour), shown)
        else:
            self.write(f"{title}\n\n{text}\n")
        self._printed += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Lets `redraw` use the terminal's alternate screen; at the end prints the last report on the normal screen."""
        if not (self.human and self._terminal and os.environ.get("TERM") not in {None, "", "dumb"}):
            yield
            return
        self._screen = Screen(self._put)
        try:
            with self._screen.opened():
                yield
        finally:
            self._screen = None
            text, messages = self._last
            self.write(text)
            for message in (*messages, *self._messages):
                print_error(message)

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
        """Prints an error on stderr; while `redraw` uses the alternate screen, prints it below the next report."""
        if self._screen is not None and sys.stderr.isatty():
            self._messages.append(text)
        else:
            print_error(text)


def to_terminal() -> bool:
    """Returns whether stdout is a terminal."""
    return sys.stdout.isatty()


def _colour_supported() -> bool:
    return to_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Alternate screen of a terminal, which leaves the normal screen and its scrollback unchanged.

    Args:
        write: writes text to stdout unchanged.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._drawing = ""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Allows `draw`, and restores the terminal at the end, also on Ctrl-C, SIGTERM, SIGHUP and Ctrl-Z.

        The first drawing enters the alternate screen. A signal ends the process with exit code 128 + its number.
        """
        handlers = {signal.SIGTERM: self._exit, signal.SIGHUP: self._exit, signal.SIGTSTP: self._stop}
        # Signals that the parent process set to be ignored, as nohup does, stay ignored.
        installed = [number for number in handlers if signal.getsignal(number) is signal.SIG_DFL]
        for number in installed:
            signal.signal(number, handlers[number])
        try:
            yield
        finally:
            self._leave()
            for number in installed:
                signal.signal(number, signal.SIG_DFL)

    def draw(self, text: str, messages: Sequence[str]) -> None:
        """Draws text from the top of the screen and messages below it; truncates the text to the terminal's height."""
        lines = text.rstrip("\n").split("\n")
        height = shutil.get_terminal_size().lines - len(messages)
        if len(lines) > height:
            kept = max(height - 1, 0)
            lines = [*lines[:kept], f"... {len(lines) - kept} more lines: use --filter, or a taller terminal"]
        entering = "" if self._drawing else _ENTER
        self._drawing = _HOME + "\n".join(f"{line}{_CLEAR_LINE}" for line in (*lines, *messages)) + _CLEAR_BELOW
        self._write(entering + self._drawing)

    def _leave(self) -> None:
        if self._drawing:
            _write_unbuffered(_LEAVE)

    def _exit(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Restores the normal screen and stops the process; draws again when the process continues."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        if self._drawing:
            _write_unbuffered(_ENTER + self._drawing)


def _write_unbuffered(text: str) -> None:
    """Writes to the descriptor of stdout, past its buffer, which a signal may have interrupted.

    Ignores errors, since the terminal may no longer exist.
    """
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), text.encode())
