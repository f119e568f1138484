"""Any legal pair of layouts moves verified bytes, on both engines: every combination of `matrix_rig/combinations.py`.

What landed is verified as `kvctl bench` does, and compared with what the plan says; the pools of prefill ranks must not
have changed. Run one alone with `-k` and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent import parts
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.runtime import arrivals, peer_connections
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.combinations import Combination, combinations
from tests.matrix.matrix_rig.expected import expected
from tests.matrix.matrix_rig.ranks import DecodeRanks, PrefillRanks, Ranks
from tests.support.mooncake import start_mooncake
from tests.support.sampling import sampled

_MIB = 1 << 20
# Instances of different layouts that serve one decode instance at the same time.
INSTANCES = {
    "tp4_tp2pp2_cp2": (ParallelConfig(tp=4), ParallelConfig(pp=2, tp=2), ParallelConfig(cp=2)),
    "dp2tp2_pp3": (ParallelConfig(dp=2, tp=2), ParallelConfig(pp=3, stages=(1, 4, 1))),
}


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Overrides the check: engines keep some descriptors open as long as the process lives."""


@pytest.fixture(autouse=True)
def many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of ranks share a core here: they get little scratch memory, and poll less often."""
    start_mooncake()
    monkeypatch.setattr(parts, "_SCRATCH_BYTES", _MIB)
    monkeypatch.setattr(peer_connections, "_COPIES_BYTES", 2 * _MIB)
    monkeypatch.setattr(arrivals, "_SHORTEST_S", 500e-6)
    monkeypatch.setattr(arrivals, "_LONGEST_S", 4e-3)


@pytest.fixture
def both(many_ranks: None) -> Iterator[Callable[..., list[Any]]]:
    """Returns a function that calls something for each argument, all of them at the same time."""
    with ThreadPoolExecutor(2) as pool:
        yield lambda call, arguments: list(pool.map(call, arguments))


@pytest.mark.parametrize("one", sampled(combinations(), 8))
def test_every_byte_arrives(both: Callable[..., list[Any]], socket_dir: Path, one: Combination) -> None:
    check(both, socket_dir, one.case)


@pytest.mark.parametrize(("model", "grouped"), [("gqa8", True), ("latent", False), ("state", True)])
@pytest.mark.parametrize("instances", INSTANCES)
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_several_prefill_instances_serve_one_decode_instance(
    both: Callable[..., list[Any]], socket_dir: Path, transport: str, instances: str, model: str, grouped: bool
) -> None:
    name = f"{transport}-{instances}-{model}-{grouped}"
    prefill, decode = INSTANCES[instances], ParallelConfig(dp=2, tp=2)
    case = Case(name, transport, model, prefill, decode, grouped=grouped, cp_mode="all", prefix="some")
    check(both, socket_dir, case)


def check(both: Callable[..., list[Any]], directory: Path, case: Case) -> None:
    """Runs a case; what was verified and what the agents counted is what the plan says."""
    with ExitStack() as stack:
        prefill = PrefillRanks(case, directory)
        stack.callback(prefill.close)
        decode = DecodeRanks(case, directory)
        stack.callback(decode.close)
        both(Ranks.meet, (prefill, decode))
        sent, landed = both(lambda ranks: ranks.run(), (prefill, decode))
        (_, changed), (nbytes, problems) = both(Ranks.check, (prefill, decode))
    assert changed + problems == []
    wanted = expected(case)
    assert nbytes == wanted.kv_bytes + wanted.state_bytes, "other bytes were verified than are owed"
    for side in (sent, landed):
        assert sum(count for (name, _), count in side.items() if name == "kvctl_parts_total") == wanted.parts
        assert sum(count for (name, _), count in side.items() if name == "kvctl_part_bytes_total") == wanted.kv_bytes
        assert not {name for name, _ in side} & {"kvctl_transport_errors_total", "kvctl_room_failures_total"}
    paths = {path for name, path in sent if name == "kvctl_parts_total"}
    assert paths <= ({case.path} if case.path != "auto" else {"bulk", "slice", "staged"})
    assert case.staging != "off" or "staged" not in paths
