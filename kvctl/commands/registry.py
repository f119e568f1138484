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
    "status": Entry("kvctl.commands.status", "status", "One screen: health, ranks, rooms, ring, rate, latency."),
    "agents": Entry("kvctl.commands.agents", "agents", "Who is there: round trip, version, uptime, stale sockets."),
    "rooms": Entry("kvctl.commands.rooms", "rooms", "Active and finished rooms; one room on one timeline."),
    "staging": Entry("kvctl.commands.staging", "staging", "Staging rings and buffers; a map of each ring."),
    "layers": Entry("kvctl.commands.layers", "layers", "Where the time goes, by layer group and stage."),
    "peers": Entry("kvctl.commands.peers", "peers", "Connections between agents: state, clock, errors."),
    "metrics": Entry("kvctl.commands.metrics", "metrics", "Counters, gauges and histograms; also for Prometheus."),
    "events": Entry("kvctl.commands.events", "events", "The flight recorders of all agents, merged by time."),
    "bootstrap": Entry(
        "kvctl.commands.bootstrap", "bootstrap", "Who has registered, who is missing, who is connected."
    ),
    "stacks": Entry("kvctl.commands.stacks", "stacks", "What every thread of the agents does right now."),
    "health": Entry("kvctl.commands.health", "health", "What is wrong, worst first; codes, their pages, mutes."),
    "check": Entry("kvctl.commands.check", "check", "For monitoring: one line, exit status 0, 1, 2 or 3."),
    "doctor": Entry("kvctl.commands.doctor", "doctor", "What is wrong, ranked, and what to type next; host checks."),
    "wait": Entry("kvctl.commands.wait", "wait", "Wait until the fleet is ready or drained, or a room is done."),
    "drain": Entry("kvctl.commands.drain", "drain", "Have agents take no new rooms; those in flight end."),
    "resume": Entry("kvctl.commands.drain", "resume", "Have drained agents take new rooms again."),
    "config": Entry("kvctl.commands.config", "config", "Configuration of the agents and where it comes from."),
    "context": Entry("kvctl.commands.context", "context", "Fleets under names: which agents, keys and labels."),
    "key": Entry("kvctl.commands.key", "key", "Make keys: for a fleet, and for people who ask it from afar."),
    "top": Entry("kvctl.commands.top", "top", "The fleet live on one terminal; a picture of it in a file."),
    "tune": Entry("kvctl.commands.tune", "tune", "Recommend settings for a machine and a workload; --confirm them."),
    "bench": Entry("kvctl.commands.bench", "bench", "Start a fleet here, move real KV, verify every byte."),
    "demo": Entry("kvctl.commands.demo", "demo", "A small fleet under endless traffic, to look at and to harm."),
    "record": Entry("kvctl.commands.record", "record", "Save a fleet in a file: to look at with --from, to replay."),
    "debug": Entry("kvctl.commands.debug", "debug", "Bundle all that is known of a fleet in one file."),
    "replay": Entry("kvctl.commands.replay", "replay", "Run a recording again; name the first broken invariant."),
    "completion": Entry("kvctl.commands.completion", "completion", "Make your shell complete commands, agents, rooms."),
    "version": Entry("kvctl.commands.version", "version", "Versions of this tool and of the agents."),
}


SECTIONS: dict[str, tuple[str, ...]] = {
    "Look": (
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
    "Judge": ("doctor", "health", "check", "wait"),
    "Act": ("drain", "resume"),
    "Try and measure": ("demo", "bench", "tune"),
    "Keep for later": ("record", "replay", "debug"),
    "Set up": ("config", "context", "key", "completion", "version"),
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
