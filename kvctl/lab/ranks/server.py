"""The rank process: channel to the parent, parent watchdog, and the main loop that passes commands to the worker.

The rank ends when its parent is gone, however the parent ended. The kernel sends SIGTERM when the parent dies, and the
channel's reader sees end of file, also if the parent only dropped this rank. Both raise `Abandoned` in the main thread,
so that `finally` blocks run and no socket stays behind. A rank that cannot unwind within `GRACE_S` is ended, with the
stacks of its threads on stderr.
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
    """The parent is gone. Not an Exception, so that no handler on the way up takes it for an error."""


def tie_to_parent(parent_pid: int) -> None:
    """Arranges for `Abandoned` in the main thread when process `parent_pid` dies; call it there, first.

    Raises:
        Abandoned: the parent is dead already.
    """
    signal.signal(signal.SIGTERM, _abandoned)
    # The kernel watches the parent's thread that started this process; that is always the parent's main thread.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the line above
        raise Abandoned(f"the parent (pid {parent_pid}) is gone")


def abandon() -> None:
    """Ends this process in order; called by the channel's reader at end of file."""
    # A real signal, because the main thread may wait in a lock or a system call.
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)


def _abandoned(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # both ways may fire; unwinding must not be interrupted
    faulthandler.dump_traceback_later(GRACE_S, exit=True)
    raise Abandoned("the parent is gone")


def parse_command(line: bytes) -> Command:
    """Parses one line of the channel.

    Raises:
        RemoteProtocolError: it is not a valid command.
    """
    try:
        message = msgspec.json.decode(line)
        return msgspec.convert(message["args"], COMMANDS[message["do"]])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"not a command of a rank ({error}): {line[:80]!r}") from error


class Channel:
    """A rank's end of the line-based channel, over an inherited socket.

    A thread reads ahead, so that the end of the parent is noticed while a command runs.
    """

    def __init__(self, fd: int, inbox: queue.SimpleQueue[Any], on_gone: Callable[[], None]) -> None:
        """Takes over file descriptor `fd`.

        Args:
            inbox: receives commands, a RemoteProtocolError for each invalid line, and None at end of file.
            on_gone: called once, on the reader's thread, at end of file, unless `expect_end` was called before.
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
        """Sends a message; `kind` is one of `Message.kind`."""
        # The reader reports a parent that is gone; it is not the sender's error.
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(msgspec.json.encode({"kind": kind, "data": data}) + b"\n")

    def expect_end(self) -> None:
        """Accepts end of file from now on."""
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
    """Serves the parent at the other end of `fd` until Stop, end of file or its death; returns the exit code."""
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
        """Handles commands until Stop."""
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
        """Closes the worker; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def remove_directory(self) -> None:
        """Removes the fleet's directory in place of the parent."""
        if self._directory is not None and self._directory.name.startswith(FLEET_PREFIX):
            shutil.rmtree(self._directory, ignore_errors=True)

    def _next(self) -> Any:
        """Returns the next command or state change; polls the worker meanwhile."""
        while True:
            wait_s = self._worker.poll() if self._worker is not None else None
            try:
                return self._inbox.get(timeout=wait_s)
            except queue.Empty:
                continue

    def _handle(self, item: Any) -> None:
        if item is None:
            raise Abandoned("the parent hung up")
        if isinstance(item, RemoteProtocolError):
            raise item
        answer: Mapping[str, Any] | None
        if isinstance(item, Start):
            self._directory = Path(item.fleet_dir)
            self._worker = Worker(item, self._inbox, self._channel.send)
            answer = self._worker.begin()
        elif self._worker is None:
            raise LocalProtocolError(f"{item.do} before start")
        else:
            answer = self._worker.handle(item)
        if answer is not None:
            self._channel.send("answer", answer)
        if isinstance(item, Start):
            gc.freeze()  # as engines do after startup: existing objects stay, and need not be traversed again
