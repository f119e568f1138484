"""Agents with equal names get different ones, in all answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.fleet import AgentAnswer, gather, rename_duplicates
from kvctl.client.names import told_apart
from kvctl.client.renaming import Renaming
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN

ONE, OTHER = "18ea5cf158487f51", "18ea5cf1d4b31183"


def agent(name: str, incarnation: str, host: str = "", **data: Any) -> AgentAnswer:
    hello: Any = {"name": name, "incarnation": incarnation, "host": host}
    return AgentAnswer(Endpoint(name, Path(f"/{host}{incarnation}")), hello, 1, ClockOffset(0, 0), data)


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (("n1", "n2"), ["decode-0@n1", "decode-0@n2"]),
        (("n1", "n1"), ["decode-0#487f51", "decode-0#b31183"]),
        (("", ""), ["decode-0#487f51", "decode-0#b31183"]),
        (("n1", ""), ["decode-0@n1", "decode-0#b31183"]),
    ],
)
def test_equal_names_are_told_apart_by_host_or_else_by_incarnation(hosts: tuple[str, str], names: list[str]) -> None:
    assert told_apart([("decode-0", hosts[0], ONE), ("decode-0", hosts[1], OTHER)]) == names


def test_a_name_that_another_agent_gave_itself_is_no_other_agents() -> None:
    agents = [("decode-0", "n1", ONE), ("decode-0", "n2", OTHER), ("decode-0@n1", "n3", ONE)]
    assert told_apart(agents) == ["decode-0#487f51", "decode-0@n2", "decode-0@n1"]


def test_two_of_one_name_are_called_by_their_incarnations_everywhere() -> None:
    rows = {"status": {"name": "decode-0"}, "peers": [{"agent": "decode-0", "peer": "prefill-0", "incarnation": "1"}]}
    twin = {"events": {"events": [{"agent": "decode-0", "text": "decode-0 is ready"}], "sequence": 1}}
    seen = {"peers": [{"agent": "prefill-0", "peer": "decode-0", "incarnation": ONE}]}
    agents = [agent("decode-0", ONE, **rows), agent("decode-0", OTHER, **twin), agent("prefill-0", "1", **seen)]
    rename_duplicates(agents)
    assert [each.name for each in agents] == ["decode-0#487f51", "decode-0#b31183", "prefill-0"]
    assert [each.own_name for each in agents] == ["decode-0", "decode-0", "prefill-0"]
    assert agents[0].data["status"]["name"] == "decode-0#487f51"
    assert agents[0].data["peers"][0] == {"agent": "decode-0#487f51", "peer": "prefill-0", "incarnation": "1"}
    assert agents[1].data["events"]["events"][0] == {"agent": "decode-0#b31183", "text": "decode-0#b31183 is ready"}
    assert agents[2].data["peers"][0]["peer"] == "decode-0#487f51", "it serves this one of them"
    assert seen["peers"][0]["peer"] == "decode-0", "a recording keeps its answers"


Answers = dict[str, Any]


def fleet(answers: Callable[[str], Answers]) -> list[AgentAnswer]:
    """Two hosts, each with prefill-0 and decode-0, which are peers."""
    return [
        agent(name, f"{number}c0ffee{role}", f"n{number}", **answers(name))
        for number in (1, 2)
        for role, name in enumerate(("prefill-0", "decode-0"))
    ]


def peers(host: int, name: str, by: str = "incarnation") -> list[Answers]:
    role = ("prefill-0", "decode-0").index(name)
    about = {"incarnation": f"{host}c0ffee{role}"} if by == "incarnation" else {"peer_host": f"n{host}"}
    return [{"agent": "decode-0", "peer": name, "incarnation": None, **about, "last_error": f"{name} is lost"}]


ROOM = {
    "agent": "decode-0",
    "peers": ["prefill-0"],
    "missing": ["prefill-0"],
    "owed": {"prefill-0": 3},
    "failure": {"rank": "prefill-0", "text": "prefill-0: no grant from decode-0, see prefill-0.log and prefill-01"},
    "timeline": [{"agent": "decode-0", "peer": "prefill-0", "detail": "by prefill-0"}],
    "owed_parts": [{"writer": "prefill-0", "decode": "decode-0"}],
}


@pytest.mark.parametrize("by", ["incarnation", "host"])
def test_all_names_in_the_answers_about_rooms_are_replaced(by: str) -> None:
    agents = fleet(lambda name: {"room": [ROOM]} if name == "decode-0" else {})
    asked: list[Endpoint] = []

    def ask(requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        asked.extend(endpoint for endpoint, _ in requests)
        hosts = {each.endpoint: int(each.host[1:]) for each in agents}
        return [
            Reply(endpoint, call, peers(hosts[endpoint], "prefill-0", by), None, 0, 0, 0) for endpoint, call in requests
        ]

    rename_duplicates(agents, ask)
    assert asked == [each.endpoint for each in agents if each.own_name == "decode-0"], "prefill ranks mention nobody"
    assert [each.data for each in agents if each.name == "decode-0@n2"] == [
        {
            "room": [
                {
                    "agent": "decode-0@n2",
                    "peers": ["prefill-0@n2"],
                    "missing": ["prefill-0@n2"],
                    "owed": {"prefill-0@n2": 3},
                    "failure": {
                        "rank": "prefill-0@n2",
                        "text": "prefill-0@n2: no grant from decode-0@n2, see prefill-0.log and prefill-01",
                    },
                    "timeline": [{"agent": "decode-0@n2", "peer": "prefill-0@n2", "detail": "by prefill-0@n2"}],
                    "owed_parts": [{"writer": "prefill-0@n2", "decode": "decode-0@n2"}],
                }
            ]
        }
    ]


def test_agents_that_mention_no_one_are_not_asked_again() -> None:
    agents = fleet(lambda name: {"status": {"name": name, "waiting_for": None}, "rooms": []})

    def ask(requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        raise AssertionError(requests)

    rename_duplicates(agents, ask)
    assert [each.data["status"]["name"] for each in agents] == [each.name for each in agents]


def test_a_peer_that_cannot_be_identified_keeps_its_name() -> None:
    agents = fleet(lambda name: {"rooms": [{"agent": name, "peers": ["prefill-0"]}], "peers": None})
    rename_duplicates(agents)
    assert agents[1].data["rooms"] == [{"agent": "decode-0@n1", "peers": ["prefill-0"]}]


@pytest.mark.parametrize("data", [None, 7, "prefill-0", [None, 7], [{"agent": 7, "peers": "prefill-0", "owed": []}]])
def test_answers_of_another_form_stay_as_they_are(data: Any) -> None:
    assert Renaming({"prefill-0"}, lambda name: f"{name}@n1").answer("rooms", data) == data


def test_names_of_agents_that_the_labels_exclude_count() -> None:
    chosen, other = agent("decode-0", ONE, "n1"), agent("decode-0", OTHER, "n2")
    rename_duplicates([chosen], others=[other])
    assert chosen.name == "decode-0@n1"


def test_an_agent_with_two_addresses_is_selected_by_its_name_and_host() -> None:
    hosts = {"tcp://n1:1": ("n1", ONE), "tcp://10.0.0.1:1": ("n1", ONE), "tcp://n2:1": ("n2", OTHER)}

    def ask(requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        def reply(endpoint: Endpoint, call: Call) -> Reply:
            host, incarnation = hosts[endpoint.address]
            known = {"name": "decode-0", "host": host, "incarnation": incarnation, "pid": 1}
            return Reply(
                endpoint, call, {**known, "protocol": [PROTOCOL_MIN, PROTOCOL_MAX], "now_ns": 1}, None, 1, 2, 1
            )

        return [reply(endpoint, call) for endpoint, call in requests]

    found = Discovery(Path("/"), live=[Endpoint("decode-0", None, remote=address) for address in hosts])
    survey = gather(found, (), {}, ask, {}, ("decode-0@n1",))
    assert ([agent.name for agent in survey.agents], survey.faults) == (["decode-0@n1"], [])
