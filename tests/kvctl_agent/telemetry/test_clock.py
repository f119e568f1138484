"""Moments are monotonic; wall time is only a way to show them."""

from __future__ import annotations

import time

import pytest

from kvctl_agent.telemetry.clock import Clock


def test_now_is_the_monotonic_clock() -> None:
    before = time.monotonic_ns()
    assert before <= Clock().now_ns() <= time.monotonic_ns()


def test_wall_is_now_to_a_few_milliseconds() -> None:
    clock = Clock()
    assert abs(clock.wall_ns(clock.now_ns()) - time.time_ns()) < 1_000_000_000


def test_a_stepped_wall_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    shown = clock.wall_ns(1000)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.wall_ns(1000) == shown
    assert clock.wall_ns(3000) - shown == 2000
