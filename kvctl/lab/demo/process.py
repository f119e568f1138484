"""One rank's process as its parent holds it: started, heard, and always ended.

The process gets one end of a socket pair for lines of JSON in both directions, and a pipe for everything it prints, of
which only the end is kept: that is what a rank says last when it crashes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import orjson

from kvctl.lab.ranks.bench_messages import Lines, LineTooLong

TAIL_BYTES = 16 << 10
_WORDS_LINES = 12
_WORDS_BYTES = 2000
_READ_BYTES = 1 << 16
_CRASHED = "Fatal Python error"


class ChildProcess(ABC):
    """A running rank; what its lines mean is its heirs' affair.

    Attributes:
        name: of the rank.
        pid: of its process.
        channel, output, exit_fd: readable when there is something to hear, or when it has ended.
        hung_up, silent: it closed its end of the channel, of its output.
    """

    def __init__(self, name: str, argv: Callable[[int], Sequence[str]], env: Mapping[str, str]) -> None:
        """Start it.

        Args:
            argv: gives the command line for the file descriptor of its end of the channel.
        """
        self.name = name
        self.hung_up = False
        self.silent = False
        self._lines = Lines()
        self._tail = bytearray()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # A process group of its own: Ctrl-C at the terminal is ours to handle, and ends ranks in order.
                self._process = subprocess.Popen(
                    argv(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=dict(env),
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        self.pid = self._process.pid
        self.channel = ours
        self.channel.setblocking(False)
        self.output: IO[bytes] = self._process.stdout  # type: ignore[assignment]
        os.set_blocking(self.output.fileno(), False)
        self.exit_fd = os.pidfd_open(self.pid)

    @abstractmethod
    def take(self, line: Mapping[str, Any]) -> None:
        """One line up, decoded."""

    @abstractmethod
    def garbled(self, error: str) -> None:
        """It sent what is no line of JSON."""

    def hear(self) -> None:
        """Take in whatever it has said on either line, without waiting."""
        self.hear_output()
        try:
            while data := self.channel.recv(_READ_BYTES):
                self._feed(data)
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass
        self.hung_up = True

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The last lines it printed, made safe to print; of a crash, what says where."""
        text = bytes(self._tail).decode("utf-8", "replace")
        lines = ["".join(c for c in line if c.isprintable()).rstrip() for line in text.splitlines()]
        lines = [line for line in lines if line]
        for at, line in enumerate(lines):
            if line.startswith(_CRASHED):  # Python's dump of all threads begins with the one that matters
                return "\n".join(lines[at : at + _WORDS_LINES])[:_WORDS_BYTES]
        return "\n".join(lines[-_WORDS_LINES:])[-_WORDS_BYTES:]

    def hang_up(self) -> None:
        """Close our end: a rank takes that as the order to close its agent and exit."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only, by its id; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fd, number)

    def kill(self) -> None:
        """End it now."""
        self.signal(signal.SIGKILL)  # a stopped process takes it too

    def reap(self) -> None:
        """Forget the process, which has ended, and close what is ours of it."""
        self.hear_output()
        self._process.wait()
        self.output.close()
        self.channel.close()
        os.close(self.exit_fd)

    def hear_output(self) -> None:
        """Take in what it has printed."""
        with contextlib.suppress(BlockingIOError):
            # Bounded: a rank that floods its output must not keep us from the others.
            for _ in range(16):
                data = os.read(self.output.fileno(), _READ_BYTES)
                if not data:
                    self.silent = True
                    break
                self._tail += data
                del self._tail[:-TAIL_BYTES]

    def _feed(self, data: bytes) -> None:
        try:
            lines = [orjson.loads(line) for line in self._lines.feed(data)]
        except (LineTooLong, orjson.JSONDecodeError) as error:
            self.garbled(f"it sent what is no answer: {error}")
            return
        for line in lines:
            self.take(line)
