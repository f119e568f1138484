"""Runs all checks of this host, and explains from the state of their processes why agents do not answer."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvctl.client.endpoints import Endpoint, agent_pid, listener_pid
from kvctl.client.faults import Fault, FaultCode, silence, silent_hosts
from kvctl.client.fleet import Survey
from kvctl.health.answers import inner, number, text, texts
from kvctl.health.finding import Finding, Severity, listed
from kvctl.health.host import engines, system
from kvctl.health.host import sglang as sglang_servers
from kvctl.health.host import vllm as vllm_servers
from kvctl.health.host.engines import NixlWriter
from kvctl.health.host.view import Fact, HostView, LocalAgent
from kvctl.health.snapshot import Agent, Snapshot
from kvctl_agent.contract import VERSION, vllm

_FIXED_PORTS = ("KVCTL_ADMIN_ENDPOINT", "KVCTL_METRICS_ENDPOINT")
_PERMISSION = "run kvctl as the user who runs the agents, or with a key that they know (kvctl key new)"


def local_agents(snapshot: Snapshot) -> tuple[LocalAgent, ...]:
    """Returns the agents on this host: those that answered over a Unix socket."""
    return tuple(
        LocalAgent(agent.name, agent_pid(path), int(number(agent.status, "pid") or 0), listener_pid(path))
        for agent in snapshot.answered.values()
        if agent.answer.ended_ns is None and (path := agent.answer.endpoint.path) is not None
    )


def inspect(
    host: HostView, directory: Path, snapshot: Snapshot | None = None, command: Sequence[Fact] | None = None
) -> list[Fact]:
    """Returns the results of all checks, the most severe first.

    Args:
        command: facts about a server that is not started yet; None to check those that run.
    """
    known = {} if snapshot is None else snapshot.agents
    agents = {name: agent for name, agent in known.items() if not agent.answer.endpoint.metrics}
    environments = {
        agent.name: {key: value for key, _, value in (each.partition("=") for each in variables)}
        for agent in agents.values()
        if (variables := texts(inner(agent.status, "transport"), "environment"))
    }
    found = [
        *engines.device_facts(host, environments),
        *system.limit_facts(host),
        *engines.engine_facts(host, environments),
        *engines.thread_facts(host.cores(), _nixl_writers(agents.values())),
        *system.environment_facts(host, directory, dict(_fixed_ports(host))),
        *(
            [*integration_facts(host, agents.values()), *vllm_servers.server_facts(host)]
            if command is None
            else command
        ),
        version_fact({agent.name: text(agent.status, "version") for agent in agents.values()}),
    ]
    return sorted(found, key=lambda fact: -fact.severity)


def _nixl_writers(agents: Iterable[Agent]) -> Iterator[NixlWriter]:
    """Yields the prefill agents of this host whose KV pool is in host memory and whose transport is NIXL."""
    for agent in agents:
        transport = inner(agent.status, "transport")
        threads = text(transport, "threads")
        local = agent.answer.endpoint.path is not None
        if local and threads.isdecimal() and (agent.role, text(agent.status, "device")) == ("prefill", "cpu"):
            sizes = inner(agent.status, "sizes")
            ranks = math.prod(int(number(sizes, axis) or 1) for axis in sizes)
            yield NixlWriter(agent.name, int(threads), ranks, text(transport, "posts") == "native")


def version_fact(agents: Mapping[str, str]) -> Fact:
    """Compares the version of kvctl with the versions of the agents, which are given by agent name."""
    others = {name: version for name, version in agents.items() if version != VERSION}
    if not agents:
        return Fact("versions", f"kvctl {VERSION}", "compatible with agents of the same version")
    if not others:
        same = f"all {len(agents)} agents" if len(agents) > 1 else "the agent"
        return Fact("versions", f"kvctl {VERSION}, as {same}", "they are compatible")
    found = f"kvctl {VERSION}; {', '.join(f'{name} {version}' for name, version in sorted(others.items()))}"
    if len(set(agents.values())) == 1:
        return Fact("versions", found, "the older one lacks the data and commands that the newer one has added")
    return Fact(
        "versions",
        found,
        "agents of different versions may be incompatible",
        Severity.WARNING,
        "install one version for all agents, prefill and decode",
        "KV_COMPAT_MISMATCH",
    )


class _Engine(NamedTuple):
    """What the checks say about an engine that kvctl is part of.

    Attributes:
        part: kvctl's part in it.
        packages: distributions of the engine.
        remedy: how to load it.
    """

    title: str
    part: str
    packages: tuple[str, ...]
    remedy: str


_ENGINES = {
    "sglang": _Engine(
        "SGLang",
        "plugin",
        ("sglang",),
        "start SGLang with --disaggregation-transfer-backend kvctl, or with KVCTL_SGLANG=observe in its environment; "
        "SGLANG_PLUGINS, where set, must name kvctl",
    ),
    "vllm": _Engine(
        "vLLM",
        "connector",
        vllm.DISTRIBUTIONS,
        "start vLLM with --kv-transfer-config as docs/vllm.md shows, or with KVCTL_VLLM=observe in its environment; "
        "`kvctl doctor -- vllm serve …` checks the command",
    ),
}


def command_facts(host: HostView, argv: Sequence[str]) -> list[Fact] | None:
    """Returns the facts about the server that a command line would start; None if it starts none of an engine."""
    found = (sglang_servers.command_facts(host, argv), vllm_servers.command_facts(host, argv))
    return next((list(facts) for facts in found if facts is not None), None)


def integration_facts(host: HostView, agents: Iterable[Agent]) -> Iterator[Fact]:
    """Yields which ranks have loaded kvctl's part of an engine, and in which mode; nothing without such an engine."""
    ranks: dict[tuple[str, str, str, str], list[str]] = {}
    failing: list[str] = []
    for agent in agents:
        found = inner(agent.status, "integration")
        if found:
            key = text(found, "engine"), text(found, "mode"), text(found, "engine_version"), agent.version
            ranks.setdefault(key, []).append(agent.name)
        if agent.role == "decode" and text(inner(found, "settings"), "kv_load_failure_policy") == "fail":
            failing.append(agent.name)
    for (name, mode, version, kvctl), names in sorted(ranks.items()):
        engine = _ENGINES.get(name)
        if engine is None:
            continue
        yield Fact(
            engine.title,
            f"{version}, {engine.part} of kvctl {kvctl} loaded{f' in mode {mode}' * (mode != engine.part)} by "
            f"{listed(names)}",
            f"{engine.title}'s own managers transfer, and kvctl only reads"
            if mode == "observe"
            else "kvctl's agent transfers the KV cache",
        )
    if failing:
        yield Fact(
            "vLLM",
            f"kv_load_failure_policy is fail in {listed(failing)}",
            "a request whose KV does not arrive ends with HTTP 500",
            remedy='"kv_load_failure_policy": "recompute" lets decode compute it, unless decode must never prefill',
        )
    packages = host.packages()
    for name, engine in _ENGINES.items():
        installed = next((packages[each] for each in engine.packages if each in packages), None)
        if installed and not any(key[0] == name for key in ranks):
            problem = host.sglang_problem(sys.executable, host.environ) if name == "sglang" else None
            yield Fact(
                engine.title,
                f"{installed} installed, none of its ranks seen",
                problem.cause
                if problem
                else f"ranks that have not loaded kvctl's {engine.part} are not visible to kvctl",
                Severity.WARNING if problem else Severity.INFO,
                remedy=problem.remedy if problem else engine.remedy,
            )


