"""A rank's end of the line to the bench: commands in, answers out, and the news that the bench is gone."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvctl.lab.ranks.bench_messages import COMMANDS, Command, Fatal, Lines, LineTooLong, Progress, Reply
from kvctl_agent.errors import RemoteProtocolError

_READ_BYTES = 1 << 16


def parse_command(line: bytes) -> Command:
    """One line down.

    Raises:
        RemoteProtocolError: it is no command this rig knows.
    """
    try:
        message = msgspec.json.decode(line)
        return msgspec.convert(message["args"], COMMANDS[message["do"]])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"not a rig command ({error}): {line[:80]!r}") from error


class Channel:
    """Line-based channel over an inherited socket.

    A thread reads ahead, so that the bench's end is noticed while a command is being worked on.
    """

    def __init__(
        self,
        fd: int,
        on_gone: Callable[[], None],
        parse: Callable[[bytes], Any] = parse_command,
        inbox: queue.SimpleQueue[Any] | None = None,
    ) -> None:
        """Take over file descriptor `fd`.

        Args:
            on_gone: called once, on the reader's thread, at end of file.
            parse: makes a command of a line; may raise RemoteProtocolError.
            inbox: where commands, errors and None for end of file go, for who waits for other things too.
        """
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._on_gone = on_gone
        self._parse = parse
        self._commands = queue.SimpleQueue() if inbox is None else inbox
        self._sending = threading.Lock()
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="rig-channel", daemon=True)
        self._reader.start()

    def receive(self) -> Command | None:
        """The next command, or None at end of file; waits.

        Raises:
            RemoteProtocolError: a line that is no command.
        """
        command: Command | RemoteProtocolError | None = self._commands.get()
        if isinstance(command, RemoteProtocolError):
            raise command
        return command

    def answer(self, command: Command, data: Mapping[str, Any]) -> None:
        """Report a command done."""
        self.send(Reply(kind="answer", to=command.do, data=dict(data)))

    def last_answer(self, command: Command, data: Mapping[str, Any]) -> None:
        """Report the last command done."""
        self.expect_end()
        self.answer(command, data)

    def expect_end(self) -> None:
        """From now on the other side may hang up and be right."""
        self._closing = True

    def progress(self, to: str, doing: str) -> None:
        """Say what this rank does now, so that a missed deadline can name it."""
        self.send(Reply(kind="progress", to=to, data=dict(Progress(doing=doing))))

    def fatal(self, to: str, error: BaseException) -> None:
        """Say why this rank ends."""
        self.send(Reply(kind="fatal", to=to, data=dict(Fatal(code=type(error).__name__, message=str(error)))))

    def close(self) -> None:
        """Hang up; `on_gone` is not called any more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Say something."""
        # A bench that is gone is the reader's news, not an error of whoever talks.
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def _read(self) -> None:
        lines = Lines()
        try:
            while data := self._socket.recv(_READ_BYTES):
                for line in lines.feed(data):
                    try:
                        self._commands.put(self._parse(line))
                    except RemoteProtocolError as error:
                        self._commands.put(error)
        except (ConnectionResetError, LineTooLong):
            pass
        self._commands.put(None)
        if not self._closing:
            self._on_gone()
