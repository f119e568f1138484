"""What `kvctl bench` and the synthetic worker (`kvctl_agent.rig`) say to each other.

The bench is torch-free and must not know layouts, pools or engines; the rig must not know tables or options. So the
bench asks `rig plan` for a `Plan`, starts one rig process per planned rank, and leads all of them through phases
(ready, floors, prepare, run, verify) with one JSON line down and one up per rank and phase. Within a phase no rank
waits for the bench: the rooms of a run are driven by the ranks alone.

A line down is `{"do": <command name>, "args": {...}}`; a line up is a `Reply`. End of file on the channel means that
the other side is gone: a rank then closes its agent and exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

MAX_LINE_BYTES = 16 << 20
"""Longest line either side accepts: a run of 100,000 rooms fits."""

FLEET_PREFIX = "kvctl-bench-"
"""First part of the name of a fleet's temporary directory."""

DTYPE_BYTES: dict[str, int] = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Element types that a synthetic pool can have; only their size matters."""

VERIFY_MODES = ("full", "sample", "off")
PAGE_ORDERS = ("random", "contiguous")

Role = Literal["prefill", "decode"]


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
# bench → `rig plan`


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of one instance; `tp` is the attention TP size."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt lengths: `values` in turn, or, where that is empty, uniform over [low, high]."""

    values: tuple[int, ...] = ()
    low: int = 0
    high: int = 0

    @property
    def text(self) -> str:
        """As the option is written: `1024`, `16,4096`, `256..2048`."""
        return ",".join(map(str, self.values)) if self.values else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a sweep: so many rooms in flight, prompts of these lengths."""

    concurrency: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything a bench is asked to do that decides what moves; None means automatic.

    `memory_bytes` bounds all KV pools and rings together.
    """

    prefill: Sizes
    decode: Sizes
    loads: tuple[Load, ...]
    memory_bytes: int
    seed: int
    model: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    page_size: int = 16
    page_order: str = "random"
    prefix_hit: float = 0.0
    rooms: int | None = None
    paths: tuple[str, ...] = ()
    transport: str = "nixl"
    ring_mb: int | None = None
    chunk_tokens: int | None = None
    workers: int | None = None


# ---------------------------------------------------------------------------------------------------------------------
# `rig plan` → bench


class PlannedShape(TypedDict):
    """The model's KV geometry, resolved."""

    model: str  # "" when given by numbers
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    dtype_bytes: int


class PlannedRank(TypedDict):
    """One process of the fleet."""

    role: Role
    unique: int
    dp: int
    pp: int
    cp: int
    tp: int
    heads: list[int]  # global [lo, hi)
    layers: list[int]  # global [lo, hi)
    pool_pages: int
    pool_bytes: int


class PlannedShare(TypedDict):
    """What one writer owes one decode rank for one room of the first load."""

    writer: int
    reader: int
    heads: list[int]  # global [lo, hi)
    layers: list[int]  # global [lo, hi)
    bytes: int
    parts: int
    descriptors: dict[str, int | None]  # by path; None where the path is not legal


class PlannedRoom(TypedDict):
    """One request of a load; `bytes` is what has to move for it."""

    tokens: int
    prefix_tokens: int
    decode_dp: int
    bytes: int


class PlannedLoad(TypedDict):
    """One point of a sweep, resolved; `lots` are [first, end) of `rooms`."""

    concurrency: int
    in_flight: int  # what memory holds of it
    windows: list[int]  # rooms in flight of each decode dp group
    tokens: str
    tokens_mean: float
    rooms: list[PlannedRoom]
    lots: list[list[int]]


class Plan(TypedDict):
    """Answer of `rig plan`."""

    shape: PlannedShape
    page_size: int
    page_order: str
    chunk_tokens: int
    transport: str
    paths: list[str]
    ranks: list[PlannedRank]
    shares: list[PlannedShare]
    loads: list[PlannedLoad]
    ring_bytes: int  # of each decode rank
    room_stride: int  # room numbers between the first rooms of two runs
    aux_slots: int
    config: dict[str, str | int | float | bool]  # the agents' configuration
    notes: list[str]  # what people should know: a limit that was applied, and why