def _fixed_ports(host: HostView) -> Iterator[tuple[str, int]]:
    for name in _FIXED_PORTS:
        port = host.environ.get(name, "").rpartition(":")[2]
        if port.isdecimal() and 0 < int(port) < 1 << 16:
            yield name, int(port)


def explain_faults(survey: Survey, host: HostView | None) -> list[Finding]:
    """Returns a finding for each fault of a survey: an agent that did not answer, with the state of its process.

    Of several hosts, one of which no agent answers is one finding. The code of a finding is the code of the fault.

    Args:
        host: host of the agents' processes; None if the survey comes from a file.
    """
    whole = silent_hosts(survey.faults, survey.hosts)
    endpoints = {endpoint.name: endpoint for endpoint in survey.discovery.live}
    endpoints |= {fault.agent: endpoint for endpoint, fault in survey.unusable.items()}
    endpoints |= {agent.name: agent.endpoint for agent in survey.agents}
    found = [_silent_host(name, faults) for name, faults in whole.items()]
    return found + [
        _explain(fault, endpoints.get(fault.agent), host)
        for fault in survey.faults
        if survey.host_of(fault.agent) not in whole
    ]


def _silent_host(host: str, faults: Sequence[Fault]) -> Finding:
    """Returns the finding about a host of which no agent answers."""
    return Finding(
        faults[0].code,
        Severity.CRITICAL,
        f"host {host}",
        tuple(fault.agent for fault in faults),
        silence(host, faults).partition("; ")[0],
        f"`kvctl hosts show {host}` lists its agents; see whether the host runs, and whether a firewall or the network "
        "between it and this machine has changed",
        {"silent_agents": len(faults)},
    )


def _explain(fault: Fault, endpoint: Endpoint | None, host: HostView | None) -> Finding:
    text, remedy = fault.problem, fault.remedy
    if fault.code == FaultCode.STOPPED:
        text = f"does not answer: {text}"
    elif fault.code != FaultCode.TIMEOUT:
        text, remedy = fault.message, _PERMISSION if fault.code == FaultCode.NOT_PERMITTED else ""
    elif host is not None and (silent := _silent_process(endpoint, host)) is not None:
        text, remedy = f"{text.partition(': ')[0]}: {silent[0]}", silent[1]
    agents = (fault.agent,) if fault.agent else ()
    if not remedy and endpoint is not None and endpoint.metrics:
        remedy = f"`curl -m 10 {shlex.quote(endpoint.shown_address)}` shows whether it answers this host"
    remedy = remedy or "`kvctl agents` shows which agents answer"
    return Finding(fault.code, Severity.CRITICAL, fault.agent or "agents", agents, text, remedy)


def _silent_process(endpoint: Endpoint | None, host: HostView) -> tuple[str, str] | None:
    """Returns what the process does that listens on an agent's socket and does not answer, and the remedy.

    It is the observer of the agents, or the agent itself where no observer could be started. None if it is not visible.
    """
    if endpoint is None or endpoint.path is None:
        return None
    pid = listener_pid(endpoint.path)
    words = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    if pid is None or not words:
        return None
    process = "its process" if pid == agent_pid(endpoint.path) else "the observer of this host's agents, process"
    match words[0]:
        case "T" | "t":
            return f"{process} {pid} is stopped", f"`kill -CONT {pid}` lets it go on"
        case "D":
            return f"{process} {pid} waits in the kernel and cannot be interrupted (a driver, a disk)", (
                f"`cat /proc/{pid}/stack` shows where, and dmesg what has happened"
            )
    return f"{process} {pid} is busy or hung", (
        f"`py-spy dump --pid {pid}` shows what its threads do; `kvctl agents --timeout 10s` whether it is only slow"
    )
