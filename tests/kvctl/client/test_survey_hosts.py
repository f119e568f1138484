"""Hosts of agents in a survey: of those that answer, and of those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault
from kvctl.client.fleet import Survey, gather

NOW = 1_760_000_000_000_000_000


def tcp(address: str, name: str = "", host_name: str = "") -> Endpoint:
    return Endpoint(name or address, None, remote=f"tcp://{address}", host_name=host_name)


def hello(name: str, host: str | None) -> dict[str, Any]:
    about = {"name": name, "role": "decode", "pid": 1, "incarnation": f"{hash((name, host)) & 0xFFFFFF:06x}"}
    return {**about, "protocol": [1, 1], "now_ns": NOW, **({} if host is None else {"host": host})}


def survey(
    answers: Mapping[Endpoint, Mapping[str, Any] | None], *calls: str, labels: Mapping[str, str] | None = None
) -> Survey:
    """Returns a survey of agents with these answers by command; None for an agent that does not answer."""

    def ask(requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        replies = []
        for endpoint, call in requests:
            given = answers[endpoint]
            fault = Fault(endpoint.name, "timeout", "no answer within 2 s") if given is None else None
            replies.append(Reply(endpoint, call, given and given[call.command], fault, NOW, NOW, 0))
        return replies

    found = Discovery(Path("/run/kvctl"), live=list(answers))
    return gather(found, [Call(each) for each in calls], labels or {}, ask, {})


def test_the_host_of_a_silent_agent_is_that_of_agents_with_its_address() -> None:
    found = survey({tcp("10.0.0.1:1"): {"hello": hello("decode-0", "n1")}, tcp("10.0.0.1:2"): None})
    assert found.hosts == {"decode-0": "n1", "10.0.0.1:2": "n1"}
    assert found.host_of("nobody") == ""


def test_peers_tell_the_host_of_an_address() -> None:
    peers = [{"peer": "prefill-0", "endpoint": "tcp://10.0.0.2:5000", "peer_host": "n2"}]
    found = survey(
        {tcp("10.0.0.1:1"): {"hello": hello("decode-0", "n1"), "peers": peers}, tcp("10.0.0.2:7"): None}, "peers"
    )
    assert found.host_of("10.0.0.2:7") == "n2"


def test_an_address_that_several_hosts_share_stands_for_itself() -> None:
    agents = {tcp(f"127.0.0.1:{port}"): {"hello": hello(f"decode-{port}", f"n{port}")} for port in (1, 2)}
    assert survey({**agents, tcp("127.0.0.1:3"): None}).host_of("127.0.0.1:3") == "127.0.0.1"


def test_a_source_tells_the_hosts_of_silent_agents_and_equal_names_are_told_apart() -> None:
    found = survey(
        {
            tcp("10.0.0.1:1", "decode-0", "n1"): {"hello": hello("decode-0", "n1")},
            tcp("10.0.0.2:1", "decode-0", "n2"): None,
            tcp("10.0.0.3:1", "decode-0", "n3"): None,
            tcp("10.0.0.3:2", "decode-1", "n3"): None,
        }
    )
    assert [fault.agent for fault in found.faults] == ["decode-0@n2", "decode-0@n3", "decode-1"]
    assert found.hosts == {"decode-0": "n1", "decode-0@n2": "n2", "decode-0@n3": "n3", "decode-1": "n3"}


def test_an_older_agent_is_on_the_host_of_its_address() -> None:
    found = survey(
        {tcp("10.0.0.1:1"): {"hello": hello("decode-0", None)}, tcp("10.0.0.2:1"): {"hello": hello("decode-0", None)}}
    )
    assert [agent.name for agent in found.agents] == ["decode-0@10.0.0.1", "decode-0@10.0.0.2"]
