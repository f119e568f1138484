"""The schedule that stops and continues rank processes during a run."""

from __future__ import annotations

import signal

import pytest

from kvctl.lab.bench import fleet
from kvctl.lab.bench.fleet import StopSchedule, last_ns
from kvctl.lab.faults.specification import parse_faults

FAULTS = parse_faults("abort=5%,pause=decode-0@1s+2s,pause=decode-1@2s+10s,pause=decode-0@2500ms+1s")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 5_000_000_000_000
        monkeypatch.setattr(fleet.time, "monotonic_ns", lambda: self.now_ns)

    def at(self, seconds: float) -> None:
        self.now_ns = 5_000_000_000_000 + round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_ranks_stop_and_go_on_in_time(clock: Clock):
    sent: list[tuple[str, str]] = []
    run = StopSchedule(FAULTS, lambda rank, number: sent.append((rank, number.name)))
    told = {}
    for second in (0, 0.9, 1.1, 2.1, 2.6, 3.1, 3.6, 11, 13, 14):
        clock.at(second)
        sent.clear()
        run.tick()
        told[second] = list(sent)
    assert {second: signals for second, signals in told.items() if signals} == {
        1.1: [("decode-0", "SIGSTOP")],
        2.1: [("decode-1", "SIGSTOP")],
        2.6: [("decode-0", "SIGSTOP")],  # and its first pause ends while this one lasts
        3.6: [("decode-0", "SIGCONT")],
        13: [("decode-1", "SIGCONT")],
    }


def test_the_end_lets_everyone_go_on(clock: Clock):
    sent: list[tuple[str, signal.Signals]] = []
    run = StopSchedule(FAULTS, lambda rank, number: sent.append((rank, number)))
    clock.at(1.5)
    run.tick()
    run.end()
    clock.at(2.5)
    run.tick()
    assert sent == [("decode-0", signal.SIGSTOP), ("decode-0", signal.SIGCONT)]


def test_how_long_they_take_together():
    assert last_ns(FAULTS) == 12_000_000_000
    assert last_ns(()) == 0
