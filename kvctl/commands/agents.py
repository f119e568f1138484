"""`kvctl agents`: lists agents with round trip and clock offset, and the stale sockets of killed agents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.queries import live_only, run
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.health.halted_agents import halt
from kvctl.render import palette
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width
from kvctl_agent.contract.admin import socket_dir
from kvctl_agent.host import sockets

_CLOCK_ROUNDS = 3
_LOCK_TIMEOUT_S = 5.0

AGENTS = View(
    "agents",
    (
        Column("agent"),
        Column(
            "state",
            help="ok, draining, stopped (its process is), starved (its control loop does not run), ended (its process "
            "has, and its observer keeps what it left), stale (it has ended and left only its socket), or an error.",
            styles=palette.AGENT_STATES,
        ),
        Column("role", styles=palette.ROLES),
        Column("host", width=Width.NORMAL),
        Column("rtt", Kind.DURATION),
        Column("uptime", Kind.DURATION),
        Column("ended_age", Kind.DURATION, Width.WIDE, "Time since its process ended."),
        Column("version"),
        Column("pid", Kind.ID),
        Column("incarnation", width=Width.NORMAL),
        Column("clock_offset", Kind.DURATION, Width.WIDE),
        Column("clock_error", Kind.DURATION, Width.WIDE),
        Column("protocol", Kind.LIST, Width.WIDE),
        Column(
            "observer", width=Width.WIDE, help="What answers for it: a process of its own, or a thread of the worker."
        ),
        Column("level", width=Width.WIDE, help="Permission of this client: read, operate or admin."),
        Column("capabilities", Kind.LIST, Width.WIDE, "Features of its build and configuration."),
        Column("endpoint", width=Width.WIDE),
    ),
    sort=("agent",),
    empty="no agents",
)


@command(
    view=AGENTS,
    examples=[
        ("Agents of this machine", "kvctl agents"),
        ("Remove what ended agents left", "kvctl agents --prune"),
        ("Agents on other machines", "kvctl agents -e tcp://node-1:7000 --key ops --server-key fleet.pub"),
    ],
)
@click.option("--prune", is_flag=True, help="First remove what ended agents left.")
def agents(settings: Settings, prune: bool) -> None:
    """List the agents: state, round trip, uptime, version, incarnation, clock offset and its error bound.

    Of an agent that was killed, its observer keeps what it left for an hour (black_box_s of its configuration): it is
    listed as ended. Where no observer process could be started, it leaves its socket, which is listed as stale; the
    exit code is then 7. --prune removes both; the next agent that starts on this machine removes such sockets, too.
    """
    if prune:
        live_only(settings)
        removed, ended = _prune(socket_dir()), sockets.prune_black_boxes(socket_dir())
        notes = [f"removed the sockets of {', '.join(removed)}"] if removed else []
        notes += [f"removed the black boxes of {', '.join(ended)}, listed for another second"] if ended else []
        Output(settings).note("; ".join(notes) or "no ended agents")
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


def _state(agent: AgentAnswer) -> str:
    if (halted := halt(agent.hello, agent.name)) is not None:
        return halted.kind.value
    return "draining" if agent.hello.get("draining") else "ok"


def _read(survey: Survey) -> Report:
    rows: list[dict[str, Any]] = [
        {
            **agent.hello,
            "agent": agent.name,
            "host": agent.host or None,
            "state": _state(agent),
            "rtt_ns": agent.rtt_ns,
            "clock_offset_ns": agent.clock.offset_ns,
            "clock_error_ns": agent.clock.error_ns,
            "endpoint": agent.endpoint.shown_address,
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
    text = "its process has ended and left its socket: kvctl agents --prune removes it"
    faults = [*survey.faults, *(Fault(name, FaultCode.UNREACHABLE, text) for name in sorted(stale.keys() - failed))]
    return Report(AGENTS, rows, answered, faults)
