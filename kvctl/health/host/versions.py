"""Whether kvctl and the agents it talks to are of one version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvctl.health.finding import Severity
from kvctl.health.host.fact import Fact
from kvctl_agent.contract.version import VERSION


def facts(agents: Mapping[str, str]) -> Iterator[Fact]:
    """
    Args:
        agents: version by name.
    """
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
