"""Requests and plans of benches, and the messages between a parent and its rank processes.

A bench leads all its ranks through phases (start, floors, prepare, run, verify) with one command down and one answer up
per rank and phase. Within a run no rank waits for the bench: the rooms of a run are driven by the ranks alone. Demos
and soaks use the commands of `contract.steady` over the same channel.

The channel carries lines of JSON. A line down is `{"do": <command name>, "args": {...}}`; a line up is a `Message`. End
of file on the channel means that the other side is gone: a rank then closes its agent and exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, get_args

from kvctl.lab.ranks.plan import PlannedShape
from kvctl.lab.ranks.request import FloorKind, Role, Sizes
from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.snapshots import Failure

MAX_LINE_BYTES = 16 << 20
"""Longest line either side accepts: a run of 100,000 rooms fits."""

FLEET_PREFIX = "kvctl-bench-"
"""First part of the name of a fleet's temporary directory."""


class LineTooLong(ValueError):
    """The other side sent a line over `MAX_LINE_BYTES`."""


class Lines:
    """Cuts a byte stream into lines, with a bound on what one line may hold."""

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the lines they complete, without their ends.

        Raises:
            LineTooLong: more than the limit without a line end.
        """
        seen = len(self._rest)
        self._rest += data
        lines: list[bytes] = []
        start = 0
        while (end := self._rest.find(b"\n", max(start, seen))) >= 0:
            lines.append(bytes(self._rest[start:end]))
            start = end + 1
        del self._rest[:start]
        if len(self._rest) > self._limit_bytes or any(len(line) > self._limit_bytes for line in lines):
            raise LineTooLong(f"a line of more than {self._limit_bytes} bytes")
        return lines


# ---------------------------------------------------------------------------------------------------------------------
# bench → rank


@dataclass(frozen=True, slots=True)
class Room:
    """One request. `index` numbers it over the whole load and decides its content; `number` is its bootstrap_room.

    `instance`, `arrival_ms`, `output_tokens` and `session` are those of `PlannedRoom`.
    """

    index: int
    number: int
    tokens: int
    prefix_tokens: int
    decode_dp: int
    slot: int  # aux row on both sides
    instance: int = 0
    arrival_ms: float | None = None
    output_tokens: int = 0
    session: int = -1


@dataclass(frozen=True, slots=True)
class Start:
    """First line down: who this rank is. Answered by `Ready` once it has met all its peers.

    `bootstraps` are the endpoints of the prefill instances; `instance` is -1 for a decode rank. `faulty`: its agent is
    one that faults can be injected into. `device` is the number of its GPU, or HOST; `compute` one of `COMPUTES`.

    `steady`: its rooms come one by one, by the commands of `contract.steady`; then `Start` is not answered, and `Met`
    follows once the rank can serve, and again when more instances can. `faults` are in force from the first moment,
    and with `verify` it compares what lands with what was sent, and watches its free pages.
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
    steady: bool = False
    faults: str = ""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Floors:
    """Measure this machine while nothing else runs; of a prefill rank."""

    do: ClassVar[str] = "floors"
    kind: FloorKind


@dataclass(frozen=True, slots=True)
class Probe:
    """Prefill: measure what writes and copies cost here, for `kvctl tune`; nothing else may run."""

    do: ClassVar[str] = "probe"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Before a run, untimed: prefill ranks fill the lot's pages (once per `lot`), decode ranks poison theirs."""

    do: ClassVar[str] = "prepare"
    lot: int
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
        show: index of the room whose parts go into `RunReport.waterfall`; -1 for none.
        faults: specs of `contract.faults`, in force while the rooms run; of a faulty rank.
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
    """Compare what landed with what the pattern says, on decode ranks."""

    do: ClassVar[str] = "verify"
    mode: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the agent, answer and exit."""

    do: ClassVar[str] = "stop"


# ---------------------------------------------------------------------------------------------------------------------
# rank → bench


class Message(TypedDict):
    """One line up.

    `answer` to a command, `progress` on the way (data: `doing`), the `fatal` error that the rank ends with, or a report
    of `contract.steady`.
    """

    kind: Literal["answer", "progress", "fatal", "met", "ended", "released", "usage", "faults"]
    data: dict[str, Any]


class Fatal(TypedDict):
    """Data of a `fatal` reply; `code` is the error's class name."""

    code: str
    message: str


class Gpu(TypedDict):
    """A rank's GPU; "" for what is not known."""

    name: str
    driver: str  # version
    cuda: str  # newest version that the driver serves


class Ready(TypedDict):
    """Answer to `Start`."""

    pool_bytes: int
    ring_bytes: int
    staging_bytes: int
    peak_rss_bytes: int
    transport: dict[str, str | list[str]]
    gpu: NotRequired[Gpu]  # where its pool is on one


class FloorMeasured(TypedDict):
    """Answer to `Floors`: GB/s (1e9 bytes), None where it cannot be measured."""

    gb_per_s: float | None


class Probed(TypedDict):
    """Answer to `Probe`: GB/s (1e9 bytes) and µs.

    `us_by_bytes` are (bytes, µs) of one descriptor; `gather` and `scatter` are (bytes of a row, µs per MiB).
    """

    write_gb_per_s: float
    us_per_write: float
    us_by_bytes: list[tuple[int, float]]
    gather: list[tuple[int, float]]
    scatter: list[tuple[int, float]]
    memcpy_gb_per_s: float


class ShownPart(TypedDict):
    """One part of the shown room as one rank saw it; `moments`: the stage's name → when it ended."""

    writer: int | None
    peer: str
    chunk: int | None
    layers: list[int]
    path: str
    bytes: int
    moments: dict[str, int]


class FaultReport(TypedDict):
    """What faults did to a rank during a run."""

    explained: list[list[Any]]  # [index, "aborted" or "fault"] of failed rooms whose cause is one of the faults
    struck: dict[str, int]  # how often each kind struck
    left: list[str]  # what is held although all rooms are over, in words


class RunReport(TypedDict):
    """Answer to `Run`. Times are monotonic nanoseconds, comparable between the ranks of one machine.

    `rooms` of a prefill rank: [index, forward start, forward done, sent, compute], the last a duration: what its layers
    took, waiting left out. Of a decode rank: [index, arrival, success, first token, last token]; arrival is the room's
    own where it has one, else when it was opened; without simulated decoding the tokens come with success.
    A room that failed is in `failures` only.
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
    faults: NotRequired[FaultReport]  # where there were any
    # Prefill that computes on a GPU: [index, ns that the room's forward takes while nothing is sent], like `compute`
    # in `rooms`, measured before the run for each prompt length.
    compute_alone: NotRequired[list[list[int]]]


class Mismatch(TypedDict):
    """The first byte of a room, or of a page or aux row that nothing was owed to (room 0), that is not as it must be.

    `where` names the global layer, the plane ("k", "latent", "draft k", a state component), the token and the global
    head; of a state component the layer counts its own layers and the token the rows of its items.
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
    mismatches: list[Mismatch]  # at most a few
    bad_rooms: list[int]  # indices


class Stopped(TypedDict):
    """Answer to `Stop`."""

    peak_rss_bytes: int


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
