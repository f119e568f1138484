"""Health of a large fleet: first in brief, then the longest waits and whom they wait for in full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import health_reads
from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.health_reads import HEALTH_CALLS, expand

S = 1_000_000_000


def agent(name: str, **answer: Any) -> AgentAnswer:
    hello: Any = {"name": name, "capabilities": ["health"]}
    return AgentAnswer(Endpoint(name, None), hello, 1, ClockOffset(0, 0), {"health": answer} if answer else {})


def room(age_s: int, *peers: str) -> dict[str, Any]:
    return {"state_age_ns": age_s * S, "peers": list(peers)}


def asked(*agents: AgentAnswer) -> tuple[Survey, list[str]]:
    """Expands the survey; returns it, and the agents that were asked all calls, in order."""
    survey = Survey(Discovery(Path()), list(agents))
    names: list[str] = []

    def ask(requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        names.extend(endpoint.name for endpoint, call in requests if call == HEALTH_CALLS[0])
        return [Reply(endpoint, call, f"all {call.command}", None, 0, 0, 0) for endpoint, call in requests]

    expand(survey, ask)
    return survey, names


def test_an_answer_takes_the_place_of_those_that_it_contains() -> None:
    survey, names = asked(agent("decode-0", status={"pid": 1}, rooms=[], omitted={"rooms": 7}))
    assert names == []
    assert survey.agents[0].data == {"status": {"pid": 1}, "rooms": [], "omitted": {"rooms": 7}}


def test_the_longest_wait_comes_first_with_those_that_it_waits_for() -> None:
    survey, names = asked(
        agent("decode-0", rooms=[room(9, "prefill-1")], omitted={"rooms": 7}),
        agent("decode-1", rooms=[room(60, "prefill-0", "gone")]),
        agent("prefill-0", staging={"ring": None, "gated": [{"age_ns": 3 * S, "peer": "decode-2"}]}),
        agent("prefill-1", rooms=[]),
        agent("decode-2", staging={"ring": {"allocations": [{"age_ns": S, "writer": "prefill-0, prefill-1"}]}}),
        agent("decode-3", rooms=[]),
    )
    assert names == ["decode-1", "prefill-0", "decode-0", "prefill-1", "decode-2"]
    assert survey.agents[0].data == {call.command: f"all {call.command}" for call in HEALTH_CALLS}
    assert survey.remarks == []


def test_the_number_of_full_reads_is_limited_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_reads, "MOST_IN_FULL", 2)
    survey, names = asked(*(agent(f"decode-{number}", rooms=[room(number + 10)]) for number in range(5)))
    assert names == ["decode-4", "decode-3"]
    assert survey.remarks[0].startswith("5 agents have rooms that wait for long")


def test_agents_without_the_command_are_asked_all_calls() -> None:
    old = agent("decode-0")
    old.hello["capabilities"] = ["status"]
    _, names = asked(old, agent("decode-1"), agent("decode-2", rooms=[]))
    assert names == ["decode-0"]


@pytest.mark.parametrize("answer", [[], "text", {"rooms": 3}, {"rooms": [1, {}]}, {"staging": {"ring": 7, "gated": 1}}])
def test_an_answer_of_another_shape_does_no_harm(answer: Any) -> None:
    broken = agent("decode-0")
    broken.data["health"] = answer
    asked(broken)
