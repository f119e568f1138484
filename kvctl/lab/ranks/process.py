"""Starts one rank process from its parent, exchanges commands and messages with it, and collects its output.

The process inherits one end of a socket pair, which carries one line of JSON per command and message, and a pipe for
its output, of which the last 16 KiB are kept for crash reports. A program that runs on another host has that end as its
standard input and output.
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

from kvctl.lab.ranks.messages import AnyCommand, LineBuffer, LineTooLong, Message, Stop

PROGRAM = (sys.executable, "-P", "-m", "kvctl.lab.ranks")
"""Command line of a rank process, without its options."""

GARBLED = "Garbled"
"""Code of the fatal error of a process that sent an invalid message."""

_TAIL_BYTES = 16 << 10
_TAIL_LINES = 12
_TAIL_SHOWN_BYTES = 2000
_READ_BYTES = 1 << 16
_CRASHED = "Fatal Python error"
# A process stopped by SIGSTOP reads nothing. Commands beyond this limit are dropped; their rooms fail anyway.
_MAX_UNSENT_BYTES = 8 << 20


class RankProcess:
    """A rank process as seen from its parent. Only `reap` blocks.

    Attributes:
        channel: socket for commands and messages, to be polled for reading.
        output: pipe with the output of the process, to be polled for reading.
        exit_fd: pidfd, readable once the process has exited.
        answer: data of the answer to the last command; None until it arrives.
        fatal: data of the fatal error that the process reported; None if it reported none.
        stopping: whether a Stop command was sent, so that the exit is expected.
    """

    def __init__(
        self, name: str, environment: Mapping[str, str], program: Sequence[str] = PROGRAM, *, stdio: bool = False
    ) -> None:
        """Starts the process.

        Args:
            program: command line of the process, without the options of the channel.
            stdio: whether the channel is the process's standard input and output; it then gets no options.
        """
        self.name = name
        self.channel_closed = False
        self.output_closed = False
        self.answer: Mapping[str, Any] | None = None
        self.fatal: Mapping[str, Any] | None = None
        self.doing = ""
        self.stopping = False
        self._lines = LineBuffer()
        self._unsent = bytearray()
        self._tail = bytearray()
        parent_end, child_end = socket.socketpair()
        with child_end:
            inherited = "--name", name, "--parent", str(os.getpid()), "--fd", str(child_end.fileno())
            try:
                # Its own process group: Ctrl-C at the terminal reaches only the parent, which ends the ranks.
                self._process = subprocess.Popen(
                    [*program, *(() if stdio else inherited)],
                    stdin=child_end.fileno() if stdio else subprocess.DEVNULL,
                    stdout=child_end.fileno() if stdio else subprocess.PIPE,
                    stderr=subprocess.PIPE if stdio else subprocess.STDOUT,
                    pass_fds=() if stdio else (child_end.fileno(),),
                    env=dict(environment),
                    process_group=0,
                )
            except BaseException:
                parent_end.close()
                raise
        self.pid = self._process.pid
        self.channel = parent_end
        self.channel.setblocking(False)
        self.output: IO[bytes] = self._process.stderr if stdio else self._process.stdout  # type: ignore[assignment]
        os.set_blocking(self.output.fileno(), False)
        self.exit_fd = os.pidfd_open(self.pid)

    @property
    def returncode(self) -> int | None:
        """Exit status; the negative signal number if the process was killed; None while it runs."""
        return self._process.poll()

    @property
    def last_output(self) -> str:
        """Last lines of the output without control characters; after a crash, the stack of the crashed thread."""
        text = bytes(self._tail).decode("utf-8", "replace")
        lines = ["".join(c for c in line if c.isprintable()).rstrip() for line in text.splitlines()]
        lines = [line for line in lines if line]
        for at, line in enumerate(lines):
            if line.startswith(_CRASHED):  # Python's dump of all threads begins with the one that crashed
                return "\n".join(lines[at : at + _TAIL_LINES])[:_TAIL_SHOWN_BYTES]
        return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_SHOWN_BYTES:]

    def send(self, command: AnyCommand) -> None:
        """Sends a command; bytes that the socket does not accept now are kept for `flush`."""
        self.answer = None
        self.stopping = self.stopping or isinstance(command, Stop)
        if len(self._unsent) < _MAX_UNSENT_BYTES:
            self._unsent += orjson.dumps({"do": command.do, "args": command}) + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Sends bytes of earlier commands that the socket did not accept; returns whether some are still unsent."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    del self._unsent[: self.channel.send(self._unsent)]
                except (BrokenPipeError, ConnectionResetError):
                    self._unsent.clear()  # the process is gone; its exit status says more
        return bool(self._unsent)

    def read(self) -> list[Message]:
        """Reads the available output and messages without waiting; returns the messages."""
        self.read_output()
        messages: list[Message] = []
        try:
            while data := self.channel.recv(_READ_BYTES):
                messages += self._parse(data)
        except BlockingIOError:
            return messages
        except ConnectionResetError:
            pass
        self.channel_closed = True
        return messages

    def read_output(self) -> None:
        """Reads the available output without waiting and keeps its last `_TAIL_BYTES`."""
        with contextlib.suppress(BlockingIOError):
            # Bounded: a rank that floods its output must not delay the others.
            for _ in range(16):
                data = os.read(self.output.fileno(), _READ_BYTES)
                if not data:
                    self.output_closed = True
                    break
                self._tail += data
                del self._tail[:-_TAIL_BYTES]

    def hang_up(self) -> None:
        """Shuts down the channel, upon which the rank closes its agent and exits, whatever it is doing."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process; no effect if the process has exited."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.exit_fd, number)

    def reap(self) -> None:
        """Waits for the process to exit and closes the channel, the output pipe and the pidfd."""
        self.read_output()
        self._process.wait()
        self.output.close()
        self.channel.close()
        os.close(self.exit_fd)

    def _parse(self, data: bytes) -> list[Message]:
        import msgspec  # which commands that start no ranks need not load

        try:
            messages = [msgspec.json.decode(line, type=Message) for line in self._lines.feed(data)]
        except (LineTooLong, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            garbled = {"code": GARBLED, "message": f"it sent an invalid message: {error}"}
            messages = [Message(kind="fatal", data=garbled)]
        for message in messages:
            if message["kind"] == "answer":
                self.answer = message["data"]
            elif message["kind"] == "fatal":
                self.fatal = message["data"]
            elif message["kind"] == "progress":
                self.doing = str(message["data"].get("doing", ""))
        return messages
