"""Reads what the health codes need: everything from a small fleet, and from a large one first what is not in order.

An agent's answers to all calls of the health codes have 100 kB and more, most of it about rooms and peers without any
problem. Of a large fleet each agent is therefore asked for `health`, which leaves those out. Where rooms or parts wait
for long, the agents and those that they wait for are then asked all calls, because some findings compare both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.client.calls import Call
from kvctl_agent.contract.health import HEALTH_FAILED, HEALTH_HISTORY, HEALTH_ROOMS

if TYPE_CHECKING:
    from kvctl.client.endpoints import Endpoint
    from kvctl.client.fanout import Reply
    from kvctl.client.fleet import AgentAnswer, Survey

HEALTH_CALLS: tuple[Call, ...] = (
    Call("status"),
    Call("rooms", {"limit": HEALTH_ROOMS}),
    Call("history", {"limit": HEALTH_HISTORY}),
    Call("failed", {"limit": HEALTH_FAILED}),
    Call("staging"),
    Call("peers"),
    Call("metrics"),
    Call("config"),
)
"""Calls of the survey from which a snapshot is made. Agents list their oldest rooms first, so limits keep those."""

DIAGNOSIS_CALLS: tuple[Call, ...] = (*HEALTH_CALLS, Call("nics", optional=True))
"""Calls of a survey that diagnoses the fleet, network devices included, which `status` and `top` do without: an agent's
answer about a host with eight cards has 20 KB. Older agents lack the command."""

BRIEF = Call("health", optional=True)
BRIEF_ABOVE = 64
"""Number of agents above which they are asked for `health` first."""
MOST_IN_FULL = 64
"""Number of agents of a large fleet that are asked all calls."""


def expand(survey: Survey, ask: Callable[[Sequence[tuple[Endpoint, Call]]], list[Reply]]) -> list[Reply]:
    """Replaces the answers to `health` by those that they contain, and asks some agents all calls of the health codes.

    These are agents of versions without `health`, and those with long waits together with the agents that they wait
    for, the longest wait first. Returns the replies of these agents.
    """
    for agent in survey.agents:
        answer = agent.data.pop(BRIEF.command, None)
        agent.data.update(answer if isinstance(answer, dict) else {})
    older = [agent for agent in survey.agents if BRIEF.command not in agent.hello.get("capabilities", ())]
    waiting = _waiting(survey.agents)
    if len(waiting) > MOST_IN_FULL:
        survey.remarks.append(
            f"{len(waiting)} agents have rooms that wait for long, or are waited for: the {MOST_IN_FULL} with the "
            "longest waits were examined in full; -l host=… examines others"
        )
    by_endpoint = {agent.endpoint: agent for agent in (*older, *waiting[:MOST_IN_FULL])}
    for agent in by_endpoint.values():
        agent.data.pop("omitted", None)
    replies = ask([(endpoint, call) for endpoint in by_endpoint for call in HEALTH_CALLS])
    for reply in replies:
        if reply.fault is None:
            by_endpoint[reply.endpoint].data[reply.call.command] = reply.data
    return replies


def _waiting(agents: Sequence[AgentAnswer]) -> list[AgentAnswer]:
    """Returns the agents with waits that `health` did not leave out, each followed by those that it waits for."""
    by_name: dict[str, list[AgentAnswer]] = {}
    for agent in agents:
        by_name.setdefault(agent.name, []).append(agent)
    waits = [(age, agent, names) for agent in agents for age, names in _waits(agent.data)]
    found: dict[int, AgentAnswer] = {}
    for _, agent, names in sorted(waits, key=lambda wait: -wait[0]):
        for each in (agent, *(other for name in names for other in by_name.get(name, ()))):
            found.setdefault(id(each), each)
    return list(found.values())


def _waits(data: Mapping[str, Any]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields the age (ns) of each room, region and part that waits, and the names of the agents that it waits for."""
    for room in rows_of(data, "rooms"):
        yield _age_ns(room, "state_age_ns"), [name for name in room.get("peers") or () if isinstance(name, str)]
    staging = data.get("staging")
    if isinstance(staging, dict):
        for region in rows_of(staging.get("ring"), "allocations"):
            yield _age_ns(region, "age_ns"), str(region.get("writer")).split(", ")
        for part in rows_of(staging, "gated"):
            yield _age_ns(part, "age_ns"), [str(part.get("peer"))]


def rows_of(data: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Returns the JSON objects in a list in `data`, an untrusted answer."""
    rows = data.get(key) if isinstance(data, dict) else None
    return (row for row in rows if isinstance(row, dict)) if isinstance(rows, list) else iter(())


def _age_ns(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    return value if isinstance(value, int) else 0
