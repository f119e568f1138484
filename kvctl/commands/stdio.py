"""Prints messages on stderr, and handles standard streams that the caller has closed."""

from __future__ import annotations

import os
import shutil
import sys

from kvctl.render.sanitize import printable, printable_lines


def open_missing_streams() -> None:
    """Opens the null device for each standard stream that the caller has closed (`>&-`).

    Otherwise the next file or socket that is opened would get the descriptor of the stream, and output to the stream
    would go there.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def unwritable(error: OSError) -> str:
    """Returns the error text for a failed write to stdout."""
    return f"cannot write to stdout: {error.strerror}; the output is incomplete"


def print_error(text: str) -> None:
    """Prints a message on stderr, with the prefix `kvctl: `."""
    print_stderr(f"kvctl: {text}")


def print_stderr(text: str) -> None:
    """Prints a line on stderr, with unprintable characters replaced; ignores a closed stderr."""
    try:
        sys.stderr.write(f"{printable_lines(text)}\n")
        sys.stderr.flush()
    except OSError:
        return


class ProgressLine:
    """Progress on the last line of a terminal's stderr, cleared at the end of the block; shows nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()
        self._written = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._written:
            self.show("")

    def show(self, text: str) -> None:
        """Replaces the line, cut to the width of the terminal."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{printable(text[: shutil.get_terminal_size().columns - 1])}")
            sys.stderr.flush()
            self._written = True


def silence_stdout() -> None:
    """Redirects stdout to the null device, so that the interpreter's flush at exit does not report a closed pipe."""
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, sys.stdout.fileno())
    finally:
        os.close(sink)
