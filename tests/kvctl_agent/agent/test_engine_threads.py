"""NIXL's threads in agents: their number by the cores of the host, where it is shown, and a transfer through them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Model

MODEL = Model(layers=8, pages=64)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 16 cores."""
    monkeypatch.setattr("kvctl_agent.parts.available_cores", lambda: 16)


def shown(agent: Any) -> tuple[str, str, str]:
    """Returns the value and origin of transport_params, and the number of threads in the status."""
    (row,) = [row for row in agent.observe.config() if row["key"] == "transport_params"]
    return row["value"], row["origin"], agent.observe.status()["transport"]["threads"]


@pytest.mark.usefixtures("cores")
def test_a_prefill_rank_divides_its_writes_among_threads(make_fleet: Any) -> None:
    fleet = make_fleet("nixl", model=MODEL, prefill=(1, 1), decode=(1, 1), path="staged").start()
    for number in range(4):
        fleet.recycle(fleet.run(number, 40, aux=1))
    fleet.settle()
    fleet.check()
    assert fleet.errors() == []
    assert shown(fleet.prefill[0]) == ("num_threads=8", "automatic", "8")
    assert shown(fleet.decode[0]) == ("", "default", "0")


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("configured", "value", "threads"),
    [("num_threads=0", "num_threads=0", "0"), ("num_threads=3", "num_threads=3", "3")],
)
def test_a_configured_number_is_kept(make_fleet: Any, configured: str, value: str, threads: str) -> None:
    fleet = make_fleet("nixl", model=MODEL, prefill=(1, 1), decode=(1, 1), transport_params=configured)
    fleet.prefill.append(fleet.prefill_agent(0).start())
    assert shown(fleet.prefill[0]) == (value, "argument", threads)


@pytest.mark.parametrize(("number", "value"), [(4, "num_threads=4"), (1, "")])
def test_threads_post_on_few_cores_but_not_on_one(
    make_fleet: Any, monkeypatch: pytest.MonkeyPatch, number: int, value: str
) -> None:
    monkeypatch.setattr("kvctl_agent.parts.available_cores", lambda: number)
    fleet = make_fleet("nixl", model=MODEL, prefill=(1, 1), decode=(1, 1))
    fleet.prefill.append(fleet.prefill_agent(0).start())
    assert shown(fleet.prefill[0])[0] == value
