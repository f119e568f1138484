"""Sharing the GIL: which waits of the control loop keep it, for how long, pauses, and system calls that never wait."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from kvctl_agent import gil
from kvctl_agent.gil import GilSharing, MainThread, ReceiveBuffer

US, MS = 1_000, 1_000_000
HOLD_NS, WAKE_NS, ANSWER_NS = gil._HOLD_NS, gil._WAKE_NS, gil._ANSWER_NS
HOLD_FEW_CORES_NS, WAKE_FEW_CORES_NS = gil._HOLD_FEW_CORES_NS, gil._WAKE_FEW_CORES_NS


@pytest.fixture
def no_core_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's count of the time without a core, as the list's only item."""
    count = [7_000 * MS]
    monkeypatch.setattr(gil, "no_core_ns", lambda: count[0])
    return count


class Loop:
    """A control loop on a clock of its own, whose waits without the GIL end `late_ns` late.

    Attributes:
        asked: how often the thread's CPU time was asked for.
        yields: limits of the pauses made for the engine's thread.
        answer_ns: how long after the release the main thread runs Python; None: it does not.
        kept_ns: how long another thread then keeps the GIL.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, few_cores: bool = False) -> None:
        self.now_ns = self.cpu_ns = 5 * MS
        self.yields: list[int] = []
        self.answer_ns: int | None = 50 * US
        self.kept_ns = 5 * MS
        self.asked = 0
        clock = SimpleNamespace(monotonic_ns=lambda: self.now_ns, thread_time_ns=self.thread_time_ns)
        monkeypatch.setattr(gil, "time", clock)
        monkeypatch.setattr(gil, "MainThread", lambda: SimpleNamespace(runs_within=self.runs_within))
        self.sharing = GilSharing(few_cores)
        self.release(0, 0)

    def runs_within(self, limit_ns: int) -> bool:
        self.yields.append(limit_ns)
        waited_ns = limit_ns if self.answer_ns is None else min(limit_ns, self.answer_ns)
        self.now_ns += waited_ns + self.kept_ns
        return waited_ns == self.answer_ns

    def yield_after(self, ns: int) -> None:
        self.work(ns)
        self.sharing.yield_if_due()

    def thread_time_ns(self) -> int:
        self.asked += 1
        return self.cpu_ns

    def work(self, ns: int) -> None:
        self.now_ns += ns
        self.cpu_ns += ns

    def plan(self, wait_s: float) -> tuple[float, bool]:
        return self.sharing.plan(wait_s, self.now_ns)

    def release(self, asked_ns: int, late_ns: int, times: int = 1) -> None:
        for _ in range(times):
            self.now_ns += asked_ns + late_ns
            self.sharing.released(asked_ns, asked_ns + late_ns, self.now_ns)


@pytest.fixture
def loop(no_core_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


@pytest.fixture
def contended(loop: Loop) -> Loop:
    loop.release(1 * MS, 4 * MS, times=20)
    assert loop.sharing.contended
    return loop


def test_alone_every_wait_releases_the_gil_for_as_long_as_asked(loop: Loop) -> None:
    loop.release(1 * MS, 60 * US, times=20)
    assert not loop.sharing.contended
    for wait_s in (20e-6, 5e-3, 0.1):
        assert loop.plan(wait_s) == (wait_s, False)


def test_a_poll_keeps_the_gil_until_the_acquisition_is_old(loop: Loop) -> None:
    loop.work(HOLD_NS)
    assert loop.plan(0.0) == (0.0, True)
    loop.work(1)
    assert loop.plan(0.0) == (0.0, False)
    loop.release(0, 0)
    assert loop.plan(0.0) == (0.0, True)


def test_alone_the_cpu_time_is_not_asked_for(loop: Loop) -> None:
    for _ in range(20):
        loop.work(10 * HOLD_NS)
        assert not loop.plan(1e-3)[1]
        loop.release(1 * MS, 60 * US)
    assert not loop.asked


def test_beside_a_thread_that_computes_a_short_wait_keeps_the_gil(contended: Loop) -> None:
    assert contended.plan(50e-6) == (50e-6, True)


def test_waits_and_work_share_one_limit(contended: Loop) -> None:
    held_ns = 0
    while contended.plan(50e-6)[1]:
        contended.now_ns += 50 * US
        contended.work(10 * US)
        held_ns += 60 * US
    assert HOLD_NS - 60 * US <= held_ns <= HOLD_NS + 10 * US


def test_a_call_in_which_the_thread_waited_for_the_gil_begins_a_new_acquisition(contended: Loop) -> None:
    contended.work(HOLD_NS)
    contended.now_ns += 4 * MS
    assert contended.plan(50e-6) == (50e-6, True)


def test_a_longer_wait_lasts_as_long_as_getting_the_gil_back_takes(contended: Loop) -> None:
    assert contended.plan(HOLD_NS * 1e-9 + 1e-6) == (pytest.approx(4e-3, rel=0.01), False)
    assert contended.plan(0.1) == (0.1, False)


def test_work_that_is_there_is_not_delayed_by_the_plan(contended: Loop) -> None:
    contended.work(2 * HOLD_NS)
    assert contended.plan(0.0) == (0.0, False)


def test_single_late_waits_are_not_contention(loop: Loop) -> None:
    for _ in range(20):
        loop.release(1 * MS, 4 * MS, times=2)
        assert not loop.sharing.contended
        loop.release(1 * MS, 50 * US)


def test_contention_ends_with_a_punctual_wait(contended: Loop) -> None:
    contended.release(1 * MS, 20 * US)
    assert not contended.sharing.contended
    assert contended.plan(50e-6) == (50e-6, False)


def test_a_wait_that_ended_early_shows_nothing(contended: Loop) -> None:
    contended.release(5 * MS, -3 * MS, times=50)
    contended.release(0, 0, times=50)
    assert contended.plan(1e-3) == (pytest.approx(4e-3, rel=0.01), False)


def test_time_without_a_core_is_not_contention(loop: Loop, no_core_ns: list[int]) -> None:
    for _ in range(20):
        no_core_ns[0] += 4 * MS
        loop.release(1 * MS, 4 * MS + 50 * US)
    assert not loop.sharing.contended


def test_a_stop_of_the_process_prolongs_no_wait_by_seconds(contended: Loop) -> None:
    contended.release(1 * MS, 30_000 * MS)
    assert contended.plan(1e-3)[0] <= 10e-3


class TestYielding:
    def test_the_engines_thread_runs_between_long_pieces_of_work(self, contended: Loop) -> None:
        for _ in range(10):
            contended.yield_after(HOLD_NS * 2 // 5)
        assert contended.yields == [ANSWER_NS] * 3

    def test_one_punctual_wait_is_no_reason_to_keep_the_gil(self, contended: Loop) -> None:
        contended.release(1 * MS, 0)
        assert not contended.sharing.contended
        contended.yield_after(HOLD_NS)
        assert not contended.yields
        contended.yield_after(1)
        assert len(contended.yields) == 1

    def test_after_a_punctual_wait_a_call_that_waited_for_the_gil_begins_a_new_acquisition(
        self, contended: Loop
    ) -> None:
        contended.release(1 * MS, 0)
        contended.work(HOLD_NS)
        contended.now_ns += 4 * MS
        contended.sharing.yield_if_due()
        assert not contended.yields

    @pytest.mark.parametrize("answer_ns", [50 * US, 350 * US, 450 * US])
    def test_an_engine_that_has_run_for_a_moment_may_still_compute(self, contended: Loop, answer_ns: int) -> None:
        contended.answer_ns, contended.kept_ns = answer_ns, 20 * US
        for _ in range(5):
            contended.yield_after(HOLD_NS + 1)
        assert len(contended.yields) == 5
        assert contended.sharing.contended

    def test_a_wait_for_the_gil_after_the_answer_is_late(self, loop: Loop) -> None:
        loop.release(1 * MS, 4 * MS, times=2)  # the first only begins the count of the time without a core
        loop.kept_ns = 700 * US
        for _ in range(2):
            assert not loop.sharing.contended
            loop.yield_after(HOLD_NS + 1)
        assert loop.sharing.contended

    def test_nobody_wants_the_gil_if_the_main_thread_does_not_take_it(self, contended: Loop) -> None:
        contended.answer_ns, contended.kept_ns = None, 20 * US
        contended.yield_after(HOLD_NS + 1)
        assert not contended.sharing.contended
        contended.yield_after(10 * HOLD_NS)
        assert contended.yields == [ANSWER_NS]

    def test_an_engine_in_another_thread_gets_short_pauses(self, contended: Loop) -> None:
        contended.answer_ns = None
        for _ in range(3):
            contended.yield_after(HOLD_NS + 1)
        assert contended.yields == [ANSWER_NS, WAKE_NS, WAKE_NS]
        contended.kept_ns = 20 * US
        for _ in range(2):
            contended.yield_after(HOLD_NS + 1)  # that thread may have woken up too late
        contended.answer_ns, contended.kept_ns = 50 * US, 5 * MS
        for _ in range(2):
            contended.yield_after(HOLD_NS + 1)
        assert contended.yields[3:] == [WAKE_NS] * 3 + [ANSWER_NS]

    def test_on_few_cores_one_punctual_wait_is_a_reason_to_keep_the_gil(
        self, no_core_ns: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop = Loop(monkeypatch, few_cores=True)
        loop.release(1 * MS, 4 * MS, times=20)
        for _ in range(2):
            loop.yield_after(HOLD_FEW_CORES_NS)
            loop.yield_after(1)
        assert loop.yields == [WAKE_FEW_CORES_NS] * 2
        loop.release(1 * MS, 0)
        loop.yield_after(10 * HOLD_FEW_CORES_NS)
        assert len(loop.yields) == 2

    def test_without_answers_pauses_have_a_fixed_length(
        self, no_core_ns: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gil, "_sem_clockwait", None)
        loop = Loop(monkeypatch)
        loop.release(1 * MS, 4 * MS, times=20)
        loop.answer_ns = None
        loop.yield_after(HOLD_NS + 1)
        assert loop.yields == [WAKE_NS]

    def test_alone_nobody_waits_for_the_gil(self, contended: Loop) -> None:
        contended.release(1 * MS, 0, times=3)
        contended.yield_after(10 * HOLD_NS)
        assert not contended.yields


T = TypeVar("T")


def while_asleep(call: Callable[[], T]) -> T:
    """Returns what another thread's call returns while the main thread, that of the test, sleeps."""

    def wait_and_call() -> T:
        before: list[str] = []
        while (now := state_of_main_thread()) != before or not any("S (sleeping)" in line for line in now):
            before = now
            time.sleep(0.02)  # without the GIL, which the main thread may have waited for
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(wait_and_call).result()


