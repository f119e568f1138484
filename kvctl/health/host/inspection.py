"""Everything there is to say about this host, given the agents that answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvctl.health.answers import inner, number, text, texts
from kvctl.health.finding import Severity
from kvctl.health.host import devices, engines, limits, surroundings
from kvctl.health.host.fact import Fact
from kvctl.health.host.view import HostView, LocalAgent, listener_pid
from kvctl.health.snapshot import Snapshot
from kvctl_agent.contract import VERSION


def version_facts(agents: Mapping[str, str]) -> Iterator[Fact]:
    """Differences between the versions of kvctl and of the agents, whose versions are given by name."""
    others = {name: version for name, version in agents.items() if version != VERSION}
    if not others:
        if agents:
            all_of = f"all {len(agents)} agents" if len(agents) > 1 else "the agent"
            yield Fact("versions", f"kvctl {VERSION}, as {all_of}", "they understand each other")
        else:
            yield Fact("versions", f"kvctl {VERSION}", "agents of the same version understand it")
        return
    found = ", ".join(f"{name} {version}" for name, version in sorted(others.items()))
    mixed = len(set(agents.values())) > 1
    yield Fact(
        "versions",
        f"kvctl {VERSION}; {found}",
        "agents of different versions may not fit each other"
        if mixed
        else "what the newer one knows, the older one cannot tell or show",
        Severity.WARNING if mixed else Severity.INFO,
        "bring all agents to one version, prefill and decode" if mixed else "",
        "KV_COMPAT_MISMATCH" if mixed else "",
    )


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
        *version_facts({agent.name: text(agent.status, "version") for agent in agents.values()}),
    ]
    return sorted(found, key=lambda fact: -fact.severity if fact.severity > Severity.INFO else 0)


def _fixed_ports(host: HostView) -> Iterator[tuple[str, int]]:
    for name in _PORTS:
        port = host.environ.get(name, "").rpartition(":")[2]
        if port.isdecimal() and 0 < int(port) < 1 << 16:
            yield name, int(port)
