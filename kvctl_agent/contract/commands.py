"""Every admin command, once: the server registers exactly these and the CLI checks itself against them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from kvctl_agent.contract.states import STATE_LABELS


class Level(IntEnum):
    """What a client may do; each level includes the ones below it."""

    READ = 1
    OPERATE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of an admin command.

    `int` is from 0 to 2**63 - 1; `room` is a decimal string of an unsigned 64-bit number, which handlers get as an
    int; `choices` limits a `str`. JSON null means that the argument is not given.
    """

    name: str
    type: Literal["int", "str", "room", "bool", "str-list"]
    help: str
    required: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """One admin command."""

    name: str
    help: str
    level: Level = Level.READ
    args: tuple[Arg, ...] = ()


_LIMIT = Arg("limit", "int", "at most this many rows (default 1000)")
_STATE = Arg("state", "str", "only rooms in this state", choices=STATE_LABELS)

COMMANDS: tuple[Command, ...] = (
    Command("hello", "who answers, which protocol range, what this client may do"),
    Command("commands", "every command with its arguments, level and help"),
    Command("config", "every configuration value with its origin"),
    Command("status", "rank, transport, rooms by state, rates, ring use"),
    Command("rooms", "active rooms", args=(_STATE, _LIMIT)),
    Command(
        "room",
        "one room with its timeline, active or finished lately",
        args=(Arg("room", "room", "room number", required=True),),
    ),
    Command("slow", "slowest finished rooms", args=(_LIMIT,)),
    Command("history", "latest finished rooms", args=(_LIMIT,)),
    Command("failed", "latest failed rooms, kept apart from the others, and how many are gone", args=(_LIMIT,)),
    Command("staging", "ring, watermark, live allocations, gated parts, staging buffers"),
    Command("layers", "stage times per layer group", args=(Arg("room", "room", "only this room"),)),
    Command("peers", "connection, clock, watermark and errors per peer"),
    Command(
        "events",
        "the flight recorder",
        args=(Arg("since", "int", "first sequence number wanted"), _LIMIT),
    ),
    Command(
        "inputs",
        "what the machines were told, to be run again; with it the addresses of our memory, hence the level",
        Level.OPERATE,
        args=(
            Arg("since", "int", "first piece wanted; none: the oldest"),
            Arg("until", "int", "number after the last piece wanted; none: up to now"),
        ),
    ),
    Command("metrics", "counters, gauges and histograms with help and unit"),
    Command("stacks", "Python stacks of all threads"),
    Command("bootstrap", "what the registries of prefill instances say: who has registered, who is missing"),
    Command(
        "abort",
        "fail a room, here and on its other ranks",
        Level.OPERATE,
        args=(
            Arg("room", "room", "room number", required=True),
            Arg("reason", "str", "goes into the room's failure on every rank"),
        ),
    ),
    Command(
        "release",
        "decode: free one allocation of the ring, or what a failed room holds for writers that are gone",
        Level.OPERATE,
        args=(
            Arg("serial", "int", "the allocation's number, see staging"),
            Arg("room", "room", "instead: a failed room, with its pages"),
            Arg("force", "bool", "also where nothing proves that its writer has ended: you have made sure"),
        ),
    ),
    Command("drain", "take no new rooms; those in flight go on to their end", Level.OPERATE),
    Command("resume", "take new rooms again", Level.OPERATE),
    Command(
        "probe",
        "prefill: measure the connection to a peer between parts; answers while it runs, ask again for the result",
        Level.OPERATE,
        args=(
            Arg("peer", "str", "name of the decode rank; none: the first one connected"),
            Arg("bytes", "int", "size of the largest write, 1 to 64 MiB (default 16 MiB)"),
            Arg("busy", "bool", "also while rooms are open: their parts wait for a fraction of a second"),
        ),
    ),
    Command(
        "set",
        "change a configuration value that can change while running, until the agent ends",
        Level.ADMIN,
        args=(
            Arg("key", "str", "its name, see config", required=True),
            Arg("value", "str", "as an environment variable would say it", required=True),
        ),
    ),
)

COMMANDS_BY_NAME: dict[str, Command] = {command.name: command for command in COMMANDS}
