"""One process of a steady fleet: hears the fleet and its agent in one queue, and ends in order however it ends."""

from __future__ import annotations

import faulthandler
import gc
import queue
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from kvctl.lab.ranks.bench_messages import FLEET_PREFIX, Fatal
from kvctl.lab.ranks.channel import Channel
from kvctl.lab.ranks.parent_watchdog import GRACE_S, Abandoned, abandon, tie_to_parent
from kvctl.lab.ranks.steady.agent import set_fault
from kvctl.lab.ranks.steady.decode import DecodeWorker
from kvctl.lab.ranks.steady.prefill import PrefillWorker
from kvctl.lab.ranks.steady.resource_usage import usage
from kvctl.lab.ranks.steady.worker import Change, Worker
from kvctl.lab.ranks.steady_messages import (
    COMMANDS,
    Abort,
    Command,
    Leave,
    News,
    OpenRoom,
    SendRoom,
    Serve,
    SetFault,
    Tell,
)
from kvctl_agent.errors import LocalProtocolError, RemoteProtocolError

_SAY_EVERY_S = 1.0


def serve(fd: int, parent_pid: int) -> int:
    """Serve the fleet at the other end of `fd` until it says leave, hangs up or dies; returns the exit code."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    rank = _Rank(Channel(fd, on_gone=abandon, parse=parse, inbox=inbox), inbox)
    try:
        tie_to_parent(parent_pid)
        return rank.serve()
    except Abandoned:
        rank.close()
        rank.remove_fleet_dir()
        return 1


def parse(line: bytes) -> Command:
    """One line down.

    Raises:
        RemoteProtocolError: it is no command that a steady rank knows.
    """
    try:
        message = msgspec.json.decode(line)
        return msgspec.convert(message["args"], COMMANDS[message["do"]])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RemoteProtocolError(f"not a command ({error}): {line[:80]!r}") from error


class _Rank:
    def __init__(self, channel: Channel, inbox: queue.SimpleQueue[Any]) -> None:
        self._channel = channel
        self._inbox = inbox
        self._worker: Worker | None = None
        self._fleet_dir: Path | None = None
        self._said_at = 0.0

    def serve(self) -> int:
        try:
            while True:
                item = self._next()
                if isinstance(item, Leave):
                    self.close()
                    self._channel.expect_end()
                    self._channel.send(News(kind="left", data={}))
                    self._channel.close()
                    return 0
                self._take(item)
        except Exception as error:
            # Told before anything is closed: a close may take a while, and this is what people want to know.
            fatal = Fatal(code=type(error).__name__, message=str(error))
            self._channel.send(News(kind="fatal", data=dict(fatal)))
            faulthandler.dump_traceback_later(GRACE_S, exit=True)
            self.close()
            raise

    def close(self) -> None:
        """Close what was started; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def remove_fleet_dir(self) -> None:
        """What the fleet would have done, had it lived."""
        if self._fleet_dir is not None and self._fleet_dir.name.startswith(FLEET_PREFIX):
            shutil.rmtree(self._fleet_dir, ignore_errors=True)

    def _next(self) -> Any:
        """The next command or change; looks after the worker's rooms meanwhile."""
        while True:
            if self._worker is not None:
                self._worker.look()
                self._say_who_is_missing(self._worker)
            try:
                return self._inbox.get(timeout=self._worker.patience_s() if self._worker else None)
            except queue.Empty:
                continue

    def _take(self, item: Any) -> None:
        if item is None:
            raise Abandoned("the fleet hung up")
        if isinstance(item, RemoteProtocolError):
            raise item
        if isinstance(item, Serve):
            self._start(item)
            return
        worker = self._worker
        if worker is None:
            raise LocalProtocolError(f"{item} before serve")
        if isinstance(item, Change):
            worker.changed(item)
        elif isinstance(item, OpenRoom | SendRoom | Abort):
            worker.obey(item)
        elif isinstance(item, SetFault):
            self._channel.send(News(kind="faults", data=dict(set_fault(worker.agent, item))))
        elif isinstance(item, Tell):
            strays = worker.tenancy.sweep() if item.sweep else []
            self._channel.send(News(kind="usage", data=dict(usage(worker, item.token, strays))))

    def _start(self, command: Serve) -> None:
        start = command.start
        self._fleet_dir = Path(start.fleet_dir)
        kind = PrefillWorker if start.role == "prefill" else DecodeWorker
        self._worker = kind(command, self._inbox, self._channel.send)
        gc.freeze()  # as engines do once they are up

    def _say_who_is_missing(self, worker: Worker) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAY_EVERY_S and (missing := worker.agent.waiting_for()):
            self._said_at = now
            self._channel.send(News(kind="progress", data={"doing": missing}))
