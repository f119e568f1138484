"""Shapes of what the admin socket answers; built by the agent, read by the operator's tool.

Rules: times are integer nanoseconds (`_ns`; wall clock for `*_at_ns`, durations otherwise), sizes integer bytes
(`_bytes`), counts end in `_total` when they only grow. Room ids and nonces are decimal strings, because 64-bit
integers break in jq and JavaScript. A value that is not known is None, never 0.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Role = Literal["prefill", "decode"]


class Hello(TypedDict):
    """Answer to `hello`."""

    name: str
    role: Role
    pid: int
    version: str
    protocol: list[int]  # [lowest, highest] admin protocol served
    incarnation: str
    level: str  # what this client may do: read, operate, admin
    capabilities: list[str]
    uptime_ns: int
    draining: bool  # told to take no new rooms
    now_ns: int  # the agent's wall clock when it answered: the client's clock-offset estimate


class CommandArg(TypedDict):
    name: str
    type: str
    help: str
    required: bool
    choices: list[str]  # empty: any value of the type


class CommandInfo(TypedDict):
    """One row of `commands`."""

    name: str
    level: str
    help: str
    args: list[CommandArg]


class ConfigRow(TypedDict):
    """One configuration value with its origin."""

    key: str
    value: str | int | float | bool | None
    default: str | int | float | bool | None
    origin: str  # "default", "file <path>", "environment KVCTL_X", "argument"
    unit: str
    runtime: bool
    help: str


class Failure(TypedDict):
    """First cause of a failed room."""

    rank: str  # agent name
    code: str
    at_ns: int
    text: str


class RateWindow(TypedDict):
    """Bytes over the wall-clock union of transfer spans of the last seconds; of a reader, of the spans of its rooms."""

    window_ns: int
    bytes: int
    gb_per_s: float | None
    rooms_per_s: float | None


class LatencySummary(TypedDict):
    p50_ns: int | None
    p90_ns: int | None
    p99_ns: int | None
    count: int


class RingUse(TypedDict):
    size_bytes: int
    used_bytes: int  # what is granted ahead of the ring's free bytes left out
    high_water_bytes: int
    live: int


class PipelineUse(TypedDict):
    """How a prefill rank groups layers, and what came of it."""

    mode: str  # off, on, measured
    min_tokens: int
    group_size: int | None  # None: by the formula or as measured
    decisions: dict[str, int]  # forwards by reason, see contract.pipeline


class ProcessUse(TypedDict):
    """What the agent's process, worker and engine included, takes of its host."""

    fds: int
    fds_limit: int | None  # None: no limit
    threads: int
    rss_bytes: int
    cpu_ns: int  # of all threads, since the process began


class Status(TypedDict):
    """Answer to `status`."""

    name: str
    role: Role
    rank: dict[str, int]  # dp, pp, cp, tp, unique
    sizes: dict[str, int]  # dp, pp, cp, tp of the instance
    pid: int
    incarnation: str
    version: str
    uptime_ns: int
    transport: dict[str, str | list[str]]  # engine, backend, lanes
    device: str
    rooms: dict[str, int]  # active rooms by state label
    rooms_finished_total: dict[str, int]  # "Success", "Failed"
    bytes_total: int  # KV bytes sent (prefill) or landed (decode)
    rate: RateWindow
    latency: LatencySummary  # decode: open to success; prefill: first ready to sent
    ring: RingUse | None  # decode only
    peers: dict[str, int]  # peers by state
    pipeline: PipelineUse | None  # prefill only
    pool: dict[str, int]  # pages, page_size, bytes, layers, heads
    metrics_url: str | None  # where Prometheus may scrape it
    waiting_for: str | None  # e.g. "6 of 8 prefill ranks registered, missing tp=2,3"
    accepting: bool  # its engine may begin rooms: started, not draining, not closed
    draining: bool  # told to take no new rooms; drained once no room is active
    draining_age_ns: int | None  # since it was last told to, whether or not it has been resumed; None: never
    resumed_age_ns: int | None  # since it takes new rooms again; None: it drains, or was never told to
    memory_gb_per_s: float | None  # one thread's memcpy, the floor of any rate; prefill, where `auto` measured it
    process: ProcessUse


class Coverage(TypedDict):
    """Cells of the room's ledger; on a prefill rank landed and scattered are None."""

    planned: int
    sent: int | None
    landed: int | None
    scattered: int | None


