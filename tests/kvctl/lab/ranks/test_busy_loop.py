"""The loop of a busy engine: what an iteration takes, and the speed that the loop lost beside an agent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvctl.lab.ranks import busy_loop
from kvctl.lab.ranks.busy_loop import BusyLoop, LoopTimes, slowdown


def times(*, mean_us: float, typical_us: float) -> LoopTimes:
    ns, typical_ns = round(1000 * mean_us * 1000), round(typical_us * 1000)
    return LoopTimes(iterations=1000, ns=ns, typical_ns=typical_ns, longest_ns=0, longest_call_ns=0)


@pytest.mark.parametrize(
    ("busy", "idle", "lost"),
    [
        (times(mean_us=100, typical_us=50), times(mean_us=50, typical_us=50), 0.5),
        # The core was slow at first, or the idle loop was interrupted: the loop beside rooms did not get faster.
        (times(mean_us=50, typical_us=50), times(mean_us=70, typical_us=70), 0.0),
        (times(mean_us=50, typical_us=50), times(mean_us=70, typical_us=50), 0.0),
        # Rooms slow every iteration down, for example by their use of the memory.
        (times(mean_us=100, typical_us=100), times(mean_us=50, typical_us=50), 0.5),
    ],
)
def test_the_loop_is_compared_with_its_undisturbed_iterations(busy: LoopTimes, idle: LoopTimes, lost: float) -> None:
    assert slowdown([busy], [idle, idle]) == pytest.approx(lost)


def test_interruptions_change_the_mean_and_not_the_typical_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += next(durations)
        return now_ns

    durations = iter([0, 70_000, 0, 70_000, 0, 5_000_000, 0, 70_000, 0, 70_000])
    monkeypatch.setattr(busy_loop, "time", SimpleNamespace(monotonic_ns=clock))
    loop = BusyLoop()
    for _ in range(5):
        loop.iterate()
    assert loop.times == LoopTimes(
        iterations=5, ns=5_280_000, typical_ns=70_000, longest_ns=5_000_000, longest_call_ns=0
    )
