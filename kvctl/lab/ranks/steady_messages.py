"""What a fleet that lives on (`kvctl.lab.demo`) and its ranks (`kvctl.lab.ranks.steady`) say to each other.

A bench leads its ranks through phases; here both sides talk whenever they have something to say. A line down is
`{"do": <command name>, "args": {...}}`, a line up is `News`; nothing is answered, and nobody waits for an answer. End
of file on the channel means that the other side is gone: a rank then closes its agent and exits.

A room has a number, used once in a fleet's life, and an index that decides its content, so that a decode rank can
verify it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict

from kvctl.lab.ranks.bench_messages import Start
from kvctl_agent.contract.snapshots import Failure

# ---------------------------------------------------------------------------------------------------------------------
# fleet → rank


@dataclass(frozen=True, slots=True)
class Serve:
    """First line down: who this rank is. `Met` follows once it can serve, and again when more instances can.

    Args:
        faults: specs of `contract.faults` in force from the first moment: a restart under a clock that was set back.
        verify: compare what lands with what was sent, and watch the free pages.
    """

    do: ClassVar[str] = "serve"
    start: Start
    faults: str = ""
    verify: bool = True


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


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the agent and exit."""

    do: ClassVar[str] = "leave"


Command = Serve | OpenRoom | SendRoom | Abort | SetFault | Tell | Leave
COMMANDS: dict[str, type[Command]] = {
    kind.do: kind for kind in (Serve, OpenRoom, SendRoom, Abort, SetFault, Tell, Leave)
}


# ---------------------------------------------------------------------------------------------------------------------
# rank → fleet


class News(TypedDict):
    """One line up. `progress` carries `contract.rig.Progress`, `fatal` carries `contract.rig.Fatal`."""

    kind: Literal["progress", "met", "ended", "released", "usage", "faults", "left", "fatal"]
    data: dict[str, Any]


class Met(TypedDict):
    """A prefill rank is registered; a decode rank has met all ranks of these instances."""

    instances: list[int]
    incarnation: str


class Mismatch(TypedDict):
    """The first byte of a room, or of a free page, that is not what it must be."""

    room: int
    where: str  # layer, plane, token, head
    expected: str
    found: str
    hint: str


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
    sockets: int
    rooms: int
    records: int
    ring_bytes: int
    ring_used_bytes: int
    quarantined_bytes: int
    buffers_in_use: int
    peers: dict[str, str]  # state by name
    strays: list[Mismatch]
    counters: dict[str, float]  # metric name → sum over its labels


class FaultsNow(TypedDict):
    """Answer to `SetFault`: what is in force, how often each struck, or why the fault was refused."""

    active: list[str]
    counts: dict[str, int]
    error: str | None
