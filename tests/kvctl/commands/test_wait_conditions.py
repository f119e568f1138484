"""Conditions of `kvctl wait`, evaluated on surveys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.commands.wait import Drained, Ready


def survey(faults: tuple[str, ...] = (), code: str = FaultCode.TIMEOUT, **statuses: dict[str, Any]) -> Survey:
    def answer(name: str, status: Any) -> AgentAnswer:
        hello: Any = {"name": name}
        endpoint = Endpoint(f"{name}:7311", None, remote=f"tcp://{name}:7311")
        return AgentAnswer(endpoint, hello, 1, ClockOffset(0, 0), {"status": status})

    agents = [answer(name, status) for name, status in statuses.items()]
    silent = [Fault(name, code, "no answer") for name in faults]
    return Survey(Discovery(Path()), agents, silent)


BUSY = {"draining": True, "rooms": {"Transferring": 1, "Success": 2}}
IDLE = {"draining": True, "rooms": {"Success": 2}}


def test_who_ends_while_it_drains_is_drained() -> None:
    goal = Drained()
    assert goal.progress(survey(a=BUSY, b=BUSY)).missing == ["a: 1 room active", "b: 1 room active"]
    assert goal.progress(survey(b=BUSY)).missing == ["b: 1 room active"]
    assert goal.progress(survey()).reached == "0 agents drained, 2 agents ended"


def test_an_agent_on_tcp_that_has_ended_is_known_by_its_address() -> None:
    goal = Drained()
    goal.progress(survey(a=BUSY, b=BUSY))
    ended = survey(("a:7311",), FaultCode.UNREACHABLE, b=IDLE)
    assert goal.progress(ended).reached == "1 agent drained, 1 agent ended"


def test_who_does_not_answer_in_time_has_not_ended() -> None:
    goal = Drained()
    goal.progress(survey(a=BUSY, b=BUSY))
    assert goal.progress(survey(("a:7311",), b=IDLE)).missing == ["a:7311: no answer"]


def test_who_never_answered_is_not_known_to_be_drained() -> None:
    goal = Drained()
    assert goal.progress(survey(("b",), a=IDLE)).missing == ["b: no answer"]
    assert Drained().progress(survey()).missing == ["no agent is there"]


def test_an_agent_of_a_version_that_cannot_drain_takes_new_rooms() -> None:
    assert Drained().progress(survey(a={"rooms": {}})).impossible == "a takes new rooms: kvctl drain a"
    both = survey(a={"rooms": {}}, b={"rooms": {}})
    assert Drained().progress(both).impossible == "a, b take new rooms: kvctl drain a b"


def test_ready_counts_those_that_should_be_there() -> None:
    ready = {"waiting_for": None, "not_ready": None}
    assert Ready(1).progress(survey(a=ready)).reached == "1 agent ready"
    assert Ready(2).progress(survey(a=ready)).missing == ["1 of 2 agents there"]
    assert Ready(1).progress(survey(("b",), a=ready)).missing == ["b: no answer"]


def test_ready_is_who_can_take_a_new_room() -> None:
    """Not who waits for nothing: one of two instances of decode may be gone for good."""
    waits = {"waiting_for": "no hello from prefill-1", "not_ready": None}
    ready = {"waiting_for": None, "not_ready": None}
    found = Ready(2).progress(survey(a=waits, b=ready))
    assert (found.missing, found.reached) == ((), "2 agents ready; a waits: no hello from prefill-1")
    draining = {"waiting_for": None, "not_ready": "it is draining"}
    assert Ready(1).progress(survey(a=draining)).missing == ["a: it is draining"]
    old = {"waiting_for": "no hello from prefill-1"}  # an agent of a version that does not tell
    assert Ready(1).progress(survey(a=old)).missing == ["a: no hello from prefill-1"]
