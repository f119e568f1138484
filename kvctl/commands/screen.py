"""The alternate screen of a terminal, on which a table that is read again and again is drawn."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

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
