"""The copy pool: all jobs run once on the requested number of threads, errors are raised, threads end at close."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.memory.copy_pool import CopyPool, copy_threads


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_job_runs_exactly_once(threads: int) -> None:
    pool = CopyPool(threads).start()
    try:
        for count in (0, 1, 2, 50):
            done: list[int] = []
            pool.run([partial(done.append, number) for number in range(count)])
            assert sorted(done) == list(range(count))
    finally:
        pool.close()


def test_one_thread_is_the_caller_itself() -> None:
    pool = CopyPool(1).start()
    seen: list[int] = []
    pool.run([lambda: seen.append(threading.get_ident())])
    pool.close()
    assert seen == [threading.get_ident()]


def test_two_threads_run_two_jobs_at_the_same_time() -> None:
    pool = CopyPool(2).start()
    meeting = threading.Barrier(2)
    try:
        pool.run([partial(meeting.wait, 20), partial(meeting.wait, 20)])
    finally:
        pool.close()


def test_an_error_is_raised_after_the_running_jobs_ended_and_stops_the_rest() -> None:
    pool = CopyPool(2).start()
    both, slow_done = threading.Barrier(2), threading.Event()
    started: list[int] = []

    def fails() -> None:
        both.wait(60)
        raise ValueError("page 3")

    def slow() -> None:
        both.wait(60)
        threading.Event().wait(0.05)
        slow_done.set()

    def later() -> None:
        started.append(1)
        threading.Event().wait(0.05)

    try:
        with pytest.raises(ValueError, match="page 3"):
            pool.run([fails, slow, *[later] * 20])
        assert slow_done.is_set()
        assert len(started) < 20
        pool.run([slow_done.clear])
        assert not slow_done.is_set(), "the pool still works after an error"
    finally:
        pool.close()


def test_close_joins_its_threads_and_refuses_later_work() -> None:
    before = threading.active_count()
    pool = CopyPool(3).start()
    assert threading.active_count() == before + 2
    pool.close()
    pool.close()
    assert threading.active_count() == before
    with pytest.raises(LocalProtocolError, match="closed"):
        pool.run([])


def test_the_default_is_one_or_two_threads() -> None:
    assert copy_threads() in (1, 2)
