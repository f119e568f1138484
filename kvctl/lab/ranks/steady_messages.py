"""Commands and messages of a fleet that lives on: rooms come at any time, and nothing is awaited.

A bench leads its ranks through phases; here both sides send whenever they have something to send, over the same
channel. No command of this module is answered: the messages below report what came of it.

A room has a number, used once in a fleet's life, and an index that decides its content, so that a decode rank can
verify it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypedDict, get_args

from kvctl.lab.ranks.bench_messages import Floors, Mismatch, Prepare, Probe, Run, Start, Stop, Verify
from kvctl_agent.contract.snapshots import Failure

# ---------------------------------------------------------------------------------------------------------------------
# fleet → rank


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """Decode: receive a room from a prefill instance into random pages."""

    do: ClassVar[str] = "open"
    room: int
    index: int
    tokens: int
    prefix_tokens: int
    instance: int


@dataclass(frozen=True, slots=True)
class SendRoom:
    """Prefill: compute a room and send it.

    Args:
        chunks: forwards that its pages are computed in.
        groups: layer groups that each forward is sent in; 1: pages whole.
        gap_s: time between two forwards.
        at_once: compute when told, whether or not the decode side has opened the room.
        hangs: the last forward never ends, so that the room waits for it until somebody gives up.
    """

    do: ClassVar[str] = "send"
    room: int
    index: int
    tokens: int
    prefix_tokens: int
    chunks: int = 1
    groups: int = 1
    gap_s: float = 0.0
    at_once: bool = False
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Give a room up; nothing where it is over."""

    do: ClassVar[str] = "abort"
    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetFault:
    """Put a fault of `contract.faults` in force for so long; `clear` ends all."""

    do: ClassVar[str] = "fault"
    spec: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Say what this rank holds: `Usage`.

    Args:
        token: comes back with it.
        sweep: look through all free pages for bytes that nobody may have written.
    """

    do: ClassVar[str] = "tell"
    token: int
    sweep: bool = False


Command = Start | Floors | Probe | Prepare | Run | Verify | OpenRoom | SendRoom | Abort | SetFault | Tell | Stop
COMMANDS: dict[str, type[Command]] = {kind.do: kind for kind in get_args(Command)}


# ---------------------------------------------------------------------------------------------------------------------
# rank → fleet


class Met(TypedDict):
    """A prefill rank is registered; a decode rank has met all ranks of these instances."""

    instances: list[int]
    incarnation: str


class Ended(TypedDict):
    """A room has ended here; monotonic nanoseconds, comparable between the processes of one machine."""

    room: int
    state: str  # a label of RoomState
    cause: Failure | None
    at_ns: int
    verified_bytes: int  # 0 where nothing was compared
    mismatch: Mismatch | None


class Released(TypedDict):
    """A room's pages are free here; `mismatch` where a page was not as it had been left."""

    room: int
    at_ns: int


class Usage(TypedDict):
    """What a rank holds.

    `rooms` are handles that have not ended or are not released, `records` what the machine keeps of rooms; `strays`
    what was found in pages that lay free since the last answer.
    """

    token: int
    at_ns: int
    rss_bytes: int
    fds: int
    threads: int
    rooms: int
    records: int
    ring_bytes: int
    ring_used_bytes: int
    quarantined_bytes: int
    buffers_in_use: int
    strays: list[Mismatch]


class FaultsNow(TypedDict):
    """Answer to `SetFault`: what is in force, how often each struck, or why the fault was refused."""

    active: list[str]
    counts: dict[str, int]
    error: str | None
