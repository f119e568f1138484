"""Puts reports on stdout in the format that was asked for, and everything else on stderr."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from kvctl.client.faults import Fault
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain, silence_stdout, unwritable
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
_NONE_PASSES = Text([[("no rows match --filter", "dim")]])


class Output:
    """Where one command prints; knows the format, the colour and the width."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.format = settings.output
        self.colour = _wants_colour(settings.color)
        self._terminal = to_terminal()
        self._printed = 0
        self._screen: Screen | None = None
        self._messages: list[str] = []  # for the next drawing
        self._last: tuple[str, tuple[str, ...]] = "", ()  # the drawing and its messages

    @property
    def human(self) -> bool:
        return self.format in _HUMAN

    @property
    def document(self) -> bool:
        """True for the formats that say by themselves that there is nothing, and who did not answer."""
        return self.format in _DOCUMENTS

    @property
    def width(self) -> int | None:
        """Columns to fit tables into; None where nothing may be cut off: with `-o wide`, and away from a terminal."""
        return self._picture_width if self._terminal and self.format != "wide" else None

    @property
    def _picture_width(self) -> int:
        return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns

    def selection(self, view: View) -> Selection:
        """The columns, filters and order that the user wants of `view`.

        Raises:
            click.UsageError: they do not fit the view.
        """
        settings = self._settings
        try:
            return select(view, settings.columns, settings.sort_by, settings.filters)
        except ExpressionError as error:
            raise click.UsageError(str(error)) from error

    def emit(self, report: Report, compact: bool = False) -> None:
        """Prints a whole report.

        Args:
            compact: JSON on one line, as a stream of documents wants it.
        """
        self.write(self.text(report, compact))

    def text(self, report: Report, compact: bool = False) -> str:
        """The whole report in the chosen format."""
        view = report.view
        selection = self.selection(view)
        rows = selection.rows(report.rows)
        match self.format:
            case "tsv":
                return tsv(data_columns(view, selection), rows)
            case "csv":
                return comma_separated(data_columns(view, selection), rows)
            case "json" | "jsonl" | "yaml":
                whole = report.objects is not None and selection.columns is None
                data = report.objects(rows) if whole and report.objects else projected(selection.columns, rows)
                if self.format == "jsonl":
                    return json_lines(data)
                return self._document(view, data, report.faults, report.at_ns, compact)
            case "prom":
                if report.prometheus is None:
                    raise click.UsageError("-o prom is for metrics: kvctl metrics -o prom")
                return report.prometheus(rows)
        return self._for_people(report, selection, rows)

    def _document(
        self, view: View, data: Sequence[Any], faults: Sequence[Fault], at_ns: int | None, compact: bool
    ) -> str:
        now_ns = at_ns or time.time_ns()
        if self.format == "yaml":
            return yaml_document(view, data, faults, now_ns)
        return json_document(view, data, faults, now_ns, indent=not compact)

    def _for_people(self, report: Report, selection: Selection, rows: Sequence[Row]) -> str:
        from kvctl.render.terminal import render

        picture = report.blocks is not None and selection.columns is None
        blocks = report.blocks(rows, self._picture_width) if picture and report.blocks else [Grid(report.view, rows)]
        if report.rows and not rows:  # there is something, only nothing like that
            blocks = [_NONE_PASSES if isinstance(each, Grid) and each.view is report.view else each for each in blocks]
        wide = self.format == "wide"
        plain = Selection(None, (), ())
        columns: list[Sequence[Column]] = [
            table_columns(block.view, selection if block.view is report.view else plain, wide)
            if isinstance(block, Grid)
            else ()
            for block in blocks
        ]
        return render(blocks, columns, self.width, self.colour)

    def stream(self, view: View, rows: Sequence[Row], at_ns: int | None = None) -> None:
        """Prints rows that follow earlier ones of the same stream; headers come once, on terminals every 20 lines.

        Args:
            at_ns: wall clock of the answers; None means now.
        """
        selection = self.selection(view)
        kept = selection.rows(rows)
        columns = data_columns(view, selection)
        for row in kept:
            match self.format:
                case "tsv":
                    self.write(tsv(columns, [row], header=self._printed == 0))
                case "csv":
                    self.write(comma_separated(columns, [row], header=self._printed == 0))
                case "jsonl":
                    self.write(json_lines(projected(selection.columns, [row])))
                case "json" | "yaml":
                    self.write(self._document(view, projected(selection.columns, [row]), (), at_ns, compact=True))
                case "prom":
                    raise click.UsageError("-o prom is for metrics: kvctl metrics -o prom")
                case _:
                    self._stream_line(table_columns(view, selection, self.format == "wide"), row)
            self._printed += 1

    def _stream_line(self, columns: Sequence[Column], row: Row) -> None:
        from kvctl.render.terminal import stream_header, stream_line

        gap = " " if self._terminal else "  "  # lines fit 80 cells of a terminal; elsewhere fields are to be told apart
        due = self._printed % _HEADER_EVERY == 0 if self._terminal else self._printed == 0
        header = f"{stream_header(columns, gap)}\n" if due else ""
        self.write(f"{header}{stream_line(columns, row, self.colour, gap)}\n")

    def redraw(self, report: Report, title: str) -> None:
        """Prints the report in place of the one before it, on terminals that can."""
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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, `redraw` draws on the alternate screen of a terminal that has one; the last drawing is
        printed on the normal screen at the end.
        """
        if not (self.human and on_terminal()):
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
                complain(message)

    def write(self, text: str) -> None:
        """Writes data, unprintable characters replaced. A reader that closes early, as `head` does, ends it quietly."""
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
        """A remark on stderr, which `-q` silences."""
        if not self._settings.quiet:
            self.complain(text)

    def detail(self, text: str) -> None:
        """Something that only `-v` wants to know."""
        if self._settings.verbose:
            self.complain(text)

    def complain(self, text: str) -> None:
        """An error on stderr; on the screen that `redraw` draws, if there is one."""
        if self._screen is not None and sys.stderr.isatty():
            self._messages.append(text)
        else:
            complain(text)


def to_terminal() -> bool:
    """Whether data goes to a terminal, as against a pipe or a file."""
    return sys.stdout.isatty()


def _wants_colour(wish: str) -> bool:
    if wish != "auto":
        return wish == "always"
    return to_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# Alternate screen; no cursor; lines that are too long are cut off and not wrapped.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def on_terminal() -> bool:
    """Whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in {None, "", "dumb"}


