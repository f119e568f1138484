"""The matrix can fail, says what failed, and goes on with what comes next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvctl_agent.layout.parallel import ParallelConfig
from tests.matrix.matrix_rig import pair as pairs
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.pair import Failed, Pair

pytestmark = pytest.mark.sample

CASE = Case("small", "loopback", "gqa8", (ParallelConfig(tp=2),), ParallelConfig())


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    both.stop()


def test_a_layout_that_cannot_be_is_a_failure_with_the_arithmetic_and_the_next_case_runs(pair: Pair) -> None:
    with pytest.raises(Failed, match=r"prefill, build: (.|\n)*8 % 3 = 2 and 3 % 8 = 3"):
        pair.run(CASE._replace(prefill=(ParallelConfig(tp=3),)))
    assert pair.run(CASE).nbytes > 0


def test_a_step_that_does_not_end_is_a_failure_with_all_stacks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.run(CASE)
    monkeypatch.setattr(pairs, "STEP_S", 0.0)
    with pytest.raises(Failed, match=r"build took longer than 0 s\n(.|\n)*most recent call first"):
        pair.run(CASE)
