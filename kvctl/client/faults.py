"""What can go wrong with one agent while others answer, and which exit code a set of faults amounts to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import ErrorCode


class FaultCode(StrEnum):
    """Faults the client finds; what an agent refuses carries `contract.admin.ErrorCode` instead."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    STOPPED = "stopped"  # its process is: SIGSTOP, job control, a debugger
    PROTOCOL = ErrorCode.PROTOCOL.value
    NOT_PERMITTED = ErrorCode.NOT_PERMITTED.value
    NOT_CAPTURED = "not-captured"  # by a file that stands in for the fleet


@dataclass(frozen=True, slots=True)
class Fault:
    """One agent that could not do its share; the shape of one entry of `errors` in JSON."""

    agent: str
    code: str
    message: str


SILENT = frozenset({FaultCode.TIMEOUT.value, FaultCode.STOPPED.value, FaultCode.UNREACHABLE.value})
"""Codes of agents that do not answer although somebody knows of them."""


def stopped(agent: str, pid: int) -> Fault:
    """What is wrong comes before the semicolon, what to do about it behind."""
    return Fault(agent, FaultCode.STOPPED, f"its process {pid} is stopped; `kill -CONT {pid}` lets it go on")


_EXITS: dict[str, ExitCode] = {
    FaultCode.UNREACHABLE: ExitCode.NO_AGENT,
    FaultCode.TIMEOUT: ExitCode.TIMEOUT,
    FaultCode.STOPPED: ExitCode.TIMEOUT,
    ErrorCode.NOT_PERMITTED: ExitCode.NOT_PERMITTED,
    ErrorCode.PROTOCOL: ExitCode.PROTOCOL,
    # An agent that lacks a command is of another version than this tool.
    ErrorCode.UNKNOWN_COMMAND: ExitCode.PROTOCOL,
}
# What most explains that nobody answered comes first.
_RANKING = (ExitCode.PROTOCOL, ExitCode.NOT_PERMITTED, ExitCode.TIMEOUT, ExitCode.FAILED, ExitCode.NO_AGENT)


def exit_code(answered: int, faults: Iterable[Fault]) -> ExitCode:
    """Exit code of a command that `answered` agents answered and `faults` spoilt."""
    codes = {_EXITS.get(fault.code, ExitCode.FAILED) for fault in faults}
    if not codes:
        return ExitCode.OK if answered else ExitCode.NO_AGENT
    if answered:
        return ExitCode.PARTIAL
    return next(code for code in _RANKING if code in codes)


def lines(faults: Iterable[Fault]) -> list[str]:
    """`decode-0, decode-1: no answer within 2 s`: a line for each message, since a whole fleet often has the same."""
    agents: dict[str, list[str]] = {}
    for fault in faults:
        agents.setdefault(fault.message, []).append(fault.agent)
    return [": ".join(filter(None, (", ".join(names), message))) for message, names in agents.items()]
