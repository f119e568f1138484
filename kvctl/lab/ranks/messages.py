"""Messages between a parent process and its rank processes.

A rank serves one of two kinds of fleet, chosen by `Start.live`:

- In a batch fleet (`kvctl bench`, `tune`) the parent leads all ranks through phases with one command and one answer per
  rank and phase: Start, Floors, Prepare, Run, Verify, Stop. Within a run the ranks drive the rooms of a batch
  alone; the parent is not involved.
- In a live fleet (`kvctl demo`) rooms are opened one by one at any time: OpenRoom, SendRoom, Abort, SetFault, Tell.
  These commands have no answers; the ranks report Serving, Ended, Released, Usage and FaultState when they occur.

The channel carries lines of JSON. A line down is `{"do": <command name>, "args": {...}}`; a line up is a `Message`. End
of file means that the other side is gone; a rank then closes its agent and exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, get_args

from kvctl.lab.ranks.plan import PlannedShape
from kvctl.lab.ranks.request import FloorKind, Role, Sizes
from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.snapshots import Failure

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line: a run of 100,000 rooms fits."""

FLEET_PREFIX = "kvctl-bench-"
"""First part of the name of a fleet's temporary directory."""


class LineTooLong(ValueError):
    """The other side sent a line longer than `MAX_LINE_BYTES`."""


class LineBuffer:
    """Splits a byte stream into lines of limited length."""

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds bytes and returns the lines that they complete, without line ends.

        Raises:
            LineTooLong: the limit was exceeded without a line end.
        """
        searched = len(self._rest)
        self._rest += data
        lines: list[bytes] = []
        start = 0
        while (end := self._rest.find(b"\n", max(start, searched))) >= 0:
            lines.append(bytes(self._rest[start:end]))
            start = end + 1
        del self._rest[:start]
        if len(self._rest) > self._limit_bytes or any(len(line) > self._limit_bytes for line in lines):
            raise LineTooLong(f"a line of more than {self._limit_bytes} bytes")
        return lines


# ---- parent → rank, both kinds of fleet -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """First command: the rank's identity, shape and pool.

    Args:
        instance: prefill instance; -1 for a decode rank.
        prefill: sizes of all prefill instances.
        bootstraps: registry endpoints of the prefill instances.
        timeout_s: time to wait for the peers.
        faulty: build the agent with fault injection.
        device: GPU number, or HOST.
        compute: one of `request.COMPUTES`.
        live: rooms are opened one by one. Such a rank does not answer Start; it sends `Serving` once it can serve, and
            again whenever the set of instances changes.
        faults: specs in force from the first moment; live ranks only.
        verify: compare received rooms and watch free pages; live ranks only.
    """

    do: ClassVar[str] = "start"
    name: str
    fleet_dir: str
    role: Role
    instance: int
    unique: int
    prefill: tuple[Sizes, ...]
    bootstraps: tuple[str, ...]
    decode: Sizes
    shape: PlannedShape
    page_size: int
    page_order: str
    pool_pages: int
    state_slots: dict[str, int]
    aux_slots: int
    seed: int
    config: dict[str, str | int | float | bool] = field(default_factory=dict)
    timeout_s: float = 60.0
    faulty: bool = False
    device: int = HOST
    compute: str = "sleep"
    live: bool = False
    faults: str = ""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the agent, answer and exit."""

    do: ClassVar[str] = "stop"


# ---- parent → rank, batch fleets ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """One request. `index` numbers it over the whole load and determines its content; `number` is its bootstrap_room.

    `instance`, `arrival_ms`, `output_tokens` and `session` are those of `PlannedRoom`.
    """

    index: int
    number: int
    tokens: int
    prefix_tokens: int
    decode_dp: int = 0
    instance: int = 0
    arrival_ms: float | None = None
    output_tokens: int = 0
    session: int = -1


@dataclass(frozen=True, slots=True)
class Floors:
    """Prefill: measure a limit of this machine while nothing else runs."""

    do: ClassVar[str] = "floors"
    kind: FloorKind


@dataclass(frozen=True, slots=True)
class Prepare:
    """Before a run, untimed: prefill ranks fill the batch's pages (once per `batch`), decode ranks poison theirs."""

    do: ClassVar[str] = "prepare"
    batch: int
    path: str
    rooms: tuple[Room, ...]
    poison: bool = True
    pipeline: str = "off"


@dataclass(frozen=True, slots=True)
class Run:
    """Drive the prepared rooms, at most `windows[dp]` of them in flight per decode dp group.

    Args:
        layer_ms: simulated compute of one layer for one chunk; a prefill rank computes one chunk at a time.
        decode_ms: simulated time of one decode step; rooms with `output_tokens` are decoded together.
        show: index of the room whose parts `RunReport.waterfall` lists; -1 for none.
        faults: specs in force while the rooms run; for ranks started with `faulty`.
    """

    do: ClassVar[str] = "run"
    windows: tuple[int, ...]
    timeout_s: float
    layer_ms: float = 0.0
    decode_ms: float = 0.0
    show: int = -1
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verify:
    """Decode: compare the pool with the expected content."""

    do: ClassVar[str] = "verify"
    mode: str


