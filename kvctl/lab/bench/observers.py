"""Runs `kvctl top` and `kvctl status -w 0.1` against a fleet, to measure how much throughput observing costs."""

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
_START_S = 3.0  # both have started by then: importing modules must not count as observing
_EXIT_S = 5.0


class Observers:
    """The processes `kvctl top`, on a pseudo-terminal, and `kvctl status`, which observe a fleet.

    Between observed trials they are stopped with a signal instead of ended, because starting takes seconds.

    Args:
        agents: Names of the agents to observe.
    """

    def __init__(self, agents: Sequence[str]) -> None:
        self._endpoints = [word for name in agents for word in ("-e", name)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminal: int | None = None
        self._screen: threading.Thread | None = None
        self._watching = False

    def watch(self, wanted: bool) -> None:
        """Starts or continues the observers if `wanted`, otherwise stops them with SIGSTOP."""
        if wanted and not self._processes:
            self._start()
            time.sleep(_START_S)
        elif wanted != self._watching:
            for process in self._processes:
                process.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)
        self._watching = wanted

    def close(self) -> None:
        """Ends the observer processes; idempotent."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(_EXIT_S)
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
        null = subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen([*kvctl, *_STATUS, *self._endpoints], stdin=null, stdout=null, stderr=null)
        )
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        try:
            self._processes.append(
                subprocess.Popen(
                    [*kvctl, *_TOP, *self._endpoints],
                    stdin=slave,
                    stdout=slave,
                    stderr=null,
                    env={**os.environ, "TERM": "xterm-256color"},
                    start_new_session=True,
                )
            )
        finally:
            os.close(slave)
        self._terminal = master
        self._screen = threading.Thread(target=_drain, args=(master,), name="kvctl-bench-screen", daemon=True)
        self._screen.start()


def _drain(terminal: int) -> None:
    """Reads and discards the output of a pseudo-terminal until the process on it has exited."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
