"""Surveys: protocol check, labels, partial answers, refined clocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvctl.client.calls import Call
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import Fleet, Survey

SECOND_NS = 1_000_000_000


def survey(*calls: Call, labels: dict[str, str] | None = None, rounds: int = 1) -> Survey:
    with Fleet((), labels or {}, 2 * SECOND_NS) as fleet:
        return fleet.survey(calls, rounds)


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


def test_repeated_surveys_reuse_the_discovered_agents_until_a_fault(start: Any) -> None:
    first = start("decode-0")
    with Fleet((), {}, 2 * SECOND_NS, discovery_ns=3600 * SECOND_NS) as fleet:
        assert [agent.name for agent in fleet.survey().agents] == ["decode-0"]
        start("decode-1", protocol=[7, 9])
        again = fleet.survey([Call("status")])
        assert [(agent.name, agent.data.keys()) for agent in again.agents] == [("decode-0", {"status"})]
        first.close()
        (fault,) = fleet.survey([Call("status")]).faults
        assert (fault.agent, fault.code) == ("decode-0", "unreachable")
        found = fleet.survey([Call("status")])
        assert found.agents == []
        assert [(fault.agent, fault.code) for fault in found.faults] == [("decode-1", "protocol")]


def test_more_rounds_find_the_offset_of_a_clock_that_is_ahead(start: Any, socket_directory: Path) -> None:
    start("decode-0", ahead_ns=3600 * SECOND_NS)
    (agent,) = survey(rounds=3).agents
    assert abs(agent.clock.offset_ns - 3600 * SECOND_NS) <= agent.clock.error_ns < SECOND_NS
    assert agent.clock.correction_ns == agent.clock.offset_ns


def test_a_silent_agent_is_asked_again_after_growing_pauses(socket_directory: Path, monkeypatch: Any) -> None:
    """Between two pauses a survey costs no time limit; the agent that answers again takes part at once."""
    now = 0
    monkeypatch.setattr("kvctl.client.fleet.time.monotonic_ns", lambda: now)
    endpoints = [Endpoint(name, socket_directory / f"{name}.sock") for name in ("decode-0", "decode-1")]
    monkeypatch.setattr("kvctl.client.fleet.discover", lambda *_: Discovery(socket_directory, list(endpoints)))
    hanging = True
    asked: list[tuple[int, str, str]] = []

    def answer(requests: Any, timeout_ns: int) -> list[Reply]:
        replies = []
        for endpoint, call in requests:
            silent = hanging and endpoint.name == "decode-1"
            if endpoint.name == "decode-1":
                asked.append((now // SECOND_NS, call.command, "brief" if timeout_ns < SECOND_NS else "long"))
            fault = Fault(endpoint.name, FaultCode.TIMEOUT, "no answer within 2 s") if silent else None
            hello = {"name": endpoint.name, "protocol": [1, 1], "now_ns": 0, "incarnation": endpoint.name, "pid": 1}
            replies.append(Reply(endpoint, call, None if silent else hello, fault, 0, 0, 1))
        return replies

    with Fleet((), {}, 2 * SECOND_NS, discovery_ns=3600 * SECOND_NS) as fleet:
        monkeypatch.setattr(fleet._fanout, "ask", answer)
        for second in range(33):
            now = second * SECOND_NS
            hanging = second < 20
            survey = fleet.survey([Call("status")])
            assert [agent.name for agent in survey.agents] == ["decode-0", "decode-1"][: 1 if second < 31 else 2]
            assert [fault.agent for fault in survey.faults] == ["decode-1"] * (len(survey.agents) == 1)
            assert survey.hosts.keys() == {"decode-0", "decode-1"}
    pauses = [(second, "hello", "brief") for second in (1, 3, 7, 15, 31)]
    assert asked[:7] == [(0, "hello", "long"), (0, "status", "long"), *pauses]


NOBODY = "no agent of this name among the 1 that answered, and 2 did not, did you mean decode-1?"


@pytest.mark.parametrize(
    ("names", "answering", "faults"),
    [
        ((), ["decode-1"], [(f"decode-0@n{number}", "no answer within 2 s") for number in (1, 2)]),
        (("decode-1",), ["decode-1"], []),
        (("decode-0",), [], [("decode-0", NOBODY)]),
    ],
)
def test_silent_agents_have_the_same_names_in_every_survey(
    names: tuple[str, ...],
    answering: list[str],
    faults: list[tuple[str, str]],
    socket_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while they are not asked."""
    endpoints = [Endpoint("decode-0", None, remote=f"tcp://n{number}:1") for number in (1, 2)]
    endpoints.append(Endpoint("decode-1", None, remote="tcp://n3:1"))
    monkeypatch.setattr("kvctl.client.fleet.discover", lambda *_: Discovery(socket_directory, list(endpoints)))

    def answer(requests: Any, timeout_ns: int) -> list[Reply]:
        hello = {"name": "decode-1", "protocol": [1, 1], "now_ns": 0, "incarnation": "1", "pid": 1}
        fault = Fault("decode-0", FaultCode.TIMEOUT, "no answer within 2 s")
        return [
            Reply(endpoint, call, None, fault, 0, 0, 1)
            if endpoint.name == "decode-0"
            else Reply(endpoint, call, hello, None, 0, 0, 1)
            for endpoint, call in requests
        ]

    with Fleet((), {}, 2 * SECOND_NS, discovery_ns=3600 * SECOND_NS, names=names) as fleet:
        monkeypatch.setattr(fleet._fanout, "ask", answer)
        for _ in range(3):
            survey = fleet.survey([Call("status")])
            assert [agent.name for agent in survey.agents] == answering
            assert [(fault.agent, fault.message) for fault in survey.faults] == faults
