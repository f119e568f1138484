"""Main loop of a rank process: the channel to the parent, the parent watchdog, and the dispatch of commands.

A rank ends when its parent is gone, however the parent ended: the kernel sends SIGTERM when the parent dies, and the
channel's reader sees end of file, also if the parent only closed the channel of this rank. Both raise `Abandoned` in
the main thread, so that `finally` blocks run and no socket stays behind. A rank that has not exited within `GRACE_S`
after that is terminated, with the stacks of its threads on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import queue
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.messages import (
    COMMANDS,
    FLEET_PREFIX,
    Command,
    Connect,
    Fatal,
    LineBuffer,
    LineTooLong,
    Start,
    Stop,
    Stopped,
)
from kvctl.lab.ranks.worker import Worker
from kvctl_agent.errors import LocalProtocolError, RemoteProtocolError

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


class Abandoned(BaseException):
    """Raised in the main thread when the parent is gone; a BaseException, so that no `except Exception` catches it."""


def tie_to_parent(parent_pid: int) -> None:
    """Arranges that `Abandoned` is raised in the main thread when process `parent_pid` dies.

    Call it from the main thread, before anything else.

    Raises:
        Abandoned: the parent is dead already.
    """
    signal.signal(signal.SIGTERM, _abandoned)
    # The kernel watches the parent's thread that started this process; that is always the parent's main thread.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It died before the lines above. 0: this process is in a PID namespace of its own and does not see its parent.
    if os.getppid() not in (parent_pid, 0):
        raise Abandoned(f"the parent (pid {parent_pid}) is gone")


def abandon() -> None:
    """Raises `Abandoned` in the main thread; called on the channel's reader thread at end of file."""
    # A real signal, because the main thread may wait in a lock or a system call.
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)


def _abandoned(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt `finally` blocks
    faulthandler.dump_traceback_later(GRACE_S, exit=True)
    raise Abandoned("the parent is gone")


def parse_command(line: bytes) -> Command:
    """Parses one line of the channel as a command; raises RemoteProtocolError if the line is not a valid command."""
    try:
        message = msgspec.json.decode(line)
        return msgspec.convert(message["args"], COMMANDS[message["do"]])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"not a command of a rank ({error}): {line[:80]!r}") from error


class Channel:
    """A rank's end of the channel to its parent, over an inherited socket.

    A thread reads commands ahead, so that end of file is noticed while the main thread runs a command.
    """

    def __init__(self, fd: int, inbox: queue.SimpleQueue[Any], on_gone: Callable[[], None]) -> None:
        """Takes ownership of file descriptor `fd` and starts the reader thread.

        Args:
            inbox: queue that receives commands, a RemoteProtocolError for each invalid line, and None at end of file.
            on_gone: callback for end of file, called once on the reader thread, unless `expect_end` or `close` was
                called before.
        """
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._on_gone = on_gone
        self._inbox = inbox
        self._sending = threading.Lock()
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="rank-channel", daemon=True)
        self._reader.start()

    def send(self, kind: str, data: Mapping[str, Any]) -> None:
        """Sends a message to the parent; `kind` and `data` are the fields of `messages.Message`."""
        # If the parent is gone, the reader thread reports it; sending then has no effect.
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(msgspec.json.encode({"kind": kind, "data": data}) + b"\n")

    def expect_end(self) -> None:
        """Suppresses the call of `on_gone` at end of file from now on."""
        self._closing = True

    def close(self) -> None:
        """Closes the socket without calling `on_gone`."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        lines = LineBuffer()
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


def serve(fd: int, parent_pid: int) -> int:
    """Handles the parent's commands until Stop, or until the parent is gone; returns the exit code of the process."""
    server = _Server(fd)
    try:
        tie_to_parent(parent_pid)
        server.run()
    except Abandoned:
        server.close()
        server.remove_directory()
        return 1
    return 0


class _Server:
    def __init__(self, fd: int) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = Channel(fd, self._inbox, on_gone=abandon)
        self._worker: Worker | None = None
        self._directory: Path | None = None

    def run(self) -> None:
        """Handles commands until Stop; reports an exception to the parent as a fatal message and re-raises it."""
        try:
            while not isinstance(item := self._next(), Stop):
                self._handle(item)
            self.close()
        except Exception as error:
            # Reported before anything is closed, because closing may take a while.
            self._channel.send("fatal", Fatal(code=type(error).__name__, message=str(error)))
            faulthandler.dump_traceback_later(GRACE_S, exit=True)
            self.close()
            raise
        self._channel.expect_end()
        self._channel.send("answer", Stopped(peak_rss_bytes=measure.peak_rss_bytes()))
        self._channel.close()

    def close(self) -> None:
        """Closes the worker, if there is one and it is not closed already."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def remove_directory(self) -> None:
        """Removes the fleet's private directory, which a parent that is gone can no longer do."""
        if self._directory is not None and self._directory.name.startswith(FLEET_PREFIX):
            shutil.rmtree(self._directory, ignore_errors=True)

    def _next(self) -> Any:
        return self._worker.next() if self._worker is not None else self._inbox.get()

    def _handle(self, item: Any) -> None:
        if item is None:
            raise Abandoned("the parent hung up")
        if isinstance(item, RemoteProtocolError):
            raise item
        if isinstance(item, Start):
            self._directory = Path(item.fleet_dir)
            self._worker = Worker(item, self._inbox, self._channel.send)
            self._worker.begin()
        elif self._worker is None:
            raise LocalProtocolError(f"{item.do} before start")
        else:
            self._worker.handle(item)
        if isinstance(item, Start | Connect):
            gc.freeze()  # as engines do after startup: objects that exist now live long and need not be traversed again
