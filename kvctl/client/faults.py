"""Faults: why an agent did not answer a request, and the exit code of a command for a set of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvctl.client.names import by_host, whole_hosts
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import ErrorCode


class FaultCode(StrEnum):
    """Codes of faults that the client detects; errors that an agent returns have a code of `ErrorCode` instead."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    STOPPED = "stopped"  # the process is stopped: SIGSTOP, job control, a debugger
    PROTOCOL = ErrorCode.PROTOCOL.value
    NOT_PERMITTED = ErrorCode.NOT_PERMITTED.value
    NOT_CAPTURED = "not-captured"  # the queried recording does not have the answer
    METRICS_ONLY = "metrics-only"  # the engine has no agent, and its metrics do not have the answer


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why one agent did not answer a request; an entry of `errors` in JSON output.

    `code` is a `FaultCode` or an `ErrorCode` of the agent; `agent` is "" if the fault is not one agent's. `message` has
    the problem, and after "; " the remedy, if one is known.
    """

    agent: str
    code: str
    message: str

    @property
    def problem(self) -> str:
        return self.message.partition("; ")[0]

    @property
    def remedy(self) -> str:
        return self.message.partition("; ")[2]

    @property
    def text(self) -> str:
        """The agent and the message, as one line."""
        return f"{self.agent}: {self.message}" if self.agent else self.message


SILENT = frozenset({FaultCode.TIMEOUT.value, FaultCode.STOPPED.value, FaultCode.UNREACHABLE.value})
"""Fault codes of agents that exist but do not answer."""


def stopped(agent: str, whose: str, pid: int) -> Fault:
    """Returns the fault of an agent for which a stopped process would answer: its own, or its observer's."""
    return Fault(agent, FaultCode.STOPPED, f"{whose} {pid} is stopped; `kill -CONT {pid}` lets it go on")


def metrics_only(agent: str, command: str) -> Fault:
    """Returns the fault of an engine without an agent, whose metrics do not answer a command."""
    text = f"exports only metrics: {command} needs an agent in the server"
    return Fault(agent, FaultCode.METRICS_ONLY, text)


def timed_out(agent: str, timeout_ns: int, *, local: bool) -> Fault:
    """Returns the fault of an agent that did not answer in time; a local one whose process is known to run.

    The problem has what was observed before the colon, and what it can mean after it.
    """
    means = "busy or hung" if local else "busy, stopped, hung or cut off"
    wait = f"`kvctl agents --timeout {max(10.0, 5 * timeout_ns / 1e9):g}s` waits longer"
    where = "" if local else " on that host"
    text = f"no answer within {timeout_ns / 1e9:g} s: {means}; {wait}, kvctl doctor{where} tells which"
    return Fault(agent, FaultCode.TIMEOUT, text)


_EXITS: dict[str, ExitCode] = {
    FaultCode.UNREACHABLE: ExitCode.NO_AGENT,
    FaultCode.TIMEOUT: ExitCode.TIMEOUT,
    FaultCode.STOPPED: ExitCode.TIMEOUT,
    ErrorCode.NOT_PERMITTED: ExitCode.NOT_PERMITTED,
    ErrorCode.PROTOCOL: ExitCode.PROTOCOL,
    # An agent that lacks a command has another version than kvctl.
    ErrorCode.UNKNOWN_COMMAND: ExitCode.PROTOCOL,
}
# Order of precedence of the exit codes if no agent answered.
_RANKING = (ExitCode.PROTOCOL, ExitCode.NOT_PERMITTED, ExitCode.TIMEOUT, ExitCode.FAILED, ExitCode.NO_AGENT)


def exit_code(answered: int, faults: Iterable[Fault]) -> ExitCode:
    """Returns the exit code of a command that `answered` agents answered, and that others failed with `faults`."""
    codes = {_EXITS.get(fault.code, ExitCode.FAILED) for fault in faults}
    if not codes:
        return ExitCode.OK if answered else ExitCode.NO_AGENT
    if answered:
        return ExitCode.PARTIAL
    return next(code for code in _RANKING if code in codes)


def lines(faults: Iterable[Fault], hosts: Mapping[str, str] | None = None) -> list[str]:
    """Formats faults as one line for each distinct message, such as `decode-0, decode-1: no answer within 2 s`.

    `hosts` has the hosts of all agents, by name: of a host of which all agents have the same fault, only the host is
    named.
    """
    agents: dict[str, list[str]] = {}
    for fault in faults:
        agents.setdefault(fault.message, []).append(fault.agent)
    return [": ".join(filter(None, (by_host(names, hosts or {}), message))) for message, names in agents.items()]


def silent_hosts(faults: Iterable[Fault], hosts: Mapping[str, str]) -> dict[str, list[Fault]]:
    """Returns the faults of the agents of each host, of several, of which no agent answers."""
    silent = [fault for fault in faults if fault.code in SILENT]
    whole = whole_hosts((fault.agent for fault in silent), hosts)
    return {host: [fault for fault in silent if hosts.get(fault.agent) == host] for host in whole}


def silence(host: str, faults: Sequence[Fault]) -> str:
    """Describes the silence of a host: `host n17: 8 of 8 agents silent: no answer within 2 s`.

    `faults` are those of all its agents.
    """
    ((message, _),) = Counter(fault.message for fault in faults).most_common(1)
    return f"host {host}: {len(faults)} of {len(faults)} agents silent: {message}"
