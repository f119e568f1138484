"""Table of the top-level commands with one line of help each; `load` imports a command when it is called."""

from __future__ import annotations

import importlib
from typing import cast

import click

SECTIONS: dict[str, dict[str, str]] = {
    "Inspect": {
        "status": "Health, ranks, rooms, rings, rate and latency on one screen.",
        "top": "Live view of the fleet in a terminal; snapshots to files.",
        "hosts": "Hosts: agents, instances, rate, clock, health.",
        "agents": "Agents: round trip time, version, uptime, stale sockets.",
        "rooms": "Active and finished rooms; one room on all its ranks.",
        "staging": "Staging rings and buffers; a map of each ring.",
        "nics": "Network devices of the hosts: rate, faults, ranks that use them.",
        "layers": "Transfer times by layer group and stage.",
        "peers": "Connections between agents: state, clock, errors.",
        "metrics": "Counters, gauges and histograms; Prometheus text.",
        "events": "Events of all agents, merged by time.",
        "bootstrap": "Registered, missing and connected ranks.",
        "stacks": "Stack of every thread of the agents.",
    },
    "Diagnose": {
        "doctor": "Ranked findings with the next command; host checks.",
        "health": "Findings, most severe first; health codes.",
        "logs": "Known failures in the logs of engines, with their causes.",
        "check": "One line and exit status 0 to 3, for monitoring.",
        "mcp": "Serve the commands that only read to an assistant.",
        "wait": "Wait until the fleet is ready or drained.",
    },
    "Operate": {
        "drain": "Make agents accept no new rooms; rooms in flight finish.",
        "resume": "Make drained agents accept new rooms again.",
    },
    "Try and measure": {
        "demo": "Start a small fleet with traffic and, on request, faults.",
        "bench": "Start a fleet here, transfer KV, verify every byte.",
        "tune": "Recommend settings for a machine and a workload.",
        "preflight": "Move memory between hosts before a model loads.",
    },
    "Record": {
        "record": "Record the fleet to a file, for --from and for reports.",
        "debug": "Save a bundle: a recording for a bug report.",
    },
    "Set up": {
        "config": "Configuration of the agents, with the origin of each value.",
        "context": "Named fleets: agents, keys and labels.",
        "key": "Create key pairs for fleets and for operators.",
        "completion": "Print a shell's completion script.",
        "help": "Help for a command, its columns, or the global options.",
        "version": "Versions of this tool and of the agents.",
    },
}
"""Help of each command, by name, in the sections of the help of `kvctl`."""

COMMANDS: dict[str, str] = {name: text for section in SECTIONS.values() for name, text in section.items()}
"""Help of each command, by name."""

# Commands that are not `NAME` in the module `NAME`: module and attribute.
_LOCATIONS = {"resume": ("drain", "resume"), "help": ("help", "help_command"), "mcp": ("mcp", "mcp_command")}


def load(name: str) -> click.Command | None:
    """Imports a top-level command; returns None if no command has this name."""
    if name not in COMMANDS:
        return None
    module, attribute = _LOCATIONS.get(name, (name, name))
    command = cast(click.Command, getattr(importlib.import_module(f"kvctl.commands.{module}"), attribute))
    command.short_help = COMMANDS[name]
    return command
