"""Main loop of a rank process: takes commands from its channel, has its worker carry them out, ends in order."""

from __future__ import annotations

import faulthandler
import gc
import queue
import shutil
from pathlib import Path
from typing import Any

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.bench_messages import FLEET_PREFIX, Fatal, Start, Stop, Stopped
from kvctl.lab.ranks.channel import Channel
from kvctl.lab.ranks.parent_watchdog import GRACE_S, Abandoned, abandon, tie_to_parent
from kvctl.lab.ranks.steady.worker import SteadyWorker
from kvctl.lab.ranks.worker import Worker
from kvctl.lab.ranks.worker_decode import DecodeWorker
from kvctl.lab.ranks.worker_prefill import PrefillWorker
from kvctl_agent.errors import LocalProtocolError, RemoteProtocolError


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
