"""Thread pool for host copies.

numpy's row copies release the GIL, and one core cannot saturate the memory bus, so two threads share each copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from kvctl_agent.errors import LocalProtocolError


def copy_threads() -> int:
    """Return the number of threads for a copy on this machine: two if the process may use two cores, else one."""
    return min(2, len(os.sched_getaffinity(0)))


class CopyPool:
    """Runs lists of jobs on the calling thread and `threads - 1` helper threads.

    The owner must close the pool. Helpers are daemon threads, so a process whose owner does not close it still exits.
    """

    def __init__(self, threads: int | None = None, name: str = "kvctl-copy") -> None:
        """The helper threads run after `start`.

        Args:
            threads: Threads including the caller; `copy_threads()` if None.
            name: Prefix of the helper threads' names.
        """
        self.threads = copy_threads() if threads is None else max(1, threads)
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._closed = False
        self._helpers = [
            threading.Thread(target=self._help, name=f"{name}-{number}", daemon=True)
            for number in range(1, self.threads)
        ]

    def start(self) -> CopyPool:
        """Start the helpers."""
        for helper in self._helpers:
            helper.start()
        return self

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run all jobs, in any order and on any thread of the pool, and return when all have ended.

        Once a job has raised an exception, no further job is started; the exception is raised here after the running
        jobs have ended.
        """
        if self._closed:
            raise LocalProtocolError("the copy pool is closed; its owner must stop copying before closing it")
        batch = _Batch(jobs)
        for _ in self._helpers[: len(jobs) - 1]:
            self._batches.put(batch)
        batch.work()
        batch.wait()

    def close(self) -> None:
        """Stop and join the helper threads; idempotent. Batches that are already queued are finished first."""
        if self._closed:
            return
        self._closed = True
        for _ in self._helpers:
            self._batches.put(None)
        for helper in self._helpers:
            if helper.ident is not None:
                helper.join()

    def _help(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.work()


class _Batch:
    """The jobs of one `run`. Threads take jobs one at a time, so a slower core takes fewer of them."""

    def __init__(self, jobs: Sequence[Callable[[], object]]) -> None:
        self._jobs: Iterator[Callable[[], object]] = iter(jobs)
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        """Take and run jobs until no job is left."""
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
        """Wait for jobs that still run on other threads, and raise the first exception."""
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
