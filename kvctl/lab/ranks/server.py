"""Ends a rank process when its parent is gone, however it ended: the rank closes its agent and exits.

Two threads lead to the same end. The kernel sends SIGTERM when the parent dies, and the channel's reader sees end of
file, also where the parent only dropped this rank. Either way the main thread gets `Abandoned`, so that `finally`
blocks run and no socket stays behind; a rank that cannot unwind within `GRACE_S` is ended with its stacks on stderr.
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
from kvctl.lab.ranks.messages import COMMANDS, FLEET_PREFIX, Command, Fatal, Lines, LineTooLong, Start, Stop, Stopped
from kvctl.lab.ranks.steady.worker import SteadyWorker
from kvctl.lab.ranks.worker import Worker
from kvctl.lab.ranks.worker_decode import DecodeWorker
from kvctl.lab.ranks.worker_prefill import PrefillWorker
from kvctl_agent.errors import LocalProtocolError, RemoteProtocolError

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class Abandoned(BaseException):
    """The parent is gone. Not an Exception: nothing on the way up may take it for an error of its own."""


def tie_to_parent(parent_pid: int) -> None:
    """Arrange for `Abandoned` in the main thread when process `parent_pid` dies; call it there, first thing.

    Raises:
        Abandoned: it is dead already.
    """
    signal.signal(signal.SIGTERM, _abandoned)
    # The kernel means the thread of the parent that started us: ranks are started from its main thread.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the line above
        raise Abandoned(f"the parent (pid {parent_pid}) is gone")


def abandon() -> None:
    """End this process in order: called by the channel's reader at end of file."""
    # A real signal, because the main thread may sit in a lock or a system call.
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)


def _abandoned(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # both ways may fire; unwinding must not be cut short
    faulthandler.dump_traceback_later(GRACE_S, exit=True)
    raise Abandoned("the parent is gone")


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


def serve(fd: int, parent_pid: int) -> int:
    """Serve the parent at the other end of `fd` until it sends Stop, hangs up or dies; returns the exit code."""
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
        self._worker: Worker | SteadyWorker | None = None
        self._directory: Path | None = None

    def run(self) -> None:
        """Carry out commands until Stop."""
        try:
            while not isinstance(item := self._next(), Stop):
                self._take(item)
            self.close()
        except Exception as error:
            # Sent before anything is closed: a close may take a while, and this is what people want to know.
            self._channel.send("fatal", Fatal(code=type(error).__name__, message=str(error)))
            faulthandler.dump_traceback_later(GRACE_S, exit=True)
            self.close()
            raise
        self._channel.expect_end()
        self._channel.send("answer", Stopped(peak_rss_bytes=measure.peak_rss_bytes()))
        self._channel.close()

    def close(self) -> None:
        """Close the worker; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def remove_directory(self) -> None:
        """Remove the fleet's directory, as the parent would have done."""
        if self._directory is not None and self._directory.name.startswith(FLEET_PREFIX):
            shutil.rmtree(self._directory, ignore_errors=True)

    def _next(self) -> Any:
        """The next command or state change; the worker looks after its rooms meanwhile."""
        while True:
            wait_s = self._worker.look() if self._worker is not None else None
            try:
                return self._inbox.get(timeout=wait_s)
            except queue.Empty:
                continue

    def _take(self, item: Any) -> None:
        if item is None:
            raise Abandoned("the parent hung up")
        if isinstance(item, RemoteProtocolError):
            raise item
        if isinstance(item, Start):
            self._start(item)
        elif self._worker is None:
            raise LocalProtocolError(f"{item.do} before start")
        elif (answer := self._worker.handle(item)) is not None:
            self._channel.send("answer", answer)

    def _start(self, start: Start) -> None:
        self._directory = Path(start.fleet_dir)
        if start.steady:
            self._worker = SteadyWorker(start, self._inbox, self._channel.send)
        else:
            kind = PrefillWorker if start.role == "prefill" else DecodeWorker
            self._worker = worker = kind(start, self._report_progress)
            self._channel.send("answer", worker.meet(self._report_progress))
        gc.freeze()  # as engines do once they are up: what was made so far stays, and need not be looked at again

    def _report_progress(self, doing: str) -> None:
        self._channel.send("progress", {"doing": doing})
