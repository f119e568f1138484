"""The order of cases, and compute derived from the transfer time."""

from __future__ import annotations

from typing import Any

from kvctl.lab.bench.program import Case, Ratios, SideBySide


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

    def test_all_paths_of_a_ratio_compute_at_the_pace_of_the_slowest(self):
        times = {Case(0, "staged"): 50.0, Case(0, "slice"): 80.0, Case(1, "staged"): 1.0}
        stages = list(self.program.stages(plan(("slice", "staged")), times.get))
        assert {case.layer_ms for case in stages[1].cases} == {16.0}

    def test_the_outlook_has_as_many_trials_as_there_will_be(self):
        ran = list(self.program.stages(plan(), lambda case: 1.0))
        outlook = self.program.outline(plan())
        assert [(len(stage.cases), stage.repeat) for stage in outlook] == [
            (len(each.cases), each.repeat) for each in ran
        ]

    def test_a_case_with_compute_has_its_ratio_and_the_transfer_without(self):
        plain = {Case(1, "staged"): 5.0}
        crowded = self.program.derived(plan(), Case(3, "staged", "on", 1.0, turn=3), plain.get, {})
        assert crowded == {"ratio": 1.0, "transfer_ms": 5.0}
        assert self.program.derived(plan(), Case(1, "staged"), plain.get, {}) == {}
