"""Messages between a parent process and its rank processes.

Every rank obeys the same commands. `Connect`, `Measure`, `Prepare`, `Run`, `Verify` and `Stop` have one answer each,
and the parent sends the next one after it. `Open`, `Abort`, `SetFault` and `Tell` have none and may come at any time.
Rooms are moved in one of two ways:

- `kvctl bench` and `tune` prepare a batch of rooms and let the ranks run it: during Run the ranks open and send its
  rooms by themselves, because a message per room would take longer than the transfer of a small one.
- `kvctl demo` opens rooms one by one, at any time, on ranks that may be killed and restarted meanwhile; the ranks send
  the reports Ended and Released.

The channel carries lines of JSON: `{"do": <command name>, "args": {...}}` from the parent to a rank, a `Message` from a
rank to the parent. End of file means that the other process is gone; a rank then closes its agent and exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired, Protocol, TypedDict, get_args

from kvctl.lab.ranks.busy_loop import LoopTimes
from kvctl.lab.ranks.plan import PlannedRoom, PlannedShape
from kvctl.lab.ranks.request import FloorKind, Role, Sizes
from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.snapshots import Failure

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line, sufficient for the report of a run of 100,000 rooms."""

FLEET_PREFIX = "kvctl-bench-"
"""Prefix of the name of a fleet's temporary directory."""


class LineTooLong(ValueError):
    """Raised when a received line is longer than `MAX_LINE_BYTES`."""


class AnyCommand(Protocol):
    """A command to a process, whose JSON has the arguments of the command that `do` names."""

    @property
    def do(self) -> str: ...


class LineBuffer:
    """Splits a byte stream into lines of limited length."""

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds received bytes and returns the lines that are complete now, without their line ends.

        Raises:
            LineTooLong: a line, complete or not, exceeds the limit.
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


# ---- parent → rank --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """First command to a rank: its identity, the model shape, its pool and the configuration of its agent.

    The rank sends `Serving` once it can serve, and again whenever the set of reachable instances changes.

    Args:
        instance: number of the rank's prefill instance; -1 for a decode rank.
        bootstraps: registry endpoint of each prefill instance.
        state_slots: number of pages in the pool for each KV group, and of items for each state component, by name.
        faulty: whether to build the agent with fault injection.
        device: GPU number, or HOST for a pool in host memory.
        verify: whether to compare each room that was opened by itself, and to watch free pages for stray writes; all
            pages are poisoned for that.
        transfer_page: tokens of a transfer page; 0: `page_size`.
        state_page_size: tokens of a page of state of the kinds "window" and "pages"; 0: `page_size`.
        kv_layout: layout of the pool, one of `request.KV_LAYOUTS`.
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
    faulty: bool = False
    device: int = HOST
    faults: str = ""
    verify: bool = False
    transfer_page: int = 0
    state_page_size: int = 0
    kv_layout: str = "nhd"


@dataclass(frozen=True, slots=True)
class Stop:
    """Tells a rank to close its agent, answer with `Stopped` and exit."""

    do: ClassVar[str] = "stop"


