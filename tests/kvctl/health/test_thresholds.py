"""Thresholds: parsing, error messages, comparison."""

from __future__ import annotations

import pytest

from kvctl.exit_codes import CheckState
from kvctl.health.check import MEASURES, MEASURES_BY_NAME, Threshold, ThresholdError, parse_thresholds
from kvctl.health.codes import CODES
from kvctl.health.finding import AREAS

ALL = tuple(AREAS)


def test_each_unit_is_read() -> None:
    found = parse_thresholds(["ring=80%,room-age=1m30s", "quarantined=64MiB"], ["ring=0.95", "agents=4"], ALL)
    assert found == {
        "ring": Threshold(0.8, 0.95),
        "room-age": Threshold(90.0, None),
        "quarantined": Threshold(64 << 20, None),
        "agents": Threshold(None, 4.0),
    }


@pytest.mark.parametrize(
    ("warn", "crit", "words"),
    [
        ("ring", "", "write NAME=VALUE"),
        ("ring=", "", "write NAME=VALUE"),
        ("rng=80%", "", "did you mean ring?"),
        ("age=1s", "", "did you mean pin-age or gate-age or room-age?"),
        ("xyz=1", "", "use one of agents"),
        ("ring=80", "", "write it as 80% or 0.8"),
        ("ring=-1%", "", "write it as 80% or 0.8"),
        ("room-age=30", "", "write it as 30s"),
        ("agents=4.5", "", "write it as 4"),
        ("agents=-1", "", "write it as 4"),
        ("quarantined=9", "", "write it as 64MiB"),
        ("ring=90%", "ring=80%", "critical 80 % is less than the warning at 90 %"),
        ("agents=2", "agents=4", "critical 4 is more than the warning at 2"),
    ],
)
def test_what_is_no_threshold_is_refused(warn: str, crit: str, words: str) -> None:
    with pytest.raises(ThresholdError) as error:
        parse_thresholds([warn] if warn else [], [crit] if crit else [], ALL)
    assert words in str(error.value)


def test_only_thresholds_of_the_checked_areas_are_suggested() -> None:
    with pytest.raises(ThresholdError, match=r"--warn age is not a threshold, did you mean room-age\?$"):
        parse_thresholds(["age=1s"], [], ["rooms"])
    with pytest.raises(ThresholdError, match=r"use one of active, room-age, failed$"):
        parse_thresholds(["agents-up=1"], [], ["rooms"])


def test_a_threshold_of_another_area_would_never_be_looked_at() -> None:
    with pytest.raises(ThresholdError, match="ring belongs to kvctl check staging and kvctl check all"):
        parse_thresholds(["ring=80%"], [], ["peers"])


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("ring", 0.79, CheckState.OK),
        ("ring", 0.8, CheckState.WARNING),
        ("ring", 0.95, CheckState.CRITICAL),
        ("ring", None, CheckState.OK),
        ("agents", 4, CheckState.OK),
        ("agents", 3, CheckState.WARNING),
        ("agents", 1, CheckState.CRITICAL),
    ],
)
def test_where_a_threshold_is_reached(name: str, value: float | None, state: CheckState) -> None:
    thresholds = {"ring": Threshold(0.8, 0.95), "agents": Threshold(4, 2)}
    assert thresholds[name].state(MEASURES_BY_NAME[name], value) is state


def test_every_measure_and_every_code_is_of_an_area() -> None:
    assert {measure.area for measure in MEASURES} == set(AREAS)
    assert {code.area for code in CODES} <= set(AREAS)


def test_not_to_know_is_worse_than_a_warning() -> None:
    assert sorted(CheckState, key=lambda state: state.gravity) == [
        CheckState.OK,
        CheckState.WARNING,
        CheckState.UNKNOWN,
        CheckState.CRITICAL,
    ]
