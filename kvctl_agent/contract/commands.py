"""Declares the admin commands, all of which the agent's admin server must handle; tests check the CLI against them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from kvctl_agent.contract.states import STATE_LABELS


class Level(IntEnum):
    """Permission of an admin client; each level includes the ones below it."""

    READ = 1
    OPERATE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """Name of the level in client files and output: read, operate or admin."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of an admin command.

    Type `int` ranges from 0 to 2**63 - 1. Type `room` is an unsigned 64-bit number as a decimal string, which handlers
    receive as an int. `choices` restricts a `str`. JSON null means that the argument is absent.
    """

    name: str
    type: Literal["int", "str", "room", "bool", "str-list"]
    help: str
    required: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """One admin command: its name, help, required level and arguments."""

    name: str
    help: str
    level: Level = Level.READ
    args: tuple[Arg, ...] = ()


_LIMIT = Arg("limit", "int", "maximum number of rows (default 1000)")
_STATE = Arg("state", "str", "only rooms in this state", choices=STATE_LABELS)

COMMANDS: tuple[Command, ...] = (
    Command("hello", "the agent's name and role, its admin protocol versions, and this client's level"),
    Command("commands", "every command with its arguments, level and help"),
    Command("config", "every configuration value with its source"),
    Command("status", "rank, transport, rooms by state, transfer rates, ring use"),
    Command("rooms", "active rooms", args=(_STATE, _LIMIT)),
    Command(
        "room",
        "one active or recently finished room, with its timeline",
        args=(Arg("room", "room", "room number", required=True),),
    ),
    Command("slow", "slowest finished rooms", args=(_LIMIT,)),
    Command("history", "latest finished rooms", args=(_LIMIT,)),
    Command("failed", "latest failed rooms, stored separately, and how many were dropped", args=(_LIMIT,)),
    Command("staging", "ring, watermark, live allocations, gated parts, staging buffers"),
    Command("layers", "stage times per layer group"),
    Command("peers", "connection, clock, watermark and errors per peer"),
    Command(
        "nics",
        "network devices of the host with their counters, and those that this rank uses",
        args=(Arg("fresh", "bool", "counters are at most 50 ms old, instead of a second"),),
    ),
    Command(
        "cost",
        "prefill: predicted transfer time of a prompt to each decode rank; decode: ring use and rooms",
        args=(Arg("tokens", "int", "length of the prompt (default 1024)"),),
    ),
    Command(
        "events",
        "the flight recorder",
        args=(Arg("since", "int", "first sequence number to return"), _LIMIT),
    ),
    Command("metrics", "counters, gauges and histograms with help and unit"),
    Command("health", "what health codes read, without rows that are plainly in order; for large fleets"),
    Command("stacks", "Python stacks of all threads"),
    Command("bootstrap", "registered and missing ranks of each prefill instance, as its registry reports them"),
    Command(
        "abort",
        "fail a room on this rank and on its other ranks",
        Level.OPERATE,
        args=(
            Arg("room", "room", "room number", required=True),
            Arg("reason", "str", "text of the room's failure on every rank"),
        ),
    ),
    Command(
        "release",
        "decode: free one ring allocation, or the memory that a failed room holds for writers that are gone",
        Level.OPERATE,
        args=(
            Arg("serial", "int", "serial number of the allocation, as shown by staging"),
            Arg("room", "room", "number of a failed room, instead of serial: frees its allocations and pages"),
            Arg("force", "bool", "free also without proof that the writer has ended; the operator has made sure of it"),
        ),
    ),
    Command(
        "forget",
        "forget a lost peer; on a decode rank with its prefill instance, unless the agent was configured with that",
        Level.OPERATE,
        args=(
            Arg("peer", "str", "name of the peer, as shown by peers", required=True),
            Arg("force", "bool", "free also memory that the peer may still write; the operator vouches for its end"),
        ),
    ),
    Command("drain", "accept no new rooms; active rooms run to their end", Level.OPERATE),
    Command("resume", "accept new rooms again", Level.OPERATE),
    Command(
        "probe",
        "prefill: measure the connection to a peer between parts; replies at once, and the same request later returns "
        "the result",
        Level.OPERATE,
        args=(
            Arg("peer", "str", "name of the decode rank (default: the first one connected)"),
            Arg("bytes", "int", "size of the largest write, 1 to 64 MiB (default 16 MiB)"),
            Arg(
                "busy", "bool", "measure also while rooms are open, which delays their parts by a fraction of a second"
            ),
        ),
    ),
    Command(
        "set",
        "change a configuration value that can change at run time; the change lasts until the agent stops",
        Level.ADMIN,
        args=(
            Arg("key", "str", "configuration key, as shown by config", required=True),
            Arg("value", "str", "new value, in the syntax of an environment variable", required=True),
        ),
    ),
)

COMMANDS_BY_NAME: dict[str, Command] = {command.name: command for command in COMMANDS}

REGISTRY_COMMANDS: tuple[Command, ...] = (
    Command(
        "agents",
        "the prefill ranks of the instance and the decode ranks that look it up, with their admin endpoints and the "
        "time since each was heard",
    ),
)
"""Commands that the socket of a bootstrap registry answers, on the same wire as an admin socket."""

REGISTRY_COMMANDS_BY_NAME: dict[str, Command] = {command.name: command for command in REGISTRY_COMMANDS}
