"""The process of a rank of `kvctl preflight`: `python -m kvctl.lab.preflight`, with commands on its standard input."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
from types import FrameType
from typing import Any

import msgspec

from kvctl.lab.preflight import messages
from kvctl.lab.ranks.__main__ import block_torch
from kvctl.lab.ranks.messages import Fatal, LineBuffer, LineTooLong

_GRACE_S = 5.0
_READ_BYTES = 1 << 16
_IDLE_S = 0.005
_ATTENTIVE_S = 0.0002


def main() -> int:
    """Serves commands until the standard input ends; returns the exit code."""
    # Engines print to stdout.
    answers = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _ended)
    faulthandler.dump_traceback_later(messages.SILENCE_S, exit=True)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox, threading.main_thread()), name="preflight-stdin", daemon=True).start()
    block_torch()
    from kvctl.lab.preflight.worker import Worker

    worker = Worker()
    try:
        while True:
            try:
                line = inbox.get(timeout=_ATTENTIVE_S if worker.attentive else _IDLE_S)
            except queue.Empty:
                worker.progress()
                continue
            message: dict[str, Any] = msgspec.json.decode(line)
            command = msgspec.convert(message["args"], messages.COMMANDS[message["do"]])
            if not isinstance(command, messages.KeepAlive):
                _send(answers, "answer", worker.handle(command))
    except Exception as error:
        _send(answers, "fatal", Fatal(code=type(error).__name__, message=str(error)))
        return 1
    finally:
        worker.close()


def _send(answers: int, kind: str, data: Any) -> None:
    view = memoryview(msgspec.json.encode({"kind": kind, "data": data}) + b"\n")
    while view:
        view = view[os.write(answers, view) :]


def _read(inbox: queue.SimpleQueue[bytes], main_thread: threading.Thread) -> None:
    lines = LineBuffer()
    try:
        while data := os.read(0, _READ_BYTES):
            faulthandler.dump_traceback_later(messages.SILENCE_S, exit=True)  # here: a command may take longer
            for line in lines.feed(data):
                inbox.put(line)
    except (OSError, LineTooLong):
        pass
    # The client has ended. This ends the process even if its main thread hangs in an engine.
    faulthandler.dump_traceback_later(_GRACE_S, exit=True)
    signal.pthread_kill(main_thread.ident or 0, signal.SIGTERM)


def _ended(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
