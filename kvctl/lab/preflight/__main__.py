"""The process of a rank of `kvctl preflight`: `python -m kvctl.lab.preflight`.

Its standard input has commands, its standard output answers, as the channel of `kvctl.lab.ranks`; all commands but
"keep_alive" are methods of `Worker`. It exits at the end of its input, and `SILENCE_S` after the last bytes from it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
from types import FrameType
from typing import Any, BinaryIO

import msgspec

from kvctl.lab.ranks.__main__ import block_torch
from kvctl.lab.ranks.messages import Fatal, LineBuffer

SILENCE_S = 150.0
"""Longest time without a command: a client whose host is gone closes no connection.

An engine may hold the GIL while the kernel tries to connect, which takes up to 127 s.
"""

_GRACE_S = 5.0
_IDLE_S = 0.005
_ATTENTIVE_S = 0.0002
_PIECE_BYTES = 1 << 16


def main() -> int:
    """Serves commands until the standard input ends; returns the exit code."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # engines print to stdout
    signal.signal(signal.SIGTERM, _ended)
    faulthandler.dump_traceback_later(SILENCE_S, exit=True)
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
            if message["do"] != "keep_alive":
                _send(answers, "answer", worker.handle(message["do"], message["args"]))
    except Exception as error:
        _send(answers, "fatal", Fatal(code=type(error).__name__, message=str(error)))
        return 1
    finally:
        worker.close()


def _send(answers: BinaryIO, kind: str, data: Any) -> None:
    answers.write(msgspec.json.encode({"kind": kind, "data": data}) + b"\n")
    answers.flush()


def _read(inbox: queue.SimpleQueue[bytes], main_thread: threading.Thread) -> None:
    lines = LineBuffer()
    with contextlib.suppress(OSError):
        # Without `sys.stdin`: CPython aborts at exit if a daemon thread waits in a buffered reader.
        while piece := os.read(0, _PIECE_BYTES):
            faulthandler.dump_traceback_later(SILENCE_S, exit=True)  # here: a command may take longer
            for line in lines.feed(piece):
                inbox.put(line)
    # The client has ended. This ends the process even if its main thread hangs in an engine.
    faulthandler.dump_traceback_later(_GRACE_S, exit=True)
    signal.pthread_kill(main_thread.ident or 0, signal.SIGTERM)


def _ended(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
