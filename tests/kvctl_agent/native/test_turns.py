"""Turns of the control loop at the GIL: loans of the main thread, their limit, and waits for descriptors and events."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from kvctl_agent.native import Turns
from kvctl_agent.runtime.waiting import PolledDescriptors

MS = 1_000_000
LONG_NS = 3_600_000 * MS
NOTHING = PolledDescriptors(()).polled
_libc = ctypes.CDLL(None)
QUERY = ctypes.cast(_libc.labs, ctypes.c_void_p).value or 0
"""A function that returns its argument, so that the event of number 600 is pending, and that of number 0 is done."""
PENDING, DONE = 600, 0


def made(loan_ns: int = LONG_NS, hold_ns: int = LONG_NS, pause_ns: int = MS, spins: bool = True) -> Turns:
    return Turns(loan_ns=loan_ns, hold_ns=hold_ns, pause_ns=pause_ns, spins=spins)


class Engine:
    """The main thread, which spins as an idle scheduler does: some Python, and a call that releases the GIL briefly."""

    def __init__(self) -> None:
        self.rounds = 0

    def spin_until(self, over: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not over():
            assert time.monotonic() < deadline, f"{what} within 60 s"
            select.select([], [], [], 0)
            self.rounds += sum(1 for _ in range(100)) // 100


@contextmanager
def thread_of(turns: Turns, loop: Callable[[], None]) -> Iterator[threading.Thread]:
    """Runs `loop` in a thread that has these turns, and has ended after the block."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            loop()
        except BaseException as error:
            failures.append(error)
        turns.end()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive(), "the thread has not ended within 60 s"
        assert not failures, failures


def wait(turns: Turns, seconds: float = 0.0) -> int:
    return turns.wait(NOTHING, int(seconds * 1e9), 0, array("Q"), 1000)


def borrowed(turns: Turns) -> None:
    """Waits until the main thread has lent the GIL."""
    deadline = time.monotonic() + 60
    before = turns.loans
    while turns.loans == before:
        assert time.monotonic() < deadline, "the main thread lends nothing within 60 s"
        wait(turns, 0.001)


@pytest.mark.parametrize("spins", [True, False])
def test_the_main_thread_lends_the_gil_and_waits_until_the_turn_is_over(spins: bool) -> None:
    engine, turns, over = Engine(), made(spins=spins), threading.Event()
    gained: list[int] = []

    def loop() -> None:
        for _ in range(20):
            borrowed(turns)
            assert turns.busy
            before = engine.rounds
            for _ in range(50):
                time.sleep(1e-5)  # the thread releases the GIL, and nobody takes it
            gained.append(engine.rounds - before)
        over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "20 turns")
    assert gained == [0] * 20


def test_the_main_thread_runs_between_turns() -> None:
    engine, turns, over = Engine(), made(), threading.Event()
    rounds: list[int] = []

    def loop() -> None:
        for _ in range(20):
            borrowed(turns)
            rounds.append(engine.rounds)
            before = engine.rounds
            while engine.rounds == before:
                wait(turns, 0.001)
        over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "20 turns")
    assert rounds == sorted(set(rounds))


def test_a_loan_ends_after_its_limit() -> None:
    engine, turns, over = Engine(), made(loan_ns=MS), threading.Event()

    def loop() -> None:
        try:
            borrowed(turns)
            before, deadline = engine.rounds, time.monotonic() + 60
            while engine.rounds == before:  # without an end of the turn
                assert time.monotonic() < deadline, "the main thread has not run within 60 s"
                time.sleep(0.001)
        finally:
            over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "the turn")


def test_a_long_turn_yields() -> None:
    engine, turns, over = Engine(), made(hold_ns=1), threading.Event()

    def loop() -> None:
        try:
            borrowed(turns)
            before, deadline = engine.rounds, time.monotonic() + 60
            while engine.rounds == before:
                assert time.monotonic() < deadline, "the main thread has not run within 60 s"
                turns.yield_if_due()
        finally:
            over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "the turn")


def test_a_short_turn_does_not_yield() -> None:
    engine, turns, over = Engine(), made(), threading.Event()
    gained: list[int] = []

    def loop() -> None:
        borrowed(turns)
        before = engine.rounds
        for _ in range(1000):
            turns.yield_if_due()
        gained.append(engine.rounds - before)
        over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "the turn")
    assert gained == [0]


def test_a_main_thread_that_sleeps_is_not_asked() -> None:
    turns = made()

    joining = threading.Event()

    def loop() -> None:
        joining.wait(60)
        time.sleep(0.2)  # until the main thread sleeps in `join`
        before = turns.loans
        for _ in range(100):
            wait(turns, 0.001)
        assert turns.loans == before == 0

    with thread_of(turns, loop) as thread:
        joining.set()
        thread.join(60)


