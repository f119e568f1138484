"""One rig process: hears commands on the channel, has its worker carry them out, and ends in order however it ends."""

from __future__ import annotations

import faulthandler
import gc
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.bench_messages import (
    FLEET_PREFIX,
    Command,
    Floors,
    Prepare,
    Probe,
    Run,
    Start,
    Stop,
    Stopped,
    Verify,
)
from kvctl.lab.ranks.channel import Channel
from kvctl.lab.ranks.parent_watchdog import GRACE_S, Abandoned, abandon, tie_to_parent
from kvctl.lab.ranks.worker import Worker
from kvctl.lab.ranks.worker_decode import DecodeWorker
from kvctl.lab.ranks.worker_prefill import PrefillWorker
from kvctl_agent.errors import LocalProtocolError


def serve(fd: int, parent_pid: int) -> int:
    """Serve the bench at the other end of `fd` until it says stop, hangs up or dies; returns the exit code."""
    rank = _Rank(Channel(fd, on_gone=abandon))
    try:
        tie_to_parent(parent_pid)
        return rank.serve()
    except Abandoned:
        rank.close()
        rank.remove_fleet_dir()
        return 1


class _Rank:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._worker: Worker | None = None
        self._fleet_dir: Path | None = None

    def serve(self) -> int:
        doing = Start.do
        try:
            while (command := self._channel.receive()) is not None:
                doing = command.do
                if isinstance(command, Stop):
                    self.close()
                    self._channel.last_answer(command, Stopped(peak_rss_bytes=measure.peak_rss_bytes()))
                    self._channel.close()
                    return 0
                self._channel.answer(command, self._obey(command))
        except Exception as error:
            # Told before anything is closed: a close may take a while, and this is what people want to know.
            self._channel.fatal(doing, error)
            faulthandler.dump_traceback_later(GRACE_S, exit=True)
            self.close()
            raise
        raise Abandoned("the bench hung up")

    def close(self) -> None:
        """Close what was started; idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def remove_fleet_dir(self) -> None:
        """What the bench would have done, had it lived."""
        if self._fleet_dir is not None and self._fleet_dir.name.startswith(FLEET_PREFIX):
            shutil.rmtree(self._fleet_dir, ignore_errors=True)

    def _obey(self, command: Command) -> Mapping[str, Any]:
        if isinstance(command, Start):
            self._fleet_dir = Path(command.fleet_dir)
            return self._start(command)
        if self._worker is None:
            raise LocalProtocolError(f"{command.do} before start")
        if isinstance(command, Floors):
            return self._worker.floors(command)
        if isinstance(command, Probe):
            return self._worker.probe()
        if isinstance(command, Prepare):
            self._worker.prepare(command)
            return {}
        if isinstance(command, Run):
            return self._worker.run(command)
        if isinstance(command, Verify):
            return self._worker.verify(command)
        raise LocalProtocolError(f"{command.do} has no handler")

    def _start(self, start: Start) -> Mapping[str, Any]:
        def progress(doing: str) -> None:
            self._channel.progress(Start.do, doing)

        kind = PrefillWorker if start.role == "prefill" else DecodeWorker
        self._worker = kind(start, progress)
        ready = self._worker.meet(progress)
        gc.freeze()  # as engines do once they are up: what was made so far stays, and need not be looked at again
        return ready
