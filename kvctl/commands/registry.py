"""Every top-level command with its one line of help, without importing any of them: `--help` has to be quick."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

import click


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives and what it does."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Entry] = {
    "status": Entry("kvctl.commands.status", "status", "Health, ranks, rooms, ring, rate and latency on one screen."),
    "agents": Entry("kvctl.commands.agents", "agents", "Agents: round trip, version, uptime, stale sockets."),
    "rooms": Entry("kvctl.commands.rooms", "rooms", "Active and finished rooms; one room on all its ranks."),
    "staging": Entry("kvctl.commands.staging", "staging", "Staging rings and buffers; a map of each ring."),
    "layers": Entry("kvctl.commands.layers", "layers", "Transfer times by layer group and stage."),
    "peers": Entry("kvctl.commands.peers", "peers", "Connections between agents: state, clock, errors."),
    "metrics": Entry("kvctl.commands.metrics", "metrics", "Counters, gauges and histograms; Prometheus text."),
    "events": Entry("kvctl.commands.events", "events", "Events of all agents, merged by time."),
    "bootstrap": Entry("kvctl.commands.bootstrap", "bootstrap", "Ranks that are registered, missing or connected."),
    "stacks": Entry("kvctl.commands.stacks", "stacks", "Stack of every thread of the agents."),
    "health": Entry("kvctl.commands.health", "health", "Findings, the worst first; health codes and mutes."),
    "check": Entry("kvctl.commands.check", "check", "One line and exit status 0 to 3, for monitoring."),
    "doctor": Entry("kvctl.commands.doctor", "doctor", "Ranked findings with the next command; host checks."),
    "wait": Entry("kvctl.commands.wait", "wait", "Wait until the fleet is ready or drained, or a room is done."),
    "drain": Entry("kvctl.commands.drain", "drain", "Make agents accept no new rooms; rooms in flight finish."),
    "resume": Entry("kvctl.commands.drain", "resume", "Make drained agents accept new rooms again."),
    "config": Entry("kvctl.commands.config", "config", "Configuration of the agents, with the origin of each value."),
    "context": Entry("kvctl.commands.context", "context", "Named fleets: agents, keys and labels."),
    "key": Entry("kvctl.commands.key", "key", "Make key pairs for fleets and for operators."),
    "top": Entry("kvctl.commands.top", "top", "Live view of the fleet in a terminal; snapshots in files."),
    "tune": Entry("kvctl.commands.tune", "tune", "Recommend settings for a machine and a workload."),
    "bench": Entry("kvctl.commands.bench", "bench", "Start a fleet here, move real KV, verify every byte."),
    "demo": Entry("kvctl.commands.demo", "demo", "Start a small fleet with traffic and, if wanted, faults."),
    "record": Entry("kvctl.commands.record", "record", "Save the fleet to a file, for --from and replay."),
    "debug": Entry("kvctl.commands.debug", "debug", "Save everything about a fleet in one file, to send."),
    "replay": Entry("kvctl.commands.replay", "replay", "Run a recording again; name the first broken invariant."),
    "completion": Entry("kvctl.commands.completion", "completion", "Print the completion script of a shell."),
    "help": Entry("kvctl.commands.help", "help_command", "Help for a command, or the global options."),
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
"""The commands as the help lists them; what a person wants to do, not how it is built."""


def load(name: str) -> click.Command | None:
    """Imports one command, or None when there is none of that name."""
    entry = COMMANDS.get(name)
    if entry is None:
        return None
    command = cast(click.Command, getattr(importlib.import_module(entry.module), entry.attribute))
    command.short_help = entry.help
    return command