def state_of_main_thread() -> list[str]:
    """Returns whether the main thread sleeps, and how often it has gone to sleep or lost its core."""
    status = Path(f"/proc/self/task/{os.getpid()}/status").read_text(encoding="utf-8")
    return [line for line in status.splitlines() if line.startswith("State:") or "ctxt_switches" in line]


def asleep(main_thread: MainThread, limit_ns: int, times: int = 1) -> list[bool]:
    """Returns whether the main thread is found to run, while it sleeps."""
    return while_asleep(lambda: [main_thread.runs_within(limit_ns) for _ in range(times)])


def while_computing(main_thread: MainThread) -> bool:
    """Returns whether the main thread is found to run, while it computes."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(main_thread.runs_within, 10_000 * MS)
        while not answer.done():
            pass
        return answer.result()


class TestMainThread:
    """pytest runs its tests in the main thread."""

    def test_it_runs(self) -> None:
        main_thread = MainThread()
        for _ in range(20):
            assert while_computing(main_thread)

    def test_it_sleeps(self) -> None:
        assert asleep(MainThread(), 3 * MS) == [False]

    def test_an_answer_that_came_too_late_is_not_taken_for_the_next(self) -> None:
        main_thread = MainThread()
        for _ in range(5):
            assert asleep(main_thread, 1 * MS) == [False]
            sum(range(1000))  # answers
        assert asleep(main_thread, 1 * MS, times=5) == [False] * 5

    def test_signals_do_not_end_the_wait(self) -> None:
        def interrupt(ident: int) -> None:
            for _ in range(10):
                time.sleep(0.002)
                signal.pthread_kill(ident, signal.SIGUSR1)

        def interrupted() -> tuple[bool, int]:
            interrupter = threading.Thread(target=interrupt, args=(threading.get_ident(),))
            interrupter.start()
            since_ns = time.monotonic_ns()
            ran = MainThread().runs_within(50 * MS)
            took_ns = time.monotonic_ns() - since_ns
            interrupter.join()
            return ran, took_ns

        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            ran, took_ns = while_asleep(interrupted)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not ran
        assert took_ns >= 50 * MS

    def test_without_the_functions_of_libc_it_only_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gil, "_sem_clockwait", None)
        since_ns = time.monotonic_ns()
        assert not MainThread().runs_within(2 * MS)
        assert time.monotonic_ns() - since_ns >= 2 * MS

    def test_while_the_queue_of_calls_is_full_it_only_waits(self) -> None:
        main_thread = MainThread()
        semaphore = ctypes.create_string_buffer(gil._SEM_T_BYTES)

        def with_full_queue() -> tuple[bool, bool]:
            while not gil._held.Py_AddPendingCall(gil._SEM_POST, semaphore):
                pass
            return main_thread.runs_within(1 * MS), main_thread._asked

        assert while_asleep(with_full_queue) == (False, False)
        assert while_computing(main_thread)

    def test_the_semaphore_is_kept_until_the_answer(self) -> None:
        main_thread = MainThread()
        counts = [sys.getrefcount(main_thread._semaphore)]
        while_asleep(lambda: main_thread.runs_within(1 * MS))
        counts.append(sys.getrefcount(main_thread._semaphore))
        for _ in range(20):
            assert while_computing(main_thread)
        counts.append(sys.getrefcount(main_thread._semaphore))
        assert counts == [counts[0], counts[0] + 1, counts[0]]


def schedstat_files() -> int:
    """Returns the number of open files with the kernel's counts of a thread."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the directory itself
            found += each.readlink().name == "schedstat"
    return found


