"""Two threads for one copy: numpy's row copies release the GIL, and one core cannot fill the memory bus."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from kvctl_agent.errors import LocalProtocolError


def copy_threads() -> int:
    """How many threads a copy is worth on this machine: two where there are two cores."""
    return min(2, len(os.sched_getaffinity(0)))


class CopyPool:
    """A caller and `threads - 1` helpers that work through a list of jobs; with one thread, just the caller.

    Whoever makes a crew closes it; helpers are daemons, so that a process which forgets still ends.
    """

    def __init__(self, threads: int | None = None, name: str = "kvctl-copy") -> None:
        """Start the helpers; `threads` defaults to `copy_threads()`."""
        self.threads = copy_threads() if threads is None else max(1, threads)
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._closed = False
        self._helpers = [
            threading.Thread(target=self._help, name=f"{name}-{number}", daemon=True)
            for number in range(1, self.threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run all jobs, in any order and on any thread of the crew, and return when all are done.

        After a job raises no further one is started, and its error is raised here once the running ones ended.
        """
        if self._closed:
            raise LocalProtocolError("the copy crew is closed; its owner must stop copying before it closes")
        batch = _Batch(jobs)
        for _ in self._helpers[: len(jobs) - 1]:
            self._batches.put(batch)
        batch.work()
        batch.wait()

    def close(self) -> None:
        """End and join the helpers; idempotent. Batches that were already queued are finished first."""
        if self._closed:
            return
        self._closed = True
        for _ in self._helpers:
            self._batches.put(None)
        for helper in self._helpers:
            helper.join()

    def _help(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.work()


class _Batch:
    """One `run`: jobs are taken one by one, so that a slow core takes fewer."""

    def __init__(self, jobs: Sequence[Callable[[], object]]) -> None:
        self._jobs: Iterator[Callable[[], object]] = iter(jobs)
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        """Take and run jobs until none is left."""
        while (job := self._take()) is not None:
            error = None
            try:
                job()
            except BaseException as raised:
                error = raised
            with self._changed:
                self._running -= 1
                self._error = self._error or error
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait for the jobs other threads still run; raise the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)
        if self._error is not None:
            raise self._error

    def _take(self) -> Callable[[], object] | None:
        with self._changed:
            job = None if self._error else next(self._jobs, None)
            if job is not None:
                self._running += 1
            return job