def planned_room(planned: PlannedRoom, index: int, number: int) -> Room:
    """Returns a planned room with its position in the load and its bootstrap_room."""
    return Room(index, number, **{name: value for name, value in planned.items() if name != "bytes"})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Connect:
    """Tells a rank to wait until it is connected to all its peers, for `timeout_s` at most; answered with `Ready`."""

    do: ClassVar[str] = "connect"
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """One request, as sent to the ranks.

    Args:
        index: position of the room in its load; determines the test pattern of its pages.
        prefix_tokens: length of the prefix that the decode side has cached.
        arrival_ms: arrival after the first room of the batch; None: as soon as the window allows (closed loop).
        output_tokens: number of tokens to decode; 0 skips decoding.
    """

    index: int
    number: int
    tokens: int
    prefix_tokens: int
    decode_dp: int = 0
    instance: int = 0
    arrival_ms: float | None = None
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Measure:
    """Tells a rank to measure something of this machine while no rooms are in flight.

    Args:
        kind: a limit of transfer rates, answered with `FloorMeasured`, for which no other rank may do anything; or
            "loop" for the speed of `BusyLoop`, answered with `LoopTimes`.
    """

    do: ClassVar[str] = "measure"
    kind: FloorKind | Literal["loop"]
    seconds: float = 0.0
    busy: str = ""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Tells a rank to allocate the pages of a batch and to set up their content before a run; untimed.

    Args:
        batch: number of the batch; a prefill rank writes the test pattern of the same batch only once.
        path: transfer path of the run: "bulk", "slice", "staged", "direct" or "auto".
        rooms: all rooms of the batch, also those in which the rank takes no part.
        pipeline: "off", "on", "auto" or a number of layers per group.
    """

    do: ClassVar[str] = "prepare"
    batch: int
    path: str
    rooms: tuple[Room, ...]
    poison: bool = True
    pipeline: str = "off"


@dataclass(frozen=True, slots=True)
class Run:
    """Tells a rank to transfer the prepared rooms.

    Args:
        windows: maximum number of rooms in flight for each decode dp group.
        layer_ms: simulated compute time of one layer for one chunk; a prefill rank computes one chunk at a time.
        decode_ms: simulated time of one decode step; the rooms of a decode rank are decoded together.
        show: index of the room whose layer groups are counted; -1 for none.
        busy: kind of the `BusyLoop` that the engine's thread runs between its calls; "": it waits.
    """

    do: ClassVar[str] = "run"
    windows: tuple[int, ...]
    timeout_s: float = 0.0
    layer_ms: float = 0.0
    decode_ms: float = 0.0
    show: int = -1
    busy: str = ""


@dataclass(frozen=True, slots=True)
class Verify:
    """Tells a decode rank to compare its pool with the expected content; `mode` is one of `request.VERIFY_MODES`."""

    do: ClassVar[str] = "verify"
    mode: str


@dataclass(frozen=True, slots=True)
class Open:
    """Tells a rank to open one room; a decode rank receives it, a prefill rank computes and sends it.

    The other arguments are for prefill ranks.

    Args:
        groups: number of layer groups in which each forward is sent; 1: all layers together.
        at_once: whether to compute immediately instead of when the decode side has opened the room.
        hangs: whether the last forward never ends, so that the room waits until a deadline or an abort.
    """

    do: ClassVar[str] = "open"
    room: Room
    chunks: int = 1
    groups: int = 1
    gap_s: float = 0.0
    at_once: bool = False
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Tells a rank to abort a room; no effect if the room has ended."""

    do: ClassVar[str] = "abort"
    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetFault:
    """Tells a rank to inject faults and to report `FaultState`.

    Args:
        spec: specs of the faults, or "clear" to end all faults.
        seconds: duration of the faults; None: until they are cleared.
    """

    do: ClassVar[str] = "fault"
    spec: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """Tells a rank to report its resources as `Usage`.

    Args:
        token: number that the report repeats, so that the parent knows which command it answers.
        sweep: whether to search all free pages for bytes written after their room was released.
    """

    do: ClassVar[str] = "tell"
    token: int
    sweep: bool = False


Command = Start | Connect | Measure | Prepare | Run | Verify | Open | Abort | SetFault | Tell | Stop
COMMANDS: dict[str, type[Command]] = {kind.do: kind for kind in get_args(Command)}


# ---- rank → parent --------------------------------------------------------------------------------------------------


class Message(TypedDict):
    """One message from a rank to its parent.

    Kind "answer" answers a command; "progress" says in `data["doing"]` what the rank is doing; "fatal" reports the
    error with which the rank exits. The other kinds are reports.
    """

    kind: Literal["answer", "progress", "fatal", "serving", "ended", "released", "usage", "faults"]
    data: dict[str, Any]