class TestCalls:
    def test_bytes_go_through_a_socket(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            buffer = ReceiveBuffer(4)
            assert gil.send(here.fileno(), b"a\0cdef") == 6
            assert [buffer.recv(there.fileno()), buffer.recv(there.fileno())] == [b"a\0cd", b"ef"]
            with pytest.raises(BlockingIOError):
                buffer.recv(there.fileno())
            here.close()
            assert buffer.recv(there.fileno()) == b""
            with pytest.raises(BrokenPipeError):
                gil.send(there.fileno(), b"x")

    def test_a_full_socket_takes_a_part_and_then_nothing(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            data = bytes(16 << 20)
            assert 0 < gil.send(here.fileno(), data) < len(data)
            with pytest.raises(BlockingIOError):
                gil.send(here.fileno(), data)

    def test_an_epoll_set(self) -> None:
        here, there = socket.socketpair()
        with here, there, select.epoll() as epoll:
            epoll.register(here, select.EPOLLIN)
            assert gil.epoll_poll(epoll.fileno()) == []
            there.send(b"x")
            assert gil.epoll_poll(epoll.fileno()) == [(here.fileno(), select.EPOLLIN)]
            epoll.register(there, select.EPOLLOUT)
            assert sorted(gil.epoll_poll(epoll.fileno())) == sorted(epoll.poll(0))
            assert len(gil.epoll_poll(epoll.fileno(), most=1)) == 1

    def test_an_eventfd(self) -> None:
        fd = os.eventfd(0, os.EFD_NONBLOCK)
        gil.eventfd_write(fd)
        gil.eventfd_write(fd)
        gil.eventfd_read(fd)
        with pytest.raises(BlockingIOError):
            gil.eventfd_read(fd)
        os.close(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            gil.eventfd_write(fd)

    def test_the_start_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"a\0cdef")
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert gil.read_start(str(file)) == b"a\0cdef"
        assert gil.read_start(str(file), most=4) == b"a\0cd"
        with pytest.raises(FileNotFoundError):
            gil.read_start(str(tmp_path / "none"))
        with pytest.raises(IsADirectoryError):
            gil.read_start(str(tmp_path))
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_the_time_without_a_core_only_grows_and_a_thread_that_has_ended_leaves_no_file_open(self) -> None:
        counts: list[int] = []
        opened: list[int] = []

        def read() -> None:
            counts.extend(gil.no_core_ns() for _ in range(2))
            opened.append(schedstat_files())

        before = schedstat_files()
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert 0 <= counts[0] <= counts[1]
        assert opened == [before + 1]
        assert schedstat_files() == before
