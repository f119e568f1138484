"""A rank's end of the channel to its parent: commands in, messages out, and the end of the parent noticed."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvctl.lab.ranks.bench_messages import Lines, LineTooLong
from kvctl.lab.ranks.steady_messages import COMMANDS, Command
from kvctl_agent.errors import RemoteProtocolError

_READ_BYTES = 1 << 16


def parse_command(line: bytes) -> Command:
    """One line down.

    Raises:
        RemoteProtocolError: it is no command of a rank.
    """
    try:
        message = msgspec.json.decode(line)
        return msgspec.convert(message["args"], COMMANDS[message["do"]])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"not a rig command ({error}): {line[:80]!r}") from error


class Channel:
    """Line-based channel over an inherited socket.

    A thread reads ahead, so that the end of the parent is noticed while a command is being carried out.
    """

    def __init__(self, fd: int, inbox: queue.SimpleQueue[Any], on_gone: Callable[[], None]) -> None:
        """Take over file descriptor `fd`.

        Args:
            inbox: gets commands, a RemoteProtocolError for each line that is none, and None at end of file.
            on_gone: called once, on the reader's thread, at end of file, unless `expect_end` was called before.
        """
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._on_gone = on_gone
        self._inbox = inbox
        self._sending = threading.Lock()
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="rig-channel", daemon=True)
        self._reader.start()

    def send(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send a message of a kind of `contract.rig.Message`."""
        # A parent that is gone is reported by the reader; it is no error of the sender.
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(msgspec.json.encode({"kind": kind, "data": data}) + b"\n")

    def expect_end(self) -> None:
        """From now on end of file is in order."""
        self._closing = True

    def close(self) -> None:
        """Close the socket; `on_gone` is not called any more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        lines = Lines()
        try:
            while data := self._socket.recv(_READ_BYTES):
                for line in lines.feed(data):
                    try:
                        self._inbox.put(parse_command(line))
                    except RemoteProtocolError as error:
                        self._inbox.put(error)
        except (ConnectionResetError, LineTooLong):
            pass
        self._inbox.put(None)
        if not self._closing:
            self._on_gone()
