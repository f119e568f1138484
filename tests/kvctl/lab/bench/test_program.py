"""The order of cases, and compute derived from the transfer time."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.lab.bench.program import Case, Ratios, SideBySide, exposed_by_model


def plan(paths: tuple[str, ...] = ("staged",), pipelines: tuple[str, ...] = ("off", "on")) -> Any:
    def load(concurrency: int, tokens: int) -> dict[str, Any]:
        return {"concurrency": concurrency, "tokens": str(tokens), "batches": [[0, 4]]}

    return {
        "paths": list(paths),
        "pipelines": list(pipelines),
        "shape": {"layers": 10},
        "loads": [load(1, 8192), load(1, 256), load(32, 8192), load(32, 256)],
    }


def row(**changes: Any) -> dict[str, Any]:
    return {"compute_ms": {"p50": 100.0}, "exposed_ms": {"p50": 11.0}, "groups": 5, "concurrency": 1, **changes}


def test_side_by_side_is_one_stage_of_everything():
    (stage,) = SideBySide(2.0, repeat=3).stages(plan(), lambda case: None)
    assert stage.repeat == 3
    assert len(stage.cases) == 8
    assert {case.layer_ms for case in stage.cases} == {2.0}


class TestRatios:
    program = Ratios(((0, 0.5), (0, 2.0), (3, 1.0)), repeat=2)

    def test_the_plain_transfer_comes_first_then_compute_made_of_it(self):
        times = {Case(0, "staged"): 50.0, Case(1, "staged"): 8.0}
        plain, *ratios = self.program.stages(plan(), times.get)
        assert plain.cases == (Case(0, "staged"), Case(1, "staged"))  # one in flight, of each prompt length
        paces = [{(case.load, case.layer_ms) for case in stage.cases if case.layer_ms} for stage in ratios]
        assert paces == [{(0, 10.0)}, {(0, 2.5)}, {(3, 0.8)}]  # 50 ms / 0.5 over ten layers, and so on

    def test_lone_rooms_take_turns_with_such_that_compute_nothing(self):
        stages = list(self.program.stages(plan(), lambda case: 50.0))
        assert [(case.pipeline, case.layer_ms, case.turn) for case in stages[1].cases] == [
            ("off", 0.0, 1),
            ("off", 10.0, 1),
            ("on", 0.0, 1),
            ("on", 10.0, 1),
        ]
        assert [(case.pipeline, case.turn) for case in stages[3].cases] == [("off", 3), ("on", 3)]

    def test_all_paths_of_a_ratio_compute_at_the_pace_of_the_slowest(self):
        times = {Case(0, "staged"): 50.0, Case(0, "slice"): 80.0, Case(1, "staged"): 1.0}
        stages = list(self.program.stages(plan(("slice", "staged")), times.get))
        assert {case.layer_ms for case in stages[1].cases} == {0.0, 16.0}

    def test_the_outlook_has_as_many_trials_as_there_will_be(self):
        ran = list(self.program.stages(plan(), lambda case: 1.0))
        outlook = self.program.outline(plan())
        assert [(len(stage.cases), stage.repeat) for stage in outlook] == [
            (len(each.cases), each.repeat) for each in ran
        ]

    def test_remarks_hold_what_was_measured_against_the_model_and_what_ran_in_turns_with_it(self):
        case = Case(0, "staged", "on", 10.0, turn=1)
        whole, grouped = Case(0, "staged", "off", 0.0, turn=1), Case(0, "staged", "on", 0.0, turn=1)
        times = {Case(0, "staged"): 70.0, whole: 50.0, grouped: 45.0}
        remarks = self.program.derived(plan(), case, times.get, row())
        assert (remarks["ratio"], remarks["transfer_ms"]) == (0.5, 45.0)
        assert remarks["model_exposed_ms"] == pytest.approx(10.0)
        assert remarks["off_model_ratio"] == pytest.approx(0.1)
        assert remarks["off_total_ratio"] == pytest.approx(111 / 110 - 1)

    def test_the_model_says_nothing_of_crowds_or_plain_rooms(self):
        plain = {Case(1, "staged"): 5.0}
        crowded = self.program.derived(plan(), Case(3, "staged", "on", 1.0, turn=3), plain.get, row(concurrency=32))
        assert crowded == {"ratio": 1.0, "transfer_ms": 5.0}
        assert self.program.derived(plan(), Case(1, "staged"), plain.get, row()) == {}


@pytest.mark.parametrize(
    ("compute", "transfer", "whole", "groups", "exposed"),
    [
        (100, 40, 40, 4, 10),  # total C + T/N
        (100, 400, 400, 4, 325),  # total C/N + T
        (100, 40, 40, 1, 40),  # off: C + T
        (100, 100, 100, 2, 50),
        (100, 32, 40, 4, 10),  # the last group goes alone, however well those in a row overlap
        (100, 320, 400, 4, 245),
    ],
)
def test_the_model_of_pipelining(compute: float, transfer: float, whole: float, groups: int, exposed: float):
    assert exposed_by_model(compute, transfer, whole, groups) == pytest.approx(exposed)
