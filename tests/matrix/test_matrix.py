"""Any legal pair of layouts moves verified bytes: every combination between two processes, on both engines.

All prefill ranks are in one process and all decode ranks in another, each side sharing one engine; bytes move through
it from process to process. What landed is verified as `kvctl bench` does, and compared with what the plan says.
Run one alone with `-k` and its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvctl_agent.layout.parallel import ParallelConfig
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.combinations import Combination, combinations
from tests.matrix.matrix_rig.expected import expected
from tests.matrix.matrix_rig.pair import Pair
from tests.support.sampling import sampled


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two processes for all combinations."""
    both = Pair()
    yield both
    both.stop()


@pytest.fixture
def standing(pair: Pair) -> Pair:
    """Both are there: also after a combination that failed."""
    pair.ensure()
    return pair


@pytest.fixture(autouse=True)
def no_leaks(standing: Pair, no_leaks: None) -> None:
    """The two processes outlive a test; whatever else it makes must be gone at its end."""


# Instances of different layouts that serve one decode instance at the same time.
INSTANCES = {
    "tp4_tp2pp2_cp2": (ParallelConfig(tp=4), ParallelConfig(pp=2, tp=2), ParallelConfig(cp=2)),
    "dp2tp2_pp3": (ParallelConfig(dp=2, tp=2), ParallelConfig(pp=3, stages=(1, 4, 1))),
}


@pytest.mark.parametrize("one", sampled(combinations(), 8))
def test_every_byte_arrives(standing: Pair, one: Combination) -> None:
    check(standing, one.case)


@pytest.mark.parametrize(("model", "grouped"), [("gqa8", True), ("latent", False), ("state", True)])
@pytest.mark.parametrize("instances", INSTANCES)
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_several_prefill_instances_serve_one_decode_instance(
    standing: Pair, transport: str, instances: str, model: str, grouped: bool
) -> None:
    name = f"{transport}-{instances}-{model}-{grouped}"
    prefill, decode = INSTANCES[instances], ParallelConfig(dp=2, tp=2)
    check(standing, Case(name, transport, model, prefill, decode, grouped=grouped, cp_mode="all", prefix="some"))


def check(pair: Pair, case: Case) -> None:
    """Runs it; what was verified and what the agents counted is what the plan says."""
    outcome = pair.run(case)
    wanted = expected(case)
    assert outcome.nbytes == wanted.kv_bytes + wanted.state_bytes, "other bytes were verified than are owed"
    for side in (outcome.sent, outcome.landed):
        assert sum(count for (name, _), count in side.items() if name == "kvctl_parts_total") == wanted.parts
        assert sum(count for (name, _), count in side.items() if name == "kvctl_part_bytes_total") == wanted.kv_bytes
        assert not {name for name, _ in side} & {"kvctl_transport_errors_total", "kvctl_room_failures_total"}
    paths = {path for name, path in outcome.sent if name == "kvctl_parts_total"}
    assert paths <= ({case.path} if case.path != "auto" else {"bulk", "slice", "staged"})
    assert case.staging != "off" or "staged" not in paths


def test_summary(standing: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a check of its own: what all of them together moved, for those who read the log."""
    parts: Counter[str] = Counter()
    for outcome in standing.moved:
        parts.update({path: int(n) for (name, path), n in outcome.sent.items() if name == "kvctl_parts_total"})
    full = sum(outcome.landed["percent of a ring", ""] > 90 for outcome in standing.moved)
    nbytes = sum(outcome.nbytes for outcome in standing.moved)
    moved = f"{len(standing.moved)} cases, {nbytes / 1e6:.0f} MB verified"
    with capsys.disabled():
        print(f"\nmatrix: {moved}, parts {dict(parts)}, in {full} of them a ring was full")
