"""The two ends every command shares: a line on stderr, and a stdout that nobody reads any more."""

from __future__ import annotations

import os
import sys


def complain(text: str) -> None:
    """One line on stderr, as long as somebody reads it."""
    try:
        sys.stderr.write(f"kvctl: {text}\n")
        sys.stderr.flush()
    except BrokenPipeError:
        return


def silence_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's own last flush does not complain about the closed pipe."""
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, sys.stdout.fileno())
    finally:
        os.close(sink)
