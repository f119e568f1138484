"""Requests and plans of benches, and the messages between a parent and its rank processes.

A bench leads all its ranks through phases (start, floors, prepare, run, verify) with one command down and one answer up
per rank and phase. Within a run no rank waits for the bench: the rooms of a run are driven by the ranks alone. Demos
and soaks use the commands of `contract.steady` over the same channel.

The channel carries lines of JSON. A line down is `{"do": <command name>, "args": {...}}`; a line up is a `Message`. End
of file on the channel means that the other side is gone: a rank then closes its agent and exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from kvctl_agent.contract.choices import HOST, RANK0

MAX_LINE_BYTES = 16 << 20
"""Longest line either side accepts: a run of 100,000 rooms fits."""

FLEET_PREFIX = "kvctl-bench-"
"""First part of the name of a fleet's temporary directory."""

DTYPE_BYTES: dict[str, int] = {
    "fp8": 1,
    "int8": 1,
    "fp8-scaled": 1,
    "int8-scaled": 1,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
}
"""Element types that a synthetic pool can have; only their size matters."""

DTYPE_SCALE_BYTES: dict[str, int] = {"fp8-scaled": 4, "int8-scaled": 4}
"""Types with quantisation scales in buffers of their own: bytes per page and head, for K and for V each."""

KINDS = ("mha", "mla")
STATE_KINDS = ("rows", "window", "pages")
"""How many items of a state component a room has: one; the pages of its last `window` tokens; all its pages."""

VERIFY_MODES = ("full", "sample", "off")
PAGE_ORDERS = ("random", "contiguous")
PIPELINES = ("off", "on", "measured")
"""Besides these, a number in decimal: that many layers per group."""

DEVICES = ("cpu", "cuda")
"""Where KV pools, staging and rings are."""

COMPUTES = ("sleep", "gpu")
"""What stands for a forward: a pause of so many milliseconds a layer, or the model's matrix products and attention."""

FloorKind = Literal["memcpy", "write", "device", "peer"]
"""One thread's memcpy; one write over the transport; a copy within the device; one to the first decode rank's."""

Role = Literal["prefill", "decode"]
StateKind = Literal["rows", "window", "pages"]


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
# bench → planner


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of one instance; `tp` is the attention TP size.

    `layers` of each pipeline stage; empty: as even as they divide, the first ones taking one more.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    layers: tuple[int, ...] = ()


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
    """One point of a sweep: so many rooms in flight, prompts of these lengths (not used where requests are given).

    `rooms` in place of the request's, for this point.
    """

    concurrency: int
    tokens: Tokens
    rooms: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace or of a conversation.

    Args:
        arrival_ms: when it arrives, from the first one's arrival; ignored for the later turns of a session. None:
            closed loop, as soon as there is room for it.
        prefix_tokens: what the decode side has cached of it, page-aligned.
        output_tokens: how long it is decoded; 0: not at all.
        session: requests of one session run one after the other, each when the one before has been decoded, all at one
            decode dp group; -1: on its own. Requests come in the order of their arrival, sessions turn by turn.
        decode_dp: the decode dp group that has the prefix cached; -1: any, all requests or none.
    """

    arrival_ms: float | None
    tokens: int
    prefix_tokens: int = 0
    output_tokens: int = 0
    session: int = -1
    decode_dp: int = -1


@dataclass(frozen=True, slots=True)
class State:
    """One component of per-request state.

    Args:
        name: a word; not "kv" or "draft".
        layers: for each of its layers, the KV layer that it runs beside, ascending: decides its pipeline stage. Empty:
            one beside every KV layer.
        rows, heads, head_bytes: one item in one layer, over the whole model; `heads` is the axis that tp ranks share,
            1 where every rank holds all of it. Of kind "window" and "pages" an item is a page, and `rows` are those of
            one token.
        kind: one of `STATE_KINDS`.
        window: tokens, of kind "window".
    """

    name: str
    rows: int
    heads: int
    head_bytes: int
    layers: tuple[int, ...] = ()
    kind: StateKind = "rows"
    window: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything a bench is asked to do that decides what moves; None means automatic: the model's own.

    Args:
        prefill: the prefill instances; all of them serve the one decode instance.
        memory_bytes: bounds all KV pools and rings together.
        kind: one of `KINDS`; of "mla" `head_dim` is the latent's, heads are 1 and there is no V.
        v_head_dim: where it differs from `head_dim`.
        k_scale_bytes, v_scale_bytes: quantisation scales per page and head.
        draft_layers: layers of a draft model, with `draft_heads` and `draft_dim` or the target's own.
        states: in place of the model's; an empty tuple is none.
        pipelines: to compare side by side, like `paths`: of `PIPELINES`, or layers per group as a number.
        rate: requests per second, at random (Poisson); 0: closed loop.
        requests: what every load runs in place of drawn rooms, its concurrency bounding those in flight.
        faults: specs of `contract.faults`; in force while rooms run.
        device: one of `DEVICES`.
        compute: one of `COMPUTES`; in place of `layer_ms` where it is "gpu".
        prefill_gpus, decode_gpus: numbers of the GPUs that the ranks of a side share, in turn; empty: with several
            GPUs the first half for prefill and the rest for decode, with one that one for all.
        direct_sms: of the agents' configuration.
    """

    prefill: tuple[Sizes, ...]
    decode: Sizes
    loads: tuple[Load, ...]
    memory_bytes: int
    seed: int
    model: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    kind: str | None = None
    v_head_dim: int | None = None
    k_scale_bytes: int | None = None
    v_scale_bytes: int | None = None
    draft_layers: int | None = None
    draft_heads: int | None = None
    draft_dim: int | None = None
    states: tuple[State, ...] | None = None
    cp_mode: str = RANK0
    pipelines: tuple[str, ...] = ("off",)
    layer_ms: float = 0.0
    decode_ms: float = 0.0
    output_tokens: int = 0
    rate: float = 0.0
    requests: tuple[Request, ...] = ()
    page_size: int = 16
    page_order: str = "random"
    prefix_hit: float = 0.0
    rooms: int | None = None
    paths: tuple[str, ...] = ()
    transport: str = "nixl"
    ring_mb: int | None = None
    chunk_tokens: int | None = None
    workers: int | None = None
    faults: tuple[str, ...] = ()
    device: str = "cpu"
    compute: str = "sleep"
    prefill_gpus: tuple[int, ...] = ()
    decode_gpus: tuple[int, ...] = ()
    direct_sms: int | None = None


