"""Surveys: protocol check, labels, partial answers, refined clocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet, Survey
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused

SECOND_NS = 1_000_000_000


def survey(*calls: Call, labels: dict[str, str] | None = None, rounds: int = 1) -> Survey:
    with Fleet((), labels or {}, 2 * SECOND_NS) as fleet:
        return fleet.survey(calls, rounds)


def test_everybody_answers_sorted_by_name(fleet: Any) -> None:
    found = survey(Call("status"), Call("peers"))
    assert [agent.name for agent in found.agents] == sorted(fleet)
    assert found.faults == []
    assert all(agent.data.keys() == {"status", "peers"} for agent in found.agents)


def test_labels_narrow_by_role_and_coordinates(fleet: Any) -> None:
    found = survey(labels={"role": "prefill", "tp": "1"})
    assert [agent.name for agent in found.agents] == ["prefill-1"]
    assert found.filtered == 3
    assert found.faults == []


def test_an_agent_of_another_protocol_is_named_and_not_asked_on(start: Any) -> None:
    start("decode-0")
    start("newer", protocol=[7, 9])
    found = survey(Call("status"))
    assert [agent.name for agent in found.agents] == ["decode-0"]
    (fault,) = found.faults
    assert (fault.agent, fault.code) == ("newer", "protocol")
    assert "update kvctl" in fault.message


def test_a_refused_command_is_a_fault_of_that_agent_only(start: Any) -> None:
    def refuse(_: dict[str, Any]) -> Any:
        raise RequestRefused(ErrorCode.NOT_PERMITTED, "peers needs level operate")

    start("decode-0")
    start("decode-1", {"peers": refuse})
    found = survey(Call("peers"))
    assert [agent.name for agent, _ in found.answers("peers")] == ["decode-0"]
    assert [(fault.agent, fault.code) for fault in found.faults] == [("decode-1", "not-permitted")]


def test_more_rounds_find_the_offset_of_a_clock_that_is_ahead(start: Any, socket_directory: Path) -> None:
    start("decode-0", ahead_ns=3600 * SECOND_NS)
    (agent,) = survey(rounds=3).agents
    assert abs(agent.clock.offset_ns - 3600 * SECOND_NS) <= agent.clock.error_ns < SECOND_NS
    assert agent.clock.correction_ns == agent.clock.offset_ns
