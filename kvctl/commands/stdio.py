"""The two ends every command shares: a line on stderr, and a stdout that nobody reads any more."""

from __future__ import annotations

import os
import sys

from kvctl.render.sanitize import printable, printable_lines


def stand_in_for_closed_streams() -> None:
    """Opens the null device for each of the three that our caller has closed (`>&-`): nobody wants to hear of it.

    Otherwise the next file or socket that is opened would get its number, and somebody's output.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def unwritable(error: OSError) -> str:
    """Why data could not be written."""
    return f"cannot write to stdout: {error.strerror}; what was printed is incomplete"


def complain(text: str) -> None:
    """A line on stderr in our name."""
    tell(f"kvctl: {text}")


def tell(text: str) -> None:
    """A line on stderr, as long as it can be written there; unprintable characters are replaced."""
    try:
        sys.stderr.write(f"{printable_lines(text)}\n")
        sys.stderr.flush()
    except OSError:
        return


def progress(text: str) -> None:
    """Writes over the last line of a terminal's stderr; "" clears it."""
    sys.stderr.write(f"\r\x1b[K{printable(text)}")
    sys.stderr.flush()


def silence_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's own last flush does not complain about the closed pipe."""
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, sys.stdout.fileno())
    finally:
        os.close(sink)
