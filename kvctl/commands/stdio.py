"""Prints messages on stderr, and handles standard streams that the caller has closed."""

from __future__ import annotations

import os
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


def progress(text: str) -> None:
    """Replaces the last line on a terminal's stderr by a progress text; "" clears the line."""
    sys.stderr.write(f"\r\x1b[K{printable(text)}")
    sys.stderr.flush()


def silence_stdout() -> None:
    """Redirects stdout to the null device, so that the interpreter's flush at exit does not report a closed pipe."""
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, sys.stdout.fileno())
    finally:
        os.close(sink)