class PlanError(TypedDict):
    """Why there is no plan; `code` is `usage` or `unavailable`."""

    code: str
    message: str


class PlanReply(TypedDict):
    plan: NotRequired[Plan]
    error: NotRequired[PlanError]


# ---------------------------------------------------------------------------------------------------------------------
# bench → rank


@dataclass(frozen=True, slots=True)
class Room:
    """One request. `index` numbers it over the whole load and decides its content; `number` is its bootstrap_room."""

    index: int
    number: int
    tokens: int
    prefix_tokens: int
    decode_dp: int
    slot: int  # aux row on both sides


@dataclass(frozen=True, slots=True)
class Start:
    """First line down: who this rank is. Answered by `Ready` once it has met all its peers."""

    do: ClassVar[str] = "start"
    name: str
    fleet_dir: str
    bootstrap: str
    role: Role
    unique: int
    prefill: Sizes
    decode: Sizes
    layers: tuple[int, int]  # global [lo, hi) on this rank
    heads: tuple[int, int]
    total_kv_heads: int
    head_dim: int
    dtype_bytes: int
    page_size: int
    page_order: str
    pool_pages: int
    aux_slots: int
    seed: int
    config: dict[str, str | int | float | bool] = field(default_factory=dict)
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Floors:
    """Measure this machine while nothing else runs: one thread's memcpy, or one write over the transport."""

    do: ClassVar[str] = "floors"
    kind: Literal["memcpy", "write"]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Before a run, untimed: prefill ranks fill the lot's pages (once per `lot`), decode ranks poison theirs."""

    do: ClassVar[str] = "prepare"
    lot: int
    path: str
    rooms: tuple[Room, ...]
    poison: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """Drive the prepared rooms, `windows[dp]` of them in flight per decode dp group."""

    do: ClassVar[str] = "run"
    windows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare what landed with what the pattern says, on decode ranks."""

    do: ClassVar[str] = "verify"
    mode: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the agent, answer and exit."""

    do: ClassVar[str] = "stop"


Command = Start | Floors | Prepare | Run | Verify | Stop
COMMANDS: dict[str, type[Command]] = {kind.do: kind for kind in (Start, Floors, Prepare, Run, Verify, Stop)}


# ---------------------------------------------------------------------------------------------------------------------
# rank → bench


class Reply(TypedDict):
    """One line up: the `answer` to a command, `progress` on the way, or the `fatal` error the rank ends with."""

    kind: Literal["answer", "progress", "fatal"]
    to: str  # the command's name
    data: dict[str, Any]


class Fatal(TypedDict):
    """Data of a `fatal` reply; `code` is the error's class name."""

    code: str
    message: str


class Progress(TypedDict):
    """Data of a `progress` reply: what the rank waits for or does now."""

    doing: str


class Ready(TypedDict):
    """Answer to `Start`."""

    pool_bytes: int
    ring_bytes: int
    staging_bytes: int
    peak_rss_bytes: int
    transport: dict[str, str | list[str]]


class FloorMeasured(TypedDict):
    """Answer to `Floors`: GB/s (1e9 bytes), None where it cannot be measured."""

    gb_per_s: float | None


class RunReport(TypedDict):
    """Answer to `Run`. Times are monotonic nanoseconds, comparable between the ranks of one machine.

    `rooms` of a prefill rank: [index, forward start, forward done, sent]; of a decode rank: [index, open, success].
    A room that failed is in `failures` only.
    """

    rooms: list[list[int]]
    failures: list[list[Any]]  # [index, text]
    held: list[int]  # rooms whose pages may still be written to: nothing can be run after this
    counters: dict[str, dict[str, float]]  # metric name → label value ("" without labels) → growth during the run
    stages: dict[str, list[int]]  # nanoseconds of parts in a stage, a bounded sample
    ring_high_water_bytes: int
    cpu_ns: int
    peak_rss_bytes: int


class Mismatch(TypedDict):
    """The first byte of a room that is not what the pattern says; global layer and head numbers."""

    room: int
    layer: int
    kv: str  # "K", "V", "aux" or "stray"
    token: int
    head: int
    dim: int
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
