"""Table of the top-level commands with one line of help each; imports a command only when it is called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

import click


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of a command, and its line in the help of `kvctl`."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Entry] = {
    "status": Entry("kvctl.commands.status", "status", "Health, ranks, rooms, rings, rate and latency on one screen."),
    "agents": Entry("kvctl.commands.agents", "agents", "Agents: round trip time, version, uptime, stale sockets."),
    "rooms": Entry("kvctl.commands.rooms", "rooms", "Active and finished rooms; one room on all its ranks."),
    "staging": Entry("kvctl.commands.staging", "staging", "Staging rings and buffers; a map of each ring."),
    "layers": Entry("kvctl.commands.layers", "layers", "Transfer times by layer group and stage."),
    "peers": Entry("kvctl.commands.peers", "peers", "Connections between agents: state, clock, errors."),
    "metrics": Entry("kvctl.commands.metrics", "metrics", "Counters, gauges and histograms; Prometheus text."),
    "events": Entry("kvctl.commands.events", "events", "Events of all agents, merged by time."),
    "bootstrap": Entry("kvctl.commands.bootstrap", "bootstrap", "Registered, missing and connected ranks."),
    "stacks": Entry("kvctl.commands.stacks", "stacks", "Stack of every thread of the agents."),
    "health": Entry("kvctl.commands.health", "health", "Findings, most severe first; health codes and mutes."),
    "check": Entry("kvctl.commands.check", "check", "One line and exit status 0 to 3, for monitoring."),
    "doctor": Entry("kvctl.commands.doctor", "doctor", "Ranked findings with the next command; host checks."),
    "wait": Entry("kvctl.commands.wait", "wait", "Wait until the fleet is ready or drained, or a room is done."),
    "drain": Entry("kvctl.commands.drain", "drain", "Make agents accept no new rooms; rooms in flight finish."),
    "resume": Entry("kvctl.commands.drain", "resume", "Make drained agents accept new rooms again."),
    "config": Entry("kvctl.commands.config", "config", "Configuration of the agents, with the origin of each value."),
    "context": Entry("kvctl.commands.context", "context", "Named fleets: agents, keys and labels."),
    "key": Entry("kvctl.commands.key", "key", "Create key pairs for fleets and for operators."),
    "top": Entry("kvctl.commands.top", "top", "Live view of the fleet in a terminal; snapshots to files."),
    "tune": Entry("kvctl.commands.tune", "tune", "Recommend settings for a machine and a workload."),
    "bench": Entry("kvctl.commands.bench", "bench", "Start a fleet here, transfer KV, verify every byte."),
    "demo": Entry("kvctl.commands.demo", "demo", "Start a small fleet with traffic and, on request, faults."),
    "record": Entry("kvctl.commands.record", "record", "Record the fleet to a file, for --from and replay."),
    "debug": Entry("kvctl.commands.debug", "debug", "Save the state of a fleet in one file for a bug report."),
    "replay": Entry("kvctl.commands.replay", "replay", "Replay a recording; report the first broken invariant."),
    "completion": Entry("kvctl.commands.completion", "completion", "Print a shell's completion script."),
    "help": Entry("kvctl.commands.help", "help_command", "Help for a command, its columns, or the global options."),
    "version": Entry("kvctl.commands.version", "version", "Versions of this tool and of the agents."),
}


SECTIONS: dict[str, tuple[str, ...]] = {
    "Inspect": (
        "status",
        "top",
        "agents",
        "rooms",
        "staging",
        "layers",
        "peers",
        "metrics",
        "events",
        "bootstrap",
        "stacks",
    ),
    "Diagnose": ("doctor", "health", "check", "wait"),
    "Operate": ("drain", "resume"),
    "Try and measure": ("demo", "bench", "tune"),
    "Record": ("record", "replay", "debug"),
    "Set up": ("config", "context", "key", "completion", "help", "version"),
}
"""Sections of the help of `kvctl`, by purpose."""


def load(name: str) -> click.Command | None:
    """Imports a command; returns None if there is none with this name."""
    entry = COMMANDS.get(name)
    if entry is None:
        return None
    command = cast(click.Command, getattr(importlib.import_module(entry.module), entry.attribute))
    command.short_help = entry.help
    return command
