"""People who watch: `kvctl top` on a terminal and `kvctl status -w 0.1`, to see what being watched costs a fleet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence

_STATUS = ("status", "-w", "0.1", "-o", "jsonl")
_TOP = ("top", "--readonly")
_ROWS, _COLUMNS = 40, 120
_WARM_S = 3.0  # until both have started: what is to be measured is watching, not importing
_END_S = 5.0


class Observers:
    """Watches while wanted; the processes stay between laps and are stopped meanwhile, so that none pays for a start.

    Args:
        agents: names to watch.
    """

    def __init__(self, agents: Sequence[str]) -> None:
        self._which = [word for name in agents for word in ("-e", name)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminal: int | None = None
        self._screen: threading.Thread | None = None
        self._watching = False

    def watch(self, wanted: bool) -> None:
        """Watch, or look away."""
        if wanted and not self._processes:
            self._start()
            time.sleep(_WARM_S)
        elif wanted != self._watching:
            for process in self._processes:
                process.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)
        self._watching = wanted

    def close(self) -> None:
        """End them; idempotent."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._screen is not None:
            self._screen.join()
            self._screen = None
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None
        self._watching = False

    def _start(self) -> None:
        kvctl = [sys.executable, "-m", "kvctl"]
        quiet = subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen([*kvctl, *_STATUS, *self._which], stdin=quiet, stdout=quiet, stderr=quiet)
        )
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        try:
            self._processes.append(
                subprocess.Popen(
                    [*kvctl, *_TOP, *self._which],
                    stdin=theirs,
                    stdout=theirs,
                    stderr=quiet,
                    env={**os.environ, "TERM": "xterm-256color"},
                    start_new_session=True,
                )
            )
        finally:
            os.close(theirs)
        self._terminal = ours
        self._screen = threading.Thread(target=_read, args=(ours,), name="kvctl-bench-screen", daemon=True)
        self._screen.start()


def _read(terminal: int) -> None:
    """What a terminal does with what is drawn, until nobody draws any more."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
