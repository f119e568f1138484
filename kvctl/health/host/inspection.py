"""Runs all checks of this host, and explains from the state of their processes why agents do not answer."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode, silence, silent_hosts, stopped
from kvctl.client.fleet import Survey
from kvctl.health.answers import inner, number, text, texts
from kvctl.health.finding import Finding, Severity, listed
from kvctl.health.host import engines, system
from kvctl.health.host import sglang as sglang_servers
from kvctl.health.host import vllm as vllm_servers
from kvctl.health.host.engines import NixlWriter
from kvctl.health.host.view import Fact, HostView, LocalAgent, listener_pid
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration
from kvctl_agent.contract import VERSION, vllm

_FIXED_PORTS = ("KVCTL_ADMIN_ENDPOINT", "KVCTL_METRICS_ENDPOINT")
_PERMISSION = "run kvctl as the user who runs the agents, or with a key that they know (kvctl key new)"
_HELLO = Call("hello")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY, _IDLE = 0.5, 0.05  # cores
Ask = Callable[[Sequence[tuple[Endpoint, Call]]], list[Reply]]


def local_agents(snapshot: Snapshot) -> tuple[LocalAgent, ...]:
    """Returns the agents on this host: those that answered over a Unix socket."""
    return tuple(
        LocalAgent(agent.name, listener_pid(path), int(number(agent.status, "pid") or 0))
        for agent in snapshot.agents.values()
        if (path := agent.answer.endpoint.path) is not None
    )


def inspect(
    host: HostView, directory: Path, snapshot: Snapshot | None = None, command: Sequence[Fact] | None = None
) -> list[Fact]:
    """Returns the results of all checks, the most severe first.

    Args:
        host: the host to check.
        directory: directory of agents' sockets.
        snapshot: answers of the agents; None to check without agents.
        command: facts about a server that is not started yet; None to check those that run.
    """
    agents = {} if snapshot is None else snapshot.agents
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
        title: the engine's name.
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
        "start vLLM with --kv-transfer-config as docs/vllm.md shows; `kvctl doctor -- vllm serve …` checks the command",
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
            problem = host.sglang_problem(sys.executable, host.environ) if name == "sglang" else ""
            yield Fact(
                engine.title,
                f"{installed} installed, none of its ranks seen",
                problem or f"ranks that have not loaded kvctl's {engine.part} are not visible to kvctl",
                Severity.WARNING if problem else Severity.INFO,
                remedy=sglang_servers.REPAIR if problem else engine.remedy,
            )


def _fixed_ports(host: HostView) -> Iterator[tuple[str, int]]:
    for name in _FIXED_PORTS:
        port = host.environ.get(name, "").rpartition(":")[2]
        if port.isdecimal() and 0 < int(port) < 1 << 16:
            yield name, int(port)


class _SecondLook(NamedTuple):
    """What became of an agent that did not answer in time when it was asked again.

    Attributes:
        answered_ns: time until it answered; None if it did not.
        pid, state: its process afterwards, with the letter in /proc/PID/stat (R, S, D, T, …); None and "" if unknown.
        cores: CPU time that all its threads used meanwhile, divided by that time.
        waited: time that they waited for a core meanwhile, likewise; such a process is busy, however few cores it used.
    """

    answered_ns: int | None
    pid: int | None
    state: str
    cores: float
    waited: float


def explain_faults(survey: Survey, host: HostView | None, ask: Ask | None) -> list[Finding]:
    """Returns a finding for each fault of a survey: an agent that did not answer, with the state of its process.

    Of several hosts, one of which no agent answers is one finding. Agents that did not answer in time are asked again,
    since one that is only slow answers then; the CPU time of the others' processes tells busy ones from waiting ones.

    The code of a finding is the code of the fault.

    Args:
        survey: the survey whose faults are explained.
        host: host of the agents' processes; None if the survey comes from a file.
        ask: sends requests to agents; None if the survey comes from a file.
    """
    looks = _second_looks(survey, host, ask) if host is not None and ask is not None else {}
    slow = {name for name, look in looks.items() if look.answered_ns is not None}
    whole = silent_hosts([fault for fault in survey.faults if fault.agent not in slow], survey.hosts)
    found = [_silent_host(name, faults) for name, faults in whole.items()]
    return found + [
        _explain(fault, looks.get(fault.agent)) for fault in survey.faults if survey.host_of(fault.agent) not in whole
    ]


def _second_looks(survey: Survey, host: HostView, ask: Ask) -> dict[str, _SecondLook]:
    """Asks the agents that did not answer in time again; returns what was seen, by the names in the faults."""
    endpoints = {endpoint.name: endpoint for endpoint in survey.discovery.live}
    endpoints |= {fault.agent: endpoint for endpoint, fault in survey.unusable.items()}
    endpoints |= {agent.name: agent.endpoint for agent in survey.agents}
    late = {fault.agent for fault in survey.faults if fault.code == FaultCode.TIMEOUT}
    asked = {name: endpoint for name, endpoint in endpoints.items() if name in late}
    pids = {name: listener_pid(each.path) for name, each in asked.items() if each.path is not None}
    before = {name: _process(host, pids.get(name)) for name in asked}
    began = time.monotonic()
    replies = ask([(endpoint, _HELLO) for endpoint in asked.values()]) if asked else []
    took_s = max(time.monotonic() - began, 1 / _TICKS_PER_S)
    found = {}
    for name, reply in zip(asked, replies, strict=True):
        then, now = before[name], _process(host, pids.get(name))
        pid = pids.get(name) if then[0] and now[0] else None
        cores, waited = (now[1] - then[1]) / took_s, (now[2] - then[2]) / took_s
        found[name] = _SecondLook(reply.rtt_ns if reply.fault is None else None, pid, now[0], cores, waited)
    return found


def _process(host: HostView, pid: int | None) -> tuple[str, float, float]:
    """Returns the state of a process, and for how long (s) its threads ran and waited for a core; "" if not visible."""
    words = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    ran = sum(int(each) for each in words[11:13] if each.isdecimal())  # utime, stime
    tasks = (
        (host.text(f"/proc/{pid}/task/{task}/schedstat") or "").split() for task in host.names(f"/proc/{pid}/task")
    )
    waited_ns = sum(int(each[1]) for each in tasks if len(each) == 3 and each[1].isdecimal())
    return (words[0] if words else ""), ran / _TICKS_PER_S, waited_ns / 1e9


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


def _explain(fault: Fault, look: _SecondLook | None) -> Finding:
    if look is not None and look.pid is not None and look.state in {"T", "t"}:
        fault, look = stopped(fault.agent, look.pid), None
    text, _, remedy = fault.message.partition("; ")
    severity = Severity.CRITICAL
    if fault.code == FaultCode.STOPPED:
        text = f"does not answer: {text}"
    elif fault.code != FaultCode.TIMEOUT:
        text, remedy = fault.message, _PERMISSION if fault.code == FaultCode.NOT_PERMITTED else ""
    elif look is not None:
        observed, _, means = text.partition(": ")
        if look.answered_ns is not None:
            severity = Severity.WARNING
            means = f"asked again, it answered after {duration(look.answered_ns)}: it is slow, and does not hang"
            remedy = f"`kvctl stacks -e {fault.agent}` shows what its threads do; a longer --timeout waits for it"
        elif look.pid is not None:
            does, remedy = _silent_process(look.pid, look)
            means = f"nor when it was asked again: its process {look.pid} {does}"
        else:
            means = f"nor when it was asked again: {means}"
        text = f"{observed}{', ' if look.answered_ns is None else '; '}{means}"
    agents = (fault.agent,) if fault.agent else ()
    remedy = remedy or "`kvctl agents` shows which agents answer"
    return Finding(fault.code, severity, fault.agent or "agents", agents, text, remedy)


def _silent_process(pid: int, look: _SecondLook) -> tuple[str, str]:
    """Returns what the process of an agent does that does not answer, as a predicate; and the remedy."""
    threads = f"`py-spy dump --pid {pid}` shows what its threads do"
    if look.state == "D":
        return "waits in the kernel and cannot be interrupted (a driver, a disk)", (
            f"`cat /proc/{pid}/stack` shows where, and dmesg what has happened"
        )
    if look.cores + look.waited < _IDLE:
        return "used no CPU time meanwhile, so it waits for something: a lock, or a call that does not return", threads
    does = f"used {look.cores:.2g} cores meanwhile"
    if look.waited >= _IDLE:
        does += f", and its threads waited for {look.waited:.2g} more"
    if look.cores + look.waited >= _BUSY:
        does += ", so it is busy, or one of its threads loops"
    return does, f"{threads}; `kvctl agents --timeout 10s` shows whether it is only slow"