class Fatal(TypedDict):
    """Data of a `fatal` message; `code` is the error's class name."""

    code: str
    message: str


class Gpu(TypedDict):
    """Description of a rank's GPU; an unknown field is ""."""

    name: str
    driver: str  # version
    cuda: str  # newest version that the driver supports


class Ready(TypedDict):
    """Answer to `Connect`."""

    pool_bytes: int
    ring_bytes: int
    staging_bytes: int
    peak_rss_bytes: int
    transport: dict[str, str | list[str]]
    gpu: NotRequired[Gpu]  # if the pool is on a GPU


class FloorMeasured(TypedDict):
    """Answer to `Measure`: a rate in GB/s (1e9 bytes per second); None if it cannot be measured on this rank."""

    gb_per_s: float | None


class RunReport(TypedDict):
    """Answer to `Run`. Times are monotonic nanoseconds, comparable between the ranks of one machine.

    `rooms` has one row per successful room. Row of a prefill rank: [room index, forward start, forward done, sent,
    compute]; compute is the duration of the room's layers without pipeline waits. Row of a decode rank: [room index,
    arrival, success, first token, last token]; a room without an arrival time arrives when it is opened, and without
    simulated decoding the times of both tokens are the time of success.
    """

    rooms: list[list[int]]
    hidden: list[list[int]]  # prefill, bounded sample: [room index, ns of transfer before forward done, ns after]
    groups: int  # prefill: layer groups in which room `Run.show` was sent; 0 if unknown
    failures: list[list[Any]]  # [index, text]
    held: list[int]  # indices of rooms whose pages may still be written to: no further run is possible
    counters: dict[str, dict[str, float]]  # metric name → label value ("" without labels) → growth during the run
    stages: dict[str, list[int]]  # nanoseconds of parts in a stage, a bounded sample
    ring_high_water_bytes: int
    cpu_ns: int
    peak_rss_bytes: int
    loop: NotRequired[LoopTimes]  # if the engine's thread was busy


class Mismatch(TypedDict):
    """The first wrong byte of a room; or, with `room` 0, of a page or aux row that no room owned.

    `where` names the global layer, the plane ("k", "latent", "draft k", a state component), the token and the global
    head. For a state component, the layer counts only the component's layers and the token counts the rows of its
    items. `expected` and `found` are hexadecimal; `hint` says where the found bytes come from.
    """

    room: int
    where: str
    expected: str
    found: str
    hint: str


class VerifyReport(TypedDict):
    """Answer to `Verify`: how many rooms and bytes were compared, and what was wrong."""

    rooms: int
    bytes: int
    mismatches: list[Mismatch]  # a bounded number
    bad_rooms: list[int]  # indices of rooms with wrong content


class Stopped(TypedDict):
    """Answer to `Stop`."""

    peak_rss_bytes: int


class Serving(TypedDict):
    """Report that a prefill rank has registered, or that a decode rank is connected to all ranks of `instances`."""

    instances: list[int]
    incarnation: str


class Ended(TypedDict):
    """Report that a room has ended on this rank; times are monotonic, comparable between processes of one machine."""

    room: int
    state: str  # a label of RoomState
    cause: Failure | None
    at_ns: int
    verified_bytes: int  # 0 if nothing was compared
    mismatch: Mismatch | None


class Released(TypedDict):
    """Report that the pages of an ended room have become free on this rank."""

    room: int
    at_ns: int


class Usage(TypedDict):
    """Report of the resources that a rank uses.

    `rooms` counts the rooms that have not ended or whose pages are not free; `records` counts the rooms known to the
    agent's state machine; `strays` lists bytes found in free pages since the previous report.
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
    """Report after `SetFault`: specs of the faults in force, how often each kind fired, and why a spec was refused."""

    active: list[str]
    counts: dict[str, int]
    error: str | None
