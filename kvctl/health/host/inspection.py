"""Everything there is to say about this host, given the agents that answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvctl.health.answers import inner, number, text, texts
from kvctl.health.finding import Severity
from kvctl.health.host import devices, engines, limits, surroundings, versions
from kvctl.health.host.fact import Fact
from kvctl.health.host.view import HostView, LocalAgent, listener_pid
from kvctl.health.snapshot import Snapshot

_PORTS = ("KVCTL_ADMIN_ENDPOINT", "KVCTL_METRICS_ENDPOINT")


def local_agents(snapshot: Snapshot) -> tuple[LocalAgent, ...]:
    """Agents that were asked over a Unix socket."""
    return tuple(
        LocalAgent(agent.name, listener_pid(path), int(number(agent.status, "pid") or 0))
        for agent in snapshot.agents.values()
        if (path := agent.answer.endpoint.path) is not None
    )


def inspect(host: HostView, directory: Path, snapshot: Snapshot | None = None) -> list[Fact]:
    """What is so on this host; what has to be done comes first, otherwise by topic.

    Args:
        directory: where agents' sockets are.
    """
    agents = {} if snapshot is None else snapshot.agents
    told = {agent.name: texts(inner(agent.status, "transport"), "environment") for agent in agents.values()}
    environments = {
        name: {key: value for key, _, value in (each.partition("=") for each in variables)}
        for name, variables in told.items()
        if variables
    }
    found = [
        *devices.facts(host, environments),
        *limits.facts(host),
        *engines.facts(host, environments),
        *surroundings.facts(host, directory, dict(_fixed_ports(host))),
        *versions.facts({agent.name: text(agent.status, "version") for agent in agents.values()}),
    ]
    return sorted(found, key=lambda fact: -fact.severity if fact.severity > Severity.INFO else 0)


def _fixed_ports(host: HostView) -> Iterator[tuple[str, int]]:
    for name in _PORTS:
        port = host.environ.get(name, "").rpartition(":")[2]
        if port.isdecimal() and 0 < int(port) < 1 << 16:
            yield name, int(port)
