"""What counts as a leak: everything that is left, and memory that keeps growing; not what settles."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvctl.lab.demo.leak_watch import ProcessHistory
from kvctl.lab.ranks.messages import Usage

MB = 1 << 20


def usage(at_s: float, rss_bytes: float, fds: int = 40, threads: int = 10) -> Usage:
    found: dict[str, Any] = {"at_ns": round(at_s * 1e9), "rss_bytes": round(rss_bytes), "fds": fds, "threads": threads}
    return cast(Usage, found)


def life(samples: list[Usage]) -> ProcessHistory:
    here = ProcessHistory("1", samples[0], samples[0])
    for sample in samples:
        here.add(sample)
    return here


def test_a_line_s_slope_is_found_through_noise():
    here = life([usage(at, 1000 + 50 * at + (at % 7) * 10) for at in range(200)])
    assert here.slope == pytest.approx(50, rel=0.02)


def test_memory_that_grows_on_and_on_leaks():
    words = life([usage(at, 200 * MB + at * 100_000) for at in range(1800)]).leaks
    assert words == ["memory grows by 97.7 KiB/s"]


def test_memory_that_fills_its_bounds_and_stays_does_not():
    assert life([usage(at, 200 * MB + min(at, 600) * 100_000) for at in range(1800)]).leaks == []


def test_a_short_life_tells_nothing_of_its_memory():
    here = life([usage(at, 200 * MB + at * MB) for at in range(60)])
    assert here.slope is None
    assert here.leaks == []


def test_descriptors_and_threads_are_compared_with_what_it_had_once_it_had_met_its_peers():
    meeting = [usage(0, MB, fds=20, threads=8), usage(5, MB)]
    assert life([*meeting, usage(100, MB, fds=70, threads=15)]).leaks == ["fds 40 -> 70", "threads 10 -> 15"]
    assert life([*meeting, usage(100, MB, fds=45, threads=12)]).leaks == []