class Screen:
    """Draws on the alternate screen, so that the normal screen and its scrollback stay as they were.

    Args:
        write: puts text on stdout as it is.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._drawing = ""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Restores the terminal at the end, also on Ctrl-C, SIGTERM and SIGHUP, and while it is stopped (Ctrl-Z).

        The alternate screen is entered by the first drawing. A signal ends the process with 128 and its number.
        """
        handlers = dict.fromkeys(_ENDS, self._end) | {signal.SIGTSTP: self._stop}
        # What a parent has set to be ignored, as nohup does, stays ignored.
        taken = [number for number in handlers if signal.getsignal(number) is signal.SIG_DFL]
        for number in taken:
            signal.signal(number, handlers[number])
        try:
            yield
        finally:
            self._leave()
            for number in taken:
                signal.signal(number, signal.SIG_DFL)

    def draw(self, text: str, messages: Sequence[str]) -> None:
        """Draws text from the top, and messages below it; what does not fit the height is cut off the text's end."""
        lines = text.rstrip("\n").split("\n")
        room = shutil.get_terminal_size().lines - len(messages)
        if len(lines) > room:
            kept = max(room - 1, 0)
            lines = [*lines[:kept], f"... {len(lines) - kept} more lines: use --filter, or a taller terminal"]
        entering = "" if self._drawing else _ENTER
        self._drawing = _HOME + "\n".join(f"{line}{_CLEAR_LINE}" for line in (*lines, *messages)) + _CLEAR_BELOW
        self._write(entering + self._drawing)

    def _leave(self) -> None:
        if self._drawing:
            _put(_LEAVE)

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stops the process with the normal screen shown; goes on with the drawing."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        if self._drawing:
            _put(_ENTER + self._drawing)


def _put(text: str) -> None:
    """Writes past the buffer of stdout, which a signal may have interrupted; the terminal may be gone."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), text.encode())
