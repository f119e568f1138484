"""Samples of a figure: rare enough to cost nothing, and never too many."""

from __future__ import annotations

from kvctl.lab.ranks.measure import Samples

MS = 1_000_000


def test_looks_are_some_time_apart():
    figures = iter(range(10))
    samples = Samples(lambda: next(figures))
    for at_ms in (1, 2, 5, 6, 7, 30):
        samples.look(at_ms * MS)
    assert samples.taken == [[1 * MS, 0], [6 * MS, 1], [30 * MS, 2]]
    assert samples.next_ns == 50 * MS


def test_a_long_run_is_sampled_more_coarsely():
    samples = Samples(lambda: 7)
    for at_ms in range(100_000):
        samples.look(at_ms * MS)
    assert len(samples.taken) <= 1024
    moments = [at for at, _ in samples.taken]
    assert moments == sorted(moments)
    assert moments[0] == 0
    assert moments[-1] > 99_000 * MS


def test_with_nothing_to_look_at_nothing_is_due():
    samples = Samples(None)
    samples.look(5)
    assert samples.taken == []
    assert samples.next_ns is None
