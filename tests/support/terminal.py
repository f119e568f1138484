"""A process on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from typing import Any, Self

COLUMNS, ROWS = 100, 24
PATIENCE_S = 100.0


class Terminal:
    """A process on a pseudo-terminal, whose output a test reads; it is killed at the end of the block.

    Attributes:
        seen: output so far, as far as `passes` has not consumed it.
    """

    def __init__(
        self,
        *command: str,
        size: tuple[int, int] = (COLUMNS, ROWS),
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ):
        """Starts the command; the size is in columns and lines, and `options` are those of Popen."""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, env=environment, **{**streams, **options})
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def __repr__(self) -> str:
        return f"<Terminal that shows {self.seen[-2000:]!r}>"

    def read(self) -> bool:
        """Reads available output; returns False at its end."""
        if self._ours < 0:
            return False
        if not select.select([self._ours], [], [], 0.1)[0]:
            return True
        try:
            self.seen += os.read(self._ours, 1 << 16).decode(errors="replace")
        except OSError:  # the process has ended
            return False
        return True

    def until(self, text: str, times: int = 1) -> None:
        """Reads until `text` was printed that many times."""
        deadline = time.monotonic() + PATIENCE_S
        while self.seen.count(text) < times:
            assert time.monotonic() < deadline, f"{text!r} not seen {times} times in time: {self.seen!r}"
            assert self.read(), f"ended before {text!r} was seen {times} times: {self.seen!r}"

    def passes(self, text: str, seconds: float = PATIENCE_S) -> bool:
        """Reads until `text` was printed after the previous one; returns False if it was not within these seconds."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            if time.monotonic() > deadline or not self.read():
                return False
        self.seen = self.seen.rpartition(text)[2]
        return True

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self, number: int) -> int:
        """Sends a signal, reads the remaining output, and returns the exit code."""
        self.process.send_signal(number)
        return self.rest()

    def rest(self) -> int:
        """Reads the remaining output, and returns the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < deadline, f"not ended in time: {self.seen!r}"
        return self.process.wait(PATIENCE_S)

    def hang_up(self) -> None:
        """Closes the terminal."""
        if self._ours >= 0:
            os.close(self._ours)
        self._ours = -1
