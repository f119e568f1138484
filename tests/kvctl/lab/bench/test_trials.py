"""The order of trials and the rooms of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvctl.lab.bench.trials import Case, Program, Trial, TrialRunner
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.messages import Prepare, Room, Run


class FleetOnPaper:
    """Notes what it is asked to do, and claims success."""

    def __init__(self, held: Sequence[int] = ()) -> None:
        self.prepared: list[tuple[int, str, tuple[Room, ...]]] = []
        self.pipelines: list[str] = []
        self.paces: list[tuple[float, float]] = []
        self.shown: list[int] = []
        self.verified = 0
        self.held = list(held)
        self.loops: list[str] = []

    def prepare(self, command: Prepare, doing: str) -> None:
        self.prepared.append((command.batch, command.path, command.rooms))
        self.pipelines.append(command.pipeline)

    def run(self, command: Run, rooms: Sequence[Room], doing: str, busy_engine: str = "off") -> dict[str, Any]:
        self.loops.append(f"run {busy_engine}")
        self.paces.append((command.layer_ms, command.decode_ms))
        self.shown.append(command.show)
        return {"decode-0": {"held": self.held, "failures": [[0, "decode-0: peer lost"]]}}

    def measure_loop(self, busy_engine: str, seconds: float) -> dict[str, Any]:
        self.loops.append(f"idle {busy_engine}")
        return {}

    def verify(self, mode: str, rooms: Sequence[Room], doing: str) -> dict[str, Any]:
        self.verified += 1
        return {}


def planned(index: int) -> dict[str, Any]:
    room = {"tokens": 16, "prefix_tokens": 0, "instance": 0, "decode_dp": index % 2, "bytes": 1}
    return {**room, "arrival_ms": None, "output_tokens": 0}


def plan(
    batches: Sequence[Sequence[Sequence[int]]] = ([[0, 3], [3, 5]], [[0, 2]]), pipelines: Sequence[str] = ("off",)
) -> Any:
    rooms = [planned(index) for index in range(5)]
    loads = [{"concurrency": 2, "tokens": "16", "windows": [1, 1], "rooms": rooms, "batches": cuts} for cuts in batches]
    return {"paths": ["slice", "staged"], "pipelines": list(pipelines), "loads": loads, "room_stride": 4}


def trials(fleet: FleetOnPaper, verify: str = "full", repeat: int = 1, **changes: Any) -> list[Trial]:
    whole = plan(**changes)
    course = TrialRunner(fleet, whole, verify, 0.0, lambda text: None)
    program = Program(0.0, repeat)
    ran = list(course.trials(program.cases(whole), repeat))
    assert len(ran) == program.trials(whole)
    return ran


def test_paths_and_loads_take_turns_batch_by_batch():
    assert [(trial.batch, trial.case.load, trial.case.path) for trial in trials(FleetOnPaper())] == [
        (0, 0, "slice"),
        (0, 0, "staged"),
        (0, 1, "slice"),
        (0, 1, "staged"),
        (1, 0, "staged"),  # in reverse, because a path profits or suffers from the one before it
        (1, 0, "slice"),
    ]


def test_the_loop_of_a_busy_engine_is_measured_before_and_after_each_run():
    cases = Program(0.0, 1, busy_engines=("off", "both")).cases(plan(batches=([[0, 3]],)))
    assert [(case.path, case.busy_engine) for case in cases[:2]] == [("slice", "off"), ("slice", "both")]
    fleet = FleetOnPaper()
    runner = TrialRunner(fleet, plan(batches=([[0, 3]],)), "full", 0.0, lambda text: None)
    (trial,) = runner.trials([cases[1]], 1)
    assert fleet.loops == ["idle both", "run both", "idle both"]
    assert len(trial.idle_loops) == 2


def test_a_case_is_run_with_its_own_pipeline_and_pace():
    fleet = FleetOnPaper()
    course = TrialRunner(fleet, plan(batches=([[0, 3]],)), "full", 7.0, lambda text: None)
    list(course.trials([Case(0, "staged", "on", 1.5), Case(0, "staged", "off", 2.5)], 1))
    assert fleet.pipelines == ["on", "off"]
    assert fleet.paces == [(1.5, 7.0), (2.5, 7.0)]


def test_a_room_from_the_middle_of_the_batch_is_shown():
    fleet = FleetOnPaper()
    trials(fleet, batches=([[0, 3]],))
    assert fleet.shown == [1, 1]


def test_paths_run_the_same_rooms_under_numbers_of_their_own():
    slice_trial, staged_trial = trials(FleetOnPaper(), batches=([[0, 3]],))
    assert [room.index for room in slice_trial.rooms] == [room.index for room in staged_trial.rooms]
    numbers = [room.number for trial in (slice_trial, staged_trial) for room in trial.rooms]
    assert len(set(numbers)) == 6
    assert all(0 <= number < 1 << 64 for number in numbers)


def test_the_position_in_a_batch_decides_the_prefill_group():
    for trial in trials(FleetOnPaper()):
        assert [room.number % 4 for room in trial.rooms] == list(range(len(trial.rooms)))


def test_a_batch_has_one_identity_over_all_its_trials_and_no_other_has_it():
    fleet = FleetOnPaper()
    trials(fleet, repeat=2)
    by_content = {}
    for batch, _, rooms in fleet.prepared:
        by_content.setdefault(tuple(room.index for room in rooms), set()).add(batch)
    assert all(len(batches) == 1 for batches in by_content.values())
    assert len({next(iter(batches)) for batches in by_content.values()}) == len(by_content) == 3


def test_nothing_runs_after_rooms_that_hold_their_pages():
    with pytest.raises(FleetError, match=r"1 rooms still hold pages after slice.*decode-0: peer lost"):
        trials(FleetOnPaper(held=[0]), batches=([[0, 3]],))


class TestLimitedTime:
    """`--point-seconds`: a path that is too slow for a batch runs its first rooms."""

    class SlowSlice(FleetOnPaper):
        """One second a room on slice, nothing on staged."""

        def __init__(self, clock: list[float]) -> None:
            super().__init__()
            self.clock = clock

        def run(self, command: Run, rooms: Sequence[Room], *more: Any) -> dict[str, Any]:
            self.clock[0] += len(rooms) * (self.prepared[-1][1] == "slice")
            return super().run(command, rooms, *more)

    @pytest.fixture
    def fleet(self, monkeypatch: pytest.MonkeyPatch) -> FleetOnPaper:
        clock = [0.0]
        monkeypatch.setattr("kvctl.lab.bench.trials.time.monotonic", lambda: clock[0])
        return self.SlowSlice(clock)

    def course(self, fleet: FleetOnPaper, point_s: float) -> list[Trial]:
        whole = plan(batches=([[0, 3], [3, 5]],))
        return list(
            TrialRunner(fleet, whole, "full", 0.0, lambda text: None, point_s=point_s).trials(
                Program(0.0, 1).cases(whole), 1
            )
        )

    def test_the_slow_path_runs_the_first_of_the_same_rooms(self, fleet: FleetOnPaper):
        ran = [
            (trial.case.path, trial.batch, [room.index for room in trial.rooms]) for trial in self.course(fleet, 2.0)
        ]
        assert ran == [("slice", 0, [0, 1]), ("staged", 0, [0, 1, 2]), ("staged", 1, [3, 4])]

    def test_one_room_runs_however_slow_it_is_and_later_batches_do_not(self, fleet: FleetOnPaper):
        ran = [(trial.batch, len(trial.rooms)) for trial in self.course(fleet, 0.5) if trial.case.path == "slice"]
        assert ran == [(0, 1)]

    def test_trials_are_no_trials_and_are_not_verified(self, fleet: FleetOnPaper):
        assert len(self.course(fleet, 2.0)) == fleet.verified == 3
        assert [len(rooms) for _, _, rooms in fleet.prepared] == [1, 1, 2, 1, 1, 3, 2]

    def test_trials_do_not_hide_rooms_that_hold_their_pages(self, fleet: FleetOnPaper):
        fleet.held = [0]
        with pytest.raises(FleetError, match="still hold pages after trying slice"):
            self.course(fleet, 2.0)