# ---------------------------------------------------------------------------------------------------------------------
# planner → bench


class PlannedDraft(TypedDict):
    """A draft model's layers."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


class PlannedWidths(TypedDict):
    """What one layer computes with, over the whole model; see `contract.models.Widths`."""

    hidden: int
    q_heads: int
    intermediate: int


class PlannedState(TypedDict):
    """One component of per-request state, resolved; a page of it has `rows` rows."""

    name: str
    layers: list[int]
    rows: int
    heads: int
    head_bytes: int
    kind: StateKind
    window: int


class PlannedShape(TypedDict):
    """The model's KV geometry, resolved."""

    model: str  # "" when given by numbers
    kind: str
    layers: int
    kv_heads: int
    head_dim: int  # of K; of the latent
    v_head_dim: int  # 0 of a latent
    dtype: str
    dtype_bytes: int
    k_scale_bytes: int
    v_scale_bytes: int
    draft: PlannedDraft | None
    states: list[PlannedState]
    widths: NotRequired[PlannedWidths]  # where ranks compute on GPUs


class PlannedRank(TypedDict):
    """One process of the fleet."""

    role: Role
    instance: int  # of prefill; -1 for decode
    unique: int  # within its instance
    dp: int
    pp: int
    cp: int
    tp: int
    heads: list[int]  # global [lo, hi)
    layers: list[int]  # global [lo, hi)
    pool_pages: int
    state_slots: dict[str, int]  # items of each state component
    pool_bytes: int
    device: int  # number of its GPU; -1: host memory


class PlannedShare(TypedDict):
    """What one writer owes one decode rank of one segment for one room of the first load."""

    instance: int
    writer: int
    reader: int
    segment: str  # "kv", "draft" or a state component
    heads: list[int]  # global [lo, hi)
    layers: list[int]  # [lo, hi); global for KV and draft
    bytes: int
    parts: int
    descriptors: dict[str, int | None]  # by path; None where the path is not legal


class PlannedRoom(TypedDict):
    """One request of a load; `bytes` is what has to move for it."""

    tokens: int
    prefix_tokens: int
    instance: int
    decode_dp: int
    bytes: int
    arrival_ms: float | None  # from its lot's first; None: closed loop
    output_tokens: int
    session: int


class PlannedLoad(TypedDict):
    """One point of a sweep, resolved; `lots` are [first, end) of `rooms`."""

    concurrency: int
    in_flight: int  # what memory holds of it
    windows: list[int]  # most rooms in flight of each decode dp group
    tokens: str
    tokens_mean: float
    rooms: list[PlannedRoom]
    lots: list[list[int]]


class Plan(TypedDict):
    """The ranks, pools and loads of a fleet."""

    shape: PlannedShape
    page_size: int
    page_order: str
    chunk_tokens: int
    transport: str
    device: str  # one of `DEVICES`
    compute: str  # one of `COMPUTES`
    paths: list[str]
    pipelines: list[str]
    cp_mode: str
    ranks: list[PlannedRank]
    shares: list[PlannedShare]
    loads: list[PlannedLoad]
    ring_bytes: int  # of each decode rank
    room_stride: int  # room numbers between the first rooms of two runs
    aux_slots: int
    config: dict[str, str | int | float | bool]  # the agents' configuration
    notes: list[str]  # what people should know: a limit that was applied, and why


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