def test_an_object_is_freed_also_after_it_was_asked_for_in_vain() -> None:
    engine, over = Engine(), threading.Event()
    turns = made()
    references = sys.getrefcount(turns)

    def loop() -> None:
        borrowed(turns)
        for _ in range(100):
            wait(turns, 0.0001)
        over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "100 waits")
    engine.spin_until(lambda: sys.getrefcount(turns) == references, "the last request is answered")
    gc.collect()


def test_turns_without_a_wait_between_them_yield_too() -> None:
    engine, turns, over = Engine(), made(hold_ns=MS), threading.Event()

    def loop() -> None:
        try:
            before, deadline = engine.rounds, time.monotonic() + 60
            while engine.rounds < before + 10:
                assert time.monotonic() < deadline, "the main thread has not run ten times within 60 s"
                since = time.monotonic()
                while time.monotonic() - since < 1e-4:
                    pass
                turns.yield_if_due()
                wait(turns)
        finally:
            over.set()

    with thread_of(turns, loop):
        engine.spin_until(over.is_set, "the turns")


EXIT = """
import atexit, threading, time
from array import array
from kvctl_agent.native import Turns
turns = Turns(loan_ns=1_000_000, hold_ns=1_000_000, pause_ns=1_000, spins=True)
def loop():
    while True:
        turns.wait(bytearray(), 100_000, 0, array("Q"), 1_000)
threading.Thread(target=loop, daemon=True).start()
class Slow:
    def __del__(self):
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            sum(range(100))
kept = Slow()
while not turns.loans:
    time.sleep(0)
"""


def test_a_daemon_thread_that_waits_while_the_interpreter_ends() -> None:
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr.decode()


def has_ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] == child


def test_a_child_has_its_own() -> None:
    """The parent's request is not answered in a child, whose main thread waits for nobody."""
    engine, turns, over = Engine(), made(), threading.Event()

    def loop() -> None:
        for _ in range(20):
            borrowed(turns)
        over.set()

    with thread_of(turns, loop):
        for _ in range(5):
            if not (child := os.fork()):
                engine.rounds = 0
                for _ in range(1000):
                    select.select([], [], [], 0)
                os._exit(0)
            engine.spin_until(partial(has_ended, child), "the child ends")
        engine.spin_until(over.is_set, "20 turns")


def test_two_threads_have_turns_of_their_own() -> None:
    engine, first, second = Engine(), made(), made()
    ended = [threading.Event(), threading.Event()]

    def loop(turns: Turns, over: threading.Event) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                borrowed(turns)
            over.set()

        return run

    with thread_of(first, loop(first, ended[0])), thread_of(second, loop(second, ended[1])):
        engine.spin_until(lambda: all(each.is_set() for each in ended), "ten turns of each")


class TestWaits:
    def test_it_lasts_as_long_as_asked(self) -> None:
        turns = made()
        since = time.monotonic_ns()
        ended = wait(turns, 0.02)
        assert 20 * MS <= ended - since <= time.monotonic_ns() - since

    @pytest.mark.timeout(60)
    def test_a_descriptor_ends_it(self) -> None:
        reader, writer = os.pipe()
        try:
            polled = PolledDescriptors([reader])
            made().wait(polled.polled, MS, 0, b"", 1000)
            assert polled.readable() == []
            os.write(writer, b"x")
            made().wait(polled.polled, LONG_NS, 0, b"", 1000)
            assert polled.readable() == [0]
        finally:
            os.close(reader)
            os.close(writer)

    @pytest.mark.timeout(60)
    def test_an_event_that_is_done_ends_it(self) -> None:
        made().wait(NOTHING, LONG_NS, QUERY, array("Q", [PENDING, DONE]), 1000)

    def test_events_that_are_pending_do_not(self) -> None:
        since = time.monotonic_ns()
        assert made().wait(NOTHING, 5 * MS, QUERY, array("Q", [PENDING, PENDING]), 1000) - since >= 5 * MS

    @pytest.mark.parametrize(
        "arguments",
        [
            (bytearray(7), 0, 0, b"", 1),
            (b"", 0, 0, b"", 1),
            (bytearray(), -1, 0, b"", 1),
            (bytearray(), 0, 0, b"", 0),
            (bytearray(), 0, 0, b"1234567", 1),
            (bytearray(), 0, 0, b"12345678", 1),
            (bytearray(), 0, 0, b""),
            (None, 0, 0, b"", 1),
        ],
    )
    def test_it_checks_its_arguments(self, arguments: tuple[object, ...]) -> None:
        with pytest.raises((TypeError, ValueError, BufferError)):
            made().wait(*arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize("times", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1_000_000_000)])
    def test_times_are_positive(self, times: tuple[int, int, int]) -> None:
        with pytest.raises(ValueError, match="must be positive"):
            made(*times)