# ---- parent → rank, live fleets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """Decode: receive a room from a prefill instance into random pages.

    `room` is a number used once per fleet; `index` determines the content, so that a decode rank verifies alone.
    """

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
        chunks: number of forwards that compute its pages.
        groups: layer groups that each forward is sent in; 1: all layers together.
        gap_s: time between two forwards.
        at_once: compute immediately, whether or not the decode side has opened the room.
        hangs: the last forward never ends, so the room waits until a deadline or an abort.
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
    """Abort a room; no effect if it has ended."""

    do: ClassVar[str] = "abort"
    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetFault:
    """Put faults in force, until cleared or for some seconds; the spec `clear` ends all faults."""

    do: ClassVar[str] = "fault"
    spec: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Report the rank's resources as `Usage`.

    Args:
        token: returned in the report.
        sweep: search all free pages for bytes written without permission.
    """

    do: ClassVar[str] = "tell"
    token: int
    sweep: bool = False


Command = Start | Stop | Floors | Prepare | Run | Verify | OpenRoom | SendRoom | Abort | SetFault | Tell
COMMANDS: dict[str, type[Command]] = {kind.do: kind for kind in get_args(Command)}


# ---- rank → parent --------------------------------------------------------------------------------------------------


class Message(TypedDict):
    """One line up.

    `answer` to a command; `progress` (data: `doing`); the `fatal` error that the rank ends with; or a report of a live
    rank.
    """

    kind: Literal["answer", "progress", "fatal", "serving", "ended", "released", "usage", "faults"]
    data: dict[str, Any]


class Fatal(TypedDict):
    """Data of a `fatal` message; `code` is the error's class name."""

    code: str
    message: str


class Gpu(TypedDict):
    """A rank's GPU; unknown fields are ""."""

    name: str
    driver: str  # version
    cuda: str  # newest version that the driver supports


class Ready(TypedDict):
    """Answer to `Start` once all peers have been met."""

    pool_bytes: int
    ring_bytes: int
    staging_bytes: int
    peak_rss_bytes: int
    transport: dict[str, str | list[str]]
    gpu: NotRequired[Gpu]  # if the pool is on a GPU


class FloorMeasured(TypedDict):
    """Answer to `Floors`: GB/s (1e9 bytes), None if it cannot be measured."""

    gb_per_s: float | None


class ShownPart(TypedDict):
    """One part of the shown room as recorded by one rank; `moments` maps each stage to its end."""

    writer: int | None
    peer: str
    chunk: int | None
    layers: list[int]
    path: str
    bytes: int
    moments: dict[str, int]


class FaultReport(TypedDict):
    """Effects of the faults on a rank during a run."""

    explained: list[list[Any]]  # [index, "aborted" or "fault"] of failed rooms whose cause is one of the faults
    struck: dict[str, int]  # how often each kind fired
    left: list[str]  # resources still held although all rooms are over, in words


class RunReport(TypedDict):
    """Answer to `Run`. Times are monotonic nanoseconds, comparable between the ranks of one machine.

    `rooms` of a prefill rank: [index, forward start, forward done, sent, compute], the last being the duration of its
    layers without waiting. Of a decode rank: [index, arrival, success, first token, last token]; arrival is the room's
    own if it has one, otherwise the time of its opening; without simulated decoding the tokens come with success.
    Failed rooms are in `failures` only.
    """

    rooms: list[list[int]]
    hidden: list[list[int]]  # prefill, a bounded sample: [index, ns of transfer before forward done, and after]
    waterfall: list[ShownPart]
    ring_samples: list[list[int]]  # decode: [ns, bytes in use], bounded
    failures: list[list[Any]]  # [index, text]
    held: list[int]  # rooms whose pages may still be written to: nothing can be run after this
    counters: dict[str, dict[str, float]]  # metric name → label value ("" without labels) → growth during the run
    stages: dict[str, list[int]]  # nanoseconds of parts in a stage, a bounded sample
    ring_high_water_bytes: int
    cpu_ns: int
    peak_rss_bytes: int
    faults: NotRequired[FaultReport]  # if any were in force
    # Prefill computing on a GPU: [index, ns of the room's forward without transfers], as `compute` in `rooms`; measured
    # before the run for each prompt length.
    compute_alone: NotRequired[list[list[int]]]


class Mismatch(TypedDict):
    """The first wrong byte of a room, or of a page or aux row that no room owned (room 0).

    `where` names the global layer, the plane ("k", "latent", "draft k", a state component), the token and the global
    head. For a state component the layer counts its own layers and the token counts the rows of its items.
    """

    room: int
    where: str
    expected: str
    found: str
    hint: str


class VerifyReport(TypedDict):
    """Answer to `Verify`."""

    rooms: int
    bytes: int
    mismatches: list[Mismatch]  # a bounded number
    bad_rooms: list[int]  # indices


class Stopped(TypedDict):
    """Answer to `Stop`."""

    peak_rss_bytes: int


class Serving(TypedDict):
    """A prefill rank has registered, or a decode rank has met all ranks of these instances."""

    instances: list[int]
    incarnation: str


class Ended(TypedDict):
    """A room has ended on this rank; monotonic nanoseconds, comparable between the processes of one machine."""

    room: int
    state: str  # a label of RoomState
    cause: Failure | None
    at_ns: int
    verified_bytes: int  # 0 if nothing was compared
    mismatch: Mismatch | None


class Released(TypedDict):
    """A room's pages are free on this rank."""

    room: int
    at_ns: int


class Usage(TypedDict):
    """Resources of a rank.

    `rooms` are handles that have not ended or are not released; `records` are the state machine's records of rooms;
    `strays` are bytes found in free pages since the last report.
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


class FaultState(TypedDict):
    """Result of `SetFault`: the faults in force, how often each kind fired, and the error if it was refused."""

    active: list[str]
    counts: dict[str, int]
    error: str | None
