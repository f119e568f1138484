"""`kvctl nics`: rates of two readings, devices of several hosts and namespaces, agents that lack the command."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvctl.exit_codes import ExitCode
from kvctl.render.nics import nic_rows
from kvctl_agent.contract.admin import ErrorCode
from tests.support.answers import refusal

S = 1_000_000_000


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)


unknown = refusal(ErrorCode.UNKNOWN_COMMAND, "unknown command 'nics'")


def test_rates_are_those_between_the_two_readings(start: Any, kvctl: Any, canned: Any) -> None:
    readings = itertools.count()

    def busy(_: Any) -> Any:
        number = next(readings)
        answer = canned.nics("prefill-0")
        answer["at_ns"] += 2 * S * number
        answer["nics"][0]["sent_bytes_total"] += 80 * 10**9 * number
        return answer

    start("prefill-0", {"nics": busy})
    rows = {row["name"]: row for row in kvctl("nics", "-o", "json").data}
    assert (rows["mlx5_0:1"]["sent_gb_per_s"], rows["mlx5_0:1"]["received_gb_per_s"]) == (40.0, 0.0)
    assert "docker0" not in rows, "virtual, and down"


def test_an_interface_of_two_namespaces_has_two_rows(canned: Any) -> None:
    first, second = canned.nics("prefill-0"), {**canned.nics("prefill-1"), "network": "net:[7]"}
    second["lane"] = {"devices": ["eth0"], "source": "route", "protocol": ""}
    rows = nic_rows([first, second])
    assert [row["ranks"] for row in rows if row["name"] == "eth0"] == [[], ["prefill-1"]]
    assert [row["ranks"] for row in rows if row["name"] == "mlx5_0:1"] == [["prefill-0"]]


def test_an_older_agent_has_no_answer(start: Any, kvctl: Any) -> None:
    start("prefill-0", {"nics": unknown})
    outcome = kvctl("nics")
    assert outcome.code == ExitCode.PROTOCOL
    assert "unknown command 'nics'" in outcome.err


def test_an_older_agent_is_diagnosed_without_it(start: Any, kvctl: Any) -> None:
    start("prefill-0", {"nics": unknown})
    assert "nics" not in kvctl("health").err