class RoomRow(TypedDict):
    """One row of `rooms`, `history`, `slow` and `failed`."""

    room: str
    nonce: str
    nonces: NotRequired[list[str]]  # prefill: those of all the decode ranks that opened the room here
    agent: str
    role: Role
    state: str
    state_age_ns: int
    age_ns: int  # to now, or to the end when finished
    opened_at_ns: int
    finished_at_ns: int | None
    peers: list[str]
    coverage: Coverage
    tokens: int | None
    pages: int | None
    bytes: int
    parts: int
    paths: dict[str, int]  # parts by path
    parked: int  # gated parts
    latency_ns: int | None
    forward_done_at_ns: int | None  # prefill only, as the two below
    hidden_ns: int | None  # parts were on their way before the forward was done; overlaps of parts count once
    exposed_ns: int | None  # the same, after it
    missing: list[str]  # agents whose next word ends this state: to accept, to say drained, or how the room ended
    owed: dict[str, int]  # decode: cells not landed, by the name of their writer; active rooms only
    unscattered: int | None  # decode: cells landed and not in their pages
    failure: Failure | None


class FailedRooms(TypedDict):
    """Answer to `failed`: the latest first, those included that still wait for their peers."""

    rooms: list[RoomRow]
    kept: int  # as many as there are to be had, above the limit, too
    dropped_total: int  # failed rooms that are no longer kept


class TimelineEvent(TypedDict):
    """One moment of a room: `part` is None for what concerns the room as a whole."""

    at_ns: int
    agent: str
    stage: str  # a STAGES name, or open, accept, request, grant, done, fail, abort, drained ...
    writer: int | None
    chunk: int | None
    layers: list[int] | None  # [lo, hi)
    peer: str | None
    detail: str


class OwedParts(TypedDict):
    """Parts of an active room that a writer still owes a decode rank, and that wait for the same."""

    writer: str  # agent name, as the next one
    decode: str
    cells: int
    chunks: list[int]  # [first, last + 1) of those with something missing; empty: final parts alone
    layers: list[int]  # [lo, hi), likewise
    finals: int  # aux row and state components
    waits_for: str  # in words; empty on a decode rank, which sees only what has not arrived
    age_ns: int  # since they were ready; of what is not, since the room's state began or anything of it moved


class RoomDetail(RoomRow):
    """One row of `room`, which answers with a list: a number used again, or one room towards several decode ranks."""

    timeline: list[TimelineEvent]
    timeline_dropped: int
    owed_parts: NotRequired[list[OwedParts]]  # of an active room


class RingAllocation(TypedDict):
    serial: int
    room: str
    nonce: str
    writer: str
    chunk: int
    layers: list[int]
    offset: int
    end: int
    round: int
    age_ns: int  # since it was granted
    state: str  # granted, landed, revoking, quarantined
    posted: bool  # its writer has said that it was too late to give it back: it is being written
    room_state: str  # of its room here; "gone" for a room that is not known any more, which would be a bug
    aside: bool  # its writer is silent: the watermark has passed it, nobody else gets its bytes


class GatedPart(TypedDict):
    room: str
    peer: str
    chunk: int
    layers: list[int]
    bytes: int
    waiting_for: str  # "grant" or "watermark round 3 tail 1048576"
    age_ns: int  # since it was ready
    requests: int  # how often its grant was asked for, resends included
    asked_age_ns: int | None  # since the first of them; None: not asked yet, it waits for its turn to ask


class Watermark(TypedDict):
    round: int
    tail: int
    age_ns: int


class CopyUse(TypedDict):
    """What a decode rank's arrival thread does with what has landed in the ring."""

    waiting: int  # landed parts of which no copy to their pages has ended
    copying_age_ns: int | None  # since the oldest copy that has not ended was begun; None: none runs
    turn_age_ns: int | None  # since the thread last began to look for work; None: it has not


class RingView(TypedDict):
    size_bytes: int
    head_bytes: int
    round: int
    used_bytes: int  # of all allocations: more than the size where later rounds are granted ahead
    high_water_bytes: int
    watermark: Watermark
    allocations: list[RingAllocation]  # oldest first
    copies: CopyUse
    granted_total: int
    refused_total: int
    refused_largest_bytes: int | None  # the largest part that was ever refused; None: none was
    revoked_total: int


