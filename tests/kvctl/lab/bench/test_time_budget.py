"""The number of rooms that a path runs with --point-seconds."""

from __future__ import annotations

from typing import Any

from kvctl.lab.bench.program import Case
from kvctl.lab.bench.trials import TimeBudget

SLOW, FAST = Case(0, "slice"), Case(0, "staged")


def batch(*tokens: int) -> Any:
    return [{"tokens": each} for each in tokens]


def test_without_a_limit_everything_runs_and_nothing_is_tried() -> None:
    pace = TimeBudget(None)
    assert not pace.unknown(SLOW)
    assert pace.rooms(SLOW, 0, batch(*[100] * 9)) == 9


def test_a_path_must_be_tried_once_in_each_way_of_grouping_layers() -> None:
    pace = TimeBudget(1.0)
    assert pace.unknown(SLOW)
    pace.measured(SLOW, batch(100), 0.1)
    assert not pace.unknown(Case(3, "slice"))
    assert pace.unknown(Case(0, "slice", "on"))
    assert pace.unknown(FAST)


def test_as_many_rooms_run_as_fit_by_their_tokens() -> None:
    pace = TimeBudget(1.0)
    pace.measured(SLOW, batch(100), 0.25)  # 400 tokens a second
    assert pace.rooms(SLOW, 0, batch(*[100] * 9)) == 4
    assert pace.rooms(SLOW, 0, batch(200, 50, 100, 300)) == 3
    pace.measured(FAST, batch(100), 0.001)
    assert pace.rooms(FAST, 0, batch(*[100] * 9)) == 9


def test_one_room_runs_however_slow_it_is_and_later_batches_do_not() -> None:
    pace = TimeBudget(1.0)
    pace.measured(SLOW, batch(100), 7.0)
    assert pace.rooms(SLOW, 0, batch(100, 100)) == 1
    pace.ran(SLOW, 0, batch(100), 7.0)
    assert pace.rooms(SLOW, 0, batch(100, 100)) == 0
    assert pace.rooms(SLOW, 1, batch(100, 100)) == 1  # every repeat has time of its own


def test_what_was_seen_last_counts() -> None:
    pace = TimeBudget(1.0)
    pace.measured(SLOW, batch(100), 1.0)
    pace.ran(SLOW, 0, batch(100, 100), 0.2)
    assert pace.rooms(SLOW, 0, batch(*[100] * 20)) == 8
    assert pace.rooms(Case(1, "slice"), 0, batch(*[100] * 20)) == 10
