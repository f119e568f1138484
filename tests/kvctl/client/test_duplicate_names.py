"""Agents with equal names are renamed in their answers."""

from __future__ import annotations

from typing import Any

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.fleet import AgentAnswer, rename_duplicates

ONE, OTHER = "18ea5cf158487f51", "18ea5cf1d4b31183"


def agent(name: str, incarnation: str, **data: Any) -> AgentAnswer:
    hello: Any = {"name": name, "incarnation": incarnation}
    endpoint = Endpoint(name, f"ipc:///{incarnation}")
    return AgentAnswer(endpoint, hello, 1, ClockOffset(0, 0), data)


def test_names_that_one_agent_has_alone_stay() -> None:
    agents = [agent("decode-0", ONE, status={"name": "decode-0"}), agent("decode-1", OTHER)]
    rename_duplicates(agents)
    assert [each.name for each in agents] == ["decode-0", "decode-1"]


def test_two_of_one_name_are_called_by_their_incarnations_everywhere() -> None:
    rows = {"status": {"name": "decode-0"}, "peers": [{"agent": "decode-0", "peer": "prefill-0", "incarnation": "1"}]}
    twin = {"events": {"events": [{"agent": "decode-0", "text": "decode-0 is ready"}], "sequence": 1}}
    seen = {"peers": [{"agent": "prefill-0", "peer": "decode-0", "incarnation": ONE}]}
    agents = [agent("decode-0", ONE, **rows), agent("decode-0", OTHER, **twin), agent("prefill-0", "1", **seen)]
    rename_duplicates(agents)
    assert [each.name for each in agents] == ["decode-0#487f51", "decode-0#b31183", "prefill-0"]
    assert agents[0].data["status"]["name"] == "decode-0#487f51"
    assert agents[0].data["peers"][0] == {"agent": "decode-0#487f51", "peer": "prefill-0", "incarnation": "1"}
    assert agents[1].data["events"]["events"][0] == {"agent": "decode-0#b31183", "text": "decode-0 is ready"}
    assert agents[2].data["peers"][0]["peer"] == "decode-0#487f51", "it serves this one of them"
