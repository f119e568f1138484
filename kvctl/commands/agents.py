"""`kvctl agents`: lists agents with round trip and clock offset, and the stale sockets of killed agents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvctl.client.discovery import is_url, memory
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import live_only, run
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render import palette
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width
from kvctl_agent.contract import sockets
from kvctl_agent.contract.admin import socket_dir

_CLOCK_ROUNDS = 3
_LOCK_TIMEOUT_S = 5.0

AGENTS = View(
    "agents",
    (
        Column("agent"),
        Column(
            "state",
            styles=palette.AGENT_STATES,
            help="ok, draining, stale (its process has ended), vanished, or an error.",
        ),
        Column("role", styles=palette.ROLES),
        Column("host", width=Width.NORMAL),
        Column("rtt", kind=Kind.DURATION),
        Column("uptime", kind=Kind.DURATION),
        Column("vanished", kind=Kind.DURATION, width=Width.WIDE, help="Time since its source last named the agent."),
        Column("version"),
        Column("pid", kind=Kind.ID),
        Column("incarnation", width=Width.NORMAL),
        Column("clock_offset", kind=Kind.DURATION, width=Width.WIDE),
        Column("clock_error", kind=Kind.DURATION, width=Width.WIDE),
        Column("protocol", kind=Kind.LIST, width=Width.WIDE),
        Column("level", width=Width.WIDE, help="Permission of this client: read, operate or admin."),
        Column("capabilities", kind=Kind.LIST, width=Width.WIDE, help="Features of its build and configuration."),
        Column("endpoint", width=Width.WIDE),
    ),
    sort=("agent",),
    empty="no agents",
)


@click.command(
    cls=KvctlCommand,
    view=AGENTS,
    examples=[
        ("Agents of this machine", "kvctl agents"),
        ("Remove the sockets of killed agents, and forget those that vanished", "kvctl agents --prune"),
        ("Agents on other machines", "kvctl agents -e tcp://node-1:7000 --key ops --server-key fleet.pub"),
    ],
)
@click.option("--prune", is_flag=True, help="First remove the sockets of ended agents, and forget vanished ones.")
@pass_settings
def agents(settings: Settings, prune: bool) -> None:
    """List the agents: state, round trip, uptime, version, incarnation, clock offset and its error bound.

    An agent that was killed leaves its socket, which is listed as stale; the exit code is then 7. --prune removes such
    sockets, and so does the next agent that starts on this machine.

    An agent that a source of the context or of -e has named within the last day, and names no more, is listed as
    vanished with its last endpoint; that is no error, because fleets shrink. --prune also forgets those agents.
    """
    if prune:
        live_only(settings)
        removed = _prune(socket_dir())
        forgotten = sum(memory.forget(each) for each in settings.endpoints if is_url(each))
        notes = [f"removed the sockets of {', '.join(removed)}"] if removed else []
        notes += [f"forgot {forgotten} vanished agent{'s' * (forgotten != 1)}"] if forgotten else []
        Output(settings).note("; ".join(notes) or "no stale sockets")
    run(settings, AGENTS, (), _read, clock_rounds=_CLOCK_ROUNDS)


def _prune(directory: Path) -> list[str]:
    """Removes the stale sockets in `directory`, and returns the names of their agents.

    Returns no names if the directory does not exist.

    Raises:
        CliError: the directory cannot be opened, or another process keeps it locked.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CliError(f"cannot open {directory}: {error.strerror}", ExitCode.NOT_PERMITTED) from None
    try:
        with sockets.directory_lock(descriptor, _LOCK_TIMEOUT_S):
            return sockets.prune(directory)
    except TimeoutError:
        raise CliError(
            f"{directory} has been locked by another process for {_LOCK_TIMEOUT_S:g} s: find it with fuser {directory}",
            ExitCode.TIMEOUT,
        ) from None
    finally:
        os.close(descriptor)


def _read(survey: Survey) -> Report:
    rows: list[dict[str, Any]] = [
        {
            **agent.hello,
            "agent": agent.name,
            "host": agent.host or None,
            "state": "draining" if agent.hello.get("draining") else "ok",
            "rtt_ns": agent.rtt_ns,
            "clock_offset_ns": agent.clock.offset_ns,
            "clock_error_ns": agent.clock.error_ns,
            "endpoint": agent.endpoint.address,
        }
        for agent in survey.agents
    ]
    answered = len(rows)
    stale = {endpoint.name: endpoint.address for endpoint in survey.discovery.stale}
    failed = {fault.agent for fault in survey.faults}
    rows += [
        {"agent": name, "host": survey.host_of(name) or None, "state": "stale", "endpoint": address}
        for name, address in stale.items()
    ]
    rows += [
        {"agent": fault.agent, "host": survey.host_of(fault.agent) or None, "state": fault.code}
        for fault in survey.faults
        if fault.agent and fault.agent not in stale
    ]
    rows += [
        {
            "agent": each.endpoint.name,
            "host": each.host or None,
            "state": "vanished",
            "vanished_ns": survey.at_ns - each.seen_ns,
            "endpoint": each.endpoint.address,
        }
        for each in survey.discovery.vanished
    ]
    text = "its process has ended and left its socket: kvctl agents --prune removes it"
    faults = [*survey.faults, *(Fault(name, FaultCode.UNREACHABLE, text) for name in sorted(stale.keys() - failed))]
    return Report(AGENTS, rows, answered, faults, notes=survey.vanished())
