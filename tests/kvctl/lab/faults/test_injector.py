"""Which faults are in force, and when one should_fire."""

from __future__ import annotations

import pytest

from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_fault
from tests.support.polling import until


def fates(seed: int, name: str = "decode-0", spec: str = "control-loss=30%", other: str | None = None) -> list[bool]:
    faults = FaultInjector(name, seed)
    faults.set(parse_fault(spec))
    if other is not None:
        faults.set(parse_fault(other))
    struck = []
    for _ in range(400):
        if other is not None:
            faults.should_fire(other.partition("=")[0])
        struck.append(faults.should_fire("control-loss") is not None)
    return struck


def test_the_same_seed_draws_the_same_whatever_else_is_in_force() -> None:
    assert fates(1) == fates(1) == fates(1, other="control-dup=50%")
    assert fates(1) != fates(2)
    assert fates(1) != fates(1, name="decode-1")
    assert 60 < sum(fates(1)) < 180


def test_certain_and_absent() -> None:
    faults = FaultInjector("decode-0")
    assert faults.should_fire("control-loss") is None
    assert faults.ns("control-delay") == 0
    faults.set(parse_fault("control-loss=100%"))
    faults.set(parse_fault("control-delay=20ms"))
    assert all(faults.should_fire("control-loss") for _ in range(100))
    assert faults.ns("control-delay") == 20_000_000
    assert faults.active() == ["control-loss=100%", "control-delay=20ms"]
    assert faults.counts() == {"control-loss": 100}


def test_one_replaces_another_of_its_kind() -> None:
    faults = FaultInjector("decode-0")
    faults.set(parse_fault("control-delay=20ms"))
    faults.set(parse_fault("control-delay=30ms"))
    assert faults.active() == ["control-delay=30ms"]
    faults.clear("control-loss")
    faults.clear("control-delay")
    assert faults.active() == []


def test_clear_ends_all_but_not_the_counts() -> None:
    faults = FaultInjector("decode-0")
    faults.set(parse_fault("notify-loss=100%"))
    assert faults.should_fire("notify-loss")
    faults.clear()
    assert faults.should_fire("notify-loss") is None
    assert faults.counts() == {"notify-loss": 1}


def test_a_fault_ends_by_itself() -> None:
    faults = FaultInjector("decode-0")
    faults.set(parse_fault("notify-loss=100%"), seconds=0.02)
    until(lambda: not faults.should_fire("notify-loss"), "the fault does not end")
    assert faults.active() == []


@pytest.mark.parametrize("spec", ["abort=10%", "kill=decode-0@1s", "pause=decode-0@1s+1s"])
def test_an_agent_cannot_do_everything_to_itself(spec: str) -> None:
    with pytest.raises(ValueError, match="an agent cannot inject this fault into itself"):
        FaultInjector("decode-0").set(parse_fault(spec))
