"""One rank process as its parent sees it: commands down, messages up, output, exit.

The process inherits one end of a socket pair, which carries a line of JSON per command and per message, and a pipe for
everything it prints, of which the last few KiB are kept for the report of a crash.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import orjson

from kvctl.lab.ranks.messages import Command, Lines, LineTooLong, Message, Stop

PROGRAM = (sys.executable, "-m", "kvctl.lab.ranks")
"""Command line of a rank process, without its options."""

_TAIL_BYTES = 16 << 10
_WORDS_LINES = 12
_WORDS_BYTES = 2000
_READ_BYTES = 1 << 16
_CRASHED = "Fatal Python error"
# A stopped process reads nothing. Commands beyond this are dropped: they are for rooms that have failed by then.
_MAX_UNSENT_BYTES = 8 << 20


class RankProcess:
    """A rank process; never blocks its caller.

    Attributes:
        name: of the rank.
        pid: of the process.
        channel, output, exit_fd: readable when there is something to read, or when the process has ended.
        hung_up, silent: the process has closed its end of the channel, of its output.
        answer: data of its answer to the last command; None until it arrives.
        fatal: data of the error that it ends with; None: it reported none.
        doing: what it last reported to be waiting for.
        leaving: it was told to stop, so that its exit is expected.
    """

    def __init__(self, name: str, environment: Mapping[str, str], program: Sequence[str] = PROGRAM) -> None:
        """Start it."""
        self.name = name
        self.hung_up = False
        self.silent = False
        self.answer: Mapping[str, Any] | None = None
        self.fatal: Mapping[str, Any] | None = None
        self.doing = ""
        self.leaving = False
        self._lines = Lines()
        self._unsent = bytearray()
        self._tail = bytearray()
        ours, theirs = socket.socketpair()
        with theirs:
            options = ("--name", name, "--parent", str(os.getpid()), "--fd", str(theirs.fileno()))
            try:
                # A process group of its own: Ctrl-C at the terminal reaches this process only, which ends the ranks.
                self._process = subprocess.Popen(
                    [*program, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=dict(environment),
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

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The last lines of its output without control characters; after a crash, the stack that crashed."""
        text = bytes(self._tail).decode("utf-8", "replace")
        lines = ["".join(c for c in line if c.isprintable()).rstrip() for line in text.splitlines()]
        lines = [line for line in lines if line]
        for at, line in enumerate(lines):
            if line.startswith(_CRASHED):  # Python's dump of all threads begins with the one that crashed
                return "\n".join(lines[at : at + _WORDS_LINES])[:_WORDS_BYTES]
        return "\n".join(lines[-_WORDS_LINES:])[-_WORDS_BYTES:]

    def send(self, command: Command) -> None:
        """Send a command; the bytes that the socket does not take now wait for `flush`."""
        self.answer = None
        self.leaving = self.leaving or isinstance(command, Stop)
        if len(self._unsent) < _MAX_UNSENT_BYTES:
            self._unsent += orjson.dumps({"do": command.do, "args": command}) + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send waiting bytes; returns whether some still wait."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    del self._unsent[: self.channel.send(self._unsent)]
                except (BrokenPipeError, ConnectionResetError):
                    self._unsent.clear()  # the process is gone, and its exit status says more
        return bool(self._unsent)

    def hear(self) -> list[Message]:
        """Read output and messages without waiting; returns the messages."""
        self.hear_output()
        messages: list[Message] = []
        try:
            while data := self.channel.recv(_READ_BYTES):
                messages += self._parse(data)
        except BlockingIOError:
            return messages
        except ConnectionResetError:
            pass
        self.hung_up = True
        return messages

    def hear_output(self) -> None:
        """Read output without waiting."""
        with contextlib.suppress(BlockingIOError):
            # Bounded: a rank that floods its output must not keep us from the others.
            for _ in range(16):
                data = os.read(self.output.fileno(), _READ_BYTES)
                if not data:
                    self.silent = True
                    break
                self._tail += data
                del self._tail[:-_TAIL_BYTES]

    def hang_up(self) -> None:
        """Close the channel: the rank then closes its agent and exits, whatever it is doing."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process only; nothing if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.exit_fd, number)

    def reap(self) -> None:
        """Wait for the end of the process and close its files."""
        self.hear_output()
        self._process.wait()
        self.output.close()
        self.channel.close()
        os.close(self.exit_fd)

    def _parse(self, data: bytes) -> list[Message]:
        try:
            messages: list[Message] = [orjson.loads(line) for line in self._lines.feed(data)]
        except (LineTooLong, orjson.JSONDecodeError) as error:
            garbled = {"code": "Garbled", "message": f"it sent what is no answer: {error}"}
            messages = [Message(kind="fatal", data=garbled)]
        for message in messages:
            if message["kind"] == "answer":
                self.answer = message["data"]
            elif message["kind"] == "fatal":
                self.fatal = message["data"]
            elif message["kind"] == "progress":
                self.doing = str(message["data"].get("doing", ""))
        return messages
