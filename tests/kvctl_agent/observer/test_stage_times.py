"""Stage times: each stage is measured from the one before it that this rank saw."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.contract.snapshots import LayerRow
from kvctl_agent.contract.states import STAGES
from kvctl_agent.observer.room_records import Part
from kvctl_agent.observer.stage_times import MAX_GROUPS, StageTimes

US = 1000


def add(times: StageTimes, layers: tuple[int, int], path: str, nbytes: int, moments: Any, done: Any = None) -> None:
    times.add(Part((0, 0, layers), "decode-0", path, nbytes, moments, done))


def p50(row: LayerRow) -> dict[str, int | None]:
    return {stage: value["p50_ns"] for stage, value in row["stages"].items() if value["count"]}


def near(value: int) -> object:
    return pytest.approx(value, rel=1 / 32)


def test_a_writers_stages() -> None:
    times = StageTimes("prefill-0")
    moments = {"ready": 0, "gate": 10 * US, "gather": 30 * US, "post": 31 * US, "wire": 131 * US}
    add(times, (0, 4), "staged", 4096, moments)
    (row,) = times.rows()
    assert (row["agent"], row["layers"], row["path"], row["parts"], row["bytes"]) == (
        "prefill-0",
        [0, 4],
        "staged",
        1,
        4096,
    )
    assert tuple(row["stages"]) == STAGES
    assert p50(row) == {"gate": near(10 * US), "gather": near(20 * US), "post": near(US), "wire": near(100 * US)}


def test_stages_that_were_skipped_cost_nothing_and_their_time_goes_to_the_next() -> None:
    times = StageTimes("prefill-0")
    add(times, (0, 4), "bulk", 1, {"wire": 100 * US, "ready": 0})  # whatever the order they are given in
    (row,) = times.rows()
    assert p50(row) == {"wire": near(100 * US)}
    assert row["stages"]["gate"] == {"p50_ns": None, "p90_ns": None, "p99_ns": None, "count": 0}


def test_a_reader_sees_arrive_and_scatter() -> None:
    times = StageTimes("decode-0")
    add(times, (0, 4), "staged", 1, {"arrive": 5 * US, "scatter": 55 * US})
    assert p50(times.rows()[0]) == {"scatter": near(50 * US)}


def test_rows_by_layer_group_and_path() -> None:
    times = StageTimes("prefill-0")
    for layers, path in [((4, 8), "bulk"), ((0, 4), "staged"), ((0, 4), "bulk"), ((0, 4), "bulk")]:
        add(times, layers, path, 10, {"ready": 0, "post": 1})
    rows = [(row["layers"], row["path"], row["parts"], row["bytes"]) for row in times.rows()]
    assert rows == [([0, 4], "bulk", 2, 20), ([0, 4], "staged", 1, 10), ([4, 8], "bulk", 1, 10)]


def test_quantiles_come_from_all_parts() -> None:
    times = StageTimes("prefill-0")
    for number in range(1, 101):
        add(times, (0, 4), "bulk", 1, {"ready": 0, "wire": number * US})
    wire = times.rows()[0]["stages"]["wire"]
    assert wire == {"p50_ns": near(50 * US), "p90_ns": near(90 * US), "p99_ns": near(99 * US), "count": 100}


class TestOverlap:
    @pytest.mark.parametrize(
        ("forward_done", "exposed", "overlapped"),
        [
            (0, 100, 0),  # the forward was done before the part began
            (40, 100, 0),
            (50, 100, 0),
            (90, 60, 40),  # done in the middle
            (150, 0, 100),
            (999, 0, 100),  # still computing when the part was through
        ],
    )
    def test_split_of_a_part_from_50_to_150(self, forward_done: int, exposed: int, overlapped: int) -> None:
        times = StageTimes("prefill-0")
        add(times, (0, 4), "bulk", 1, {"ready": 50, "post": 60, "wire": 150}, forward_done)
        (row,) = times.rows()
        assert (row["exposed_ns"], row["overlapped_ns"]) == (exposed, overlapped)

    def test_unknown_is_none_not_zero(self) -> None:
        times = StageTimes("prefill-0")
        add(times, (0, 4), "bulk", 1, {"ready": 50, "wire": 150})
        (row,) = times.rows()
        assert (row["exposed_ns"], row["overlapped_ns"]) == (None, None)

    def test_a_row_shows_the_mean_of_the_parts_it_knows_about(self) -> None:
        times = StageTimes("prefill-0")
        add(times, (0, 4), "bulk", 1, {"ready": 0, "wire": 100}, 0)
        add(times, (0, 4), "bulk", 1, {"ready": 0, "wire": 100}, 100)
        add(times, (0, 4), "bulk", 1, {"ready": 0, "wire": 100})
        (row,) = times.rows()
        assert (row["exposed_ns"], row["overlapped_ns"]) == (50, 50)


def test_a_runaway_of_groups_is_bounded() -> None:
    times = StageTimes("prefill-0")
    for layer in range(MAX_GROUPS + 5):
        add(times, (layer, layer + 1), "bulk", 1, {"ready": 0})
    assert len(times.rows()) == MAX_GROUPS