class StagingBuffers(TypedDict):
    size_bytes: int
    piece_bytes: int
    pieces: int
    pieces_used: int
    pieces_high_water: int


class Staging(TypedDict):
    """Answer to `staging`: `ring` on a decode rank, `buffers` and `gated` on a prefill rank."""

    agent: str
    role: Role
    enabled: bool
    ring: RingView | None
    buffers: StagingBuffers | None
    gated: list[GatedPart]
    fallbacks_total: int


class LayerStage(TypedDict):
    p50_ns: int | None
    p90_ns: int | None
    p99_ns: int | None
    count: int


class LayerRow(TypedDict):
    """Stage times of one layer group, aggregated or of one room (then with its moments)."""

    agent: str
    layers: list[int]  # [lo, hi)
    path: str
    parts: int
    bytes: int
    stages: dict[str, LayerStage]  # duration of each stage, by STAGES name
    moments: NotRequired[list[dict[str, int | None]]]  # per part, room only: stage -> wall clock ns
    exposed_ns: int | None  # mean per part: on its way after the forward was done
    overlapped_ns: int | None  # mean per part: on its way before, hidden behind compute


class PeerRow(TypedDict):
    """One row of `peers`."""

    agent: str
    peer: str
    role: Role
    state: str  # connecting, ready, suspect, lost, refused
    incarnation: str | None
    endpoint: str
    last_heard_ns: int | None
    rtt_ns: int | None
    clock_offset_ns: int | None
    clock_error_ns: int | None
    control_queue: int  # messages to it that have not left, or found no place in its socket since that took one
    watermark_sent: list[int] | None  # decode: [round, tail, sequence] last sent to this peer
    watermark_seen: list[int] | None  # prefill: same, last heard from this peer
    lane: str
    lane_gb_per_s: float | None  # prefill: of one large write, where this lane was measured
    lane_descriptor_ns: int | None  # prefill: of one scattered descriptor of 512 bytes, likewise
    lane_measured_age_ns: int | None
    lane_kind: str | None  # prefill, pool on a GPU: cuda_ipc, rdma, "tcp through the host"; inferred from its rate
    lane_expected: str | None  # what it could be on this hardware
    lane_direct: str | None  # prefill, pool on a GPU: how the peer's memory is mapped here: nvlink, same device, pcie
    lane_why_not: str | None  # why it is not
    same_host: bool | None  # its processes can be seen from here, so its death can be proven; None: not met
    process: str | None  # "process 4711 on node-3"; None: not met
    former: list[str]  # earlier processes of this name that may still write here, each with its incarnation
    rooms: int
    errors_total: int
    last_error: str | None
    differences: list[str]  # incompatible factors, "page_size 64 ≠ 32"


class EventRow(TypedDict):
    """One entry of the flight recorder."""

    sequence: int
    at_ns: int
    agent: str
    kind: str
    severity: str  # debug, info, warning, error
    room: str | None
    peer: str | None
    text: str


class Events(TypedDict):
    """Answer to `events`."""

    events: list[EventRow]
    next: int  # give as `since` next time
    dropped: int  # entries after `since` that the bounded ring had already lost


class MetricSample(TypedDict):
    labels: dict[str, str]
    value: float | int | None
    buckets: NotRequired[list[list[float | None]]]  # histogram: [upper bound or None for +inf, cumulative count]
    sum: NotRequired[float]
    count: NotRequired[int]


class MetricFamily(TypedDict):
    """One row of `metrics`."""

    name: str
    kind: str  # counter, gauge, histogram
    unit: str
    help: str
    samples: list[MetricSample]


class RegisteredRank(TypedDict):
    """A prefill rank as it registered itself."""

    name: str
    endpoint: str
    incarnation: str
    rank: dict[str, int]  # dp, pp, cp, tp


class Bootstrap(TypedDict):
    """One row of `bootstrap`: a prefill instance, as its registry has described it to this agent."""

    agent: str
    registry: str  # endpoint
    expected: int | None  # ranks; None while nobody has registered, or the registry has not answered
    sizes: dict[str, int] | None  # dp, pp, cp, tp of the instance
    registered: list[RegisteredRank]
    missing: list[dict[str, int]]  # coordinates, 256 at most
    text: str  # what is missing or refused, in words; empty when complete


class ThreadStack(TypedDict):
    """One row of `stacks`."""

    name: str
    ident: int
    daemon: bool
    frames: list[str]
