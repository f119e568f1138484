"""Types of the admin socket's replies: the agent builds them, the command line reads them.

Times are integers in nanoseconds (`_ns`): wall clock for `*_at_ns`, durations otherwise. Sizes are integers in bytes
(`_bytes`). Names of counts that only grow end in `_total`. Room numbers and nonces are decimal strings, because jq and
JavaScript lose digits of 64-bit integers. An unknown value is None, never 0.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Role = Literal["prefill", "decode"]
ObserverKind = Literal["process", "thread"]
ProcessState = Literal["running", "sleeping", "stopped", "uninterruptible", "zombie", "gone"]


class WorkerFacts(TypedDict):
    """Identity and life of a worker, in the replies to `hello` and `status`."""

    name: str
    role: Role
    host: str  # name of its host
    pid: int
    version: str
    incarnation: str
    uptime_ns: int
    ended_age_ns: int | None  # since its process ended without closing the agent; None: it has not
    ended_why: str | None  # "killed by SIGKILL", "exited with 1", as far as it is known; None: it has not ended
    process_state: ProcessState | None  # by the kernel; None: unknown, as in another PID namespace
    turn_age_ns: int | None  # since the control loop last began a turn; None: it has not begun one
    observer: ObserverKind  # what replied: a process of its own, or a thread of the agent's process


class Hello(WorkerFacts):
    """Reply to `hello`: identity, permissions and capabilities of the agent."""

    protocol: list[int]  # [lowest, highest] admin protocol served
    level: str  # permission of this client: read, operate, admin
    capabilities: list[str]
    draining: bool  # accepts no new rooms
    now_ns: int  # the agent's wall clock when it replied; the client estimates the clock offset from it


class CommandArg(TypedDict):
    name: str
    type: str
    help: str
    required: bool
    choices: list[str]  # empty: any value of the type


class CommandInfo(TypedDict):
    """One row of `commands`: an admin command that the agent serves."""

    name: str
    level: str
    help: str
    args: list[CommandArg]


class ConfigRow(TypedDict):
    """One row of `config`: a configuration key with its value and origin."""

    key: str
    value: str | int | float | bool | None
    default: str | int | float | bool | None
    origin: str  # "default", "automatic", "file <path>", "environment KVCTL_X", "argument"
    unit: str
    runtime: bool
    help: str


class Failure(TypedDict):
    """The first cause of a room's failure."""

    rank: str  # agent name
    code: str
    at_ns: int
    text: str


class RateWindow(TypedDict):
    """Transfer rate over the last `window_ns`: bytes divided by the wall-clock union of the transfer spans.

    On a decode rank the spans are those of its rooms.
    """

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
    used_bytes: int  # at most size_bytes: without the regions granted ahead
    high_water_bytes: int
    live: int


class PipelineUse(TypedDict):
    """Layer grouping of a prefill rank: its settings, and its decisions so far."""

    mode: str  # off, on, auto
    min_tokens: int
    group_size: int | None  # None: by the formula or as measured
    decisions: dict[str, int]  # forwards by reason, see contract.choices.REASONS


class ProcessUse(TypedDict):
    """Host resources used by the agent's process, including the worker and its engine."""

    fds: int
    fds_limit: int | None  # None: no limit
    threads: int
    rss_bytes: int
    cpu_ns: int  # CPU time of all threads since the process started


class Integration(TypedDict):
    """Engine whose worker process the agent runs in, as part of it."""

    engine: str  # sglang, vllm
    engine_version: str
    mode: str  # backend, replace, connector: the agent transfers; observe: the engine does, the agent only reports it
    settings: dict[str, str]  # of the engine, that decide what a failed transfer means, or how instances are numbered


class EngineCall(TypedDict):
    """The engine's latest call of the agent."""

    engine_call: str | None  # the engine's latest call of the agent, such as "pages"; None: it made none
    engine_call_age_ns: int | None  # since that call began or, if it has returned, since then
    engine_in_call: bool  # the call has not returned
    engine_stack: list[str] | None  # of the thread that called last, innermost last, sampled while it does not call


class Status(WorkerFacts, EngineCall):
    """Reply to `status`: configuration, activity and health of one agent."""

    rank: dict[str, int]  # dp, pp, cp, tp, unique
    sizes: dict[str, int]  # dp, pp, cp, tp of the instance
    registry: str | None  # prefill: endpoint of the registry of its instance; None: of an observed engine
    integration: Integration | None  # None: embedded otherwise
    transport: dict[str, str | list[str]]  # engine, backend, lanes
    device: str
    rooms: dict[str, int]  # active rooms by state label
    rooms_finished_total: dict[str, int]  # "Success", "Failed"
    rooms_finished_5m: dict[str, int]  # the same in the last 5 minutes; states without a room are absent
    last_success_age_ns: int | None  # since the last room succeeded; None: none has
    bytes_total: int  # KV bytes sent (prefill) or landed (decode)
    rate: RateWindow
    latency: LatencySummary  # decode: open to success; prefill: first ready to sent
    ring: RingUse | None  # decode only
    peers: dict[str, int]  # peers by state
    pipeline: PipelineUse | None  # prefill only
    pool: dict[str, int]  # pages, page_size, bytes, layers, heads
    dtypes: dict[str, str]  # elements of the pool by segment: kv, draft, groups, state; absent: unknown
    metrics_url: str | None  # URL for Prometheus
    waiting_for: str | None  # e.g. "6 of 8 prefill ranks registered, missing tp=2,3"
    not_ready: str | None  # why it cannot take a new room, as /readyz decides it; None: it can
    accepting: bool  # accepts new rooms: started, not draining, not closed
    draining: bool  # accepts no new rooms; drained once no room is active
    draining_age_ns: int | None  # since the last drain, even if it was resumed later; None: never drained
    resumed_age_ns: int | None  # since it accepts new rooms again; None: it is draining, or was never drained
    memory_gb_per_s: float | None  # memcpy rate of one thread; prefill only, measured with path auto
    process: ProcessUse
    published_age_ns: int | None  # age of what the agent last published; None: read from the agent itself


class Coverage(TypedDict):
    """Numbers of cells (writer, chunk, layer) of a room; `landed` and `scattered` are None on a prefill rank."""

    planned: int
    sent: int | None
    landed: int | None
    scattered: int | None


class RoomRow(TypedDict):
    """One row of `rooms`, `history`, `slow` and `failed`: a room on this rank."""

    room: str
    nonce: str
    nonces: NotRequired[list[str]]  # prefill: one for each decode rank that opened the room here
    request_id: NotRequired[str | None]  # None: this rank's engine passed none
    agent: str
    role: Role
    state: str
    state_age_ns: int
    age_ns: int  # from open until now, or until the end of a finished room
    opened_at_ns: int
    finished_at_ns: int | None
    peers: list[str]
    coverage: Coverage | None  # None: an observed engine, which has no such cells
    tokens: int | None
    pages: int | None
    bytes: int
    parts: int
    paths: dict[str, int]  # parts by path
    parked: int  # gated parts
    latency_ns: int | None
    forward_done_at_ns: int | None  # prefill only, like hidden_ns and exposed_ns
    hidden_ns: int | None  # transfer time before the end of the forward; parts that overlap count once
    exposed_ns: int | None  # transfer time after the end of the forward
    missing: list[str]  # agents whose message ends this state: accept, drained, or the result of the room
    owed: dict[str, int]  # decode: cells not landed, by name of the writer; active rooms only
    unscattered: int | None  # decode: cells that landed but are not in their pages yet
    failure: Failure | None


class FailedRooms(TypedDict):
    """Reply to `failed`: rooms by time of failure, latest first, including rooms that still wait for their peers."""

    rooms: list[RoomRow]
    kept: int  # failed rooms stored, including those beyond the limit of this request
    dropped_total: int  # failed rooms no longer stored


class TimelineEvent(TypedDict):
    """One timeline entry of a room; writer, chunk and layers are None for an event of the whole room."""

    at_ns: int
    agent: str
    stage: str  # a STAGES name, or open, accept, request, grant, done, fail, abort, drained ...
    writer: int | None
    chunk: int | None
    layers: list[int] | None  # [lo, hi)
    peer: str | None
    detail: str


class OwedParts(TypedDict):
    """Parts of an active room that a writer has not delivered to a decode rank, grouped by the event they wait for."""

    writer: str  # agent name
    decode: str  # agent name
    cells: int
    chunks: list[int]  # [lo, hi) of the chunks with missing cells; empty: only final parts are missing
    layers: list[int]  # [lo, hi) of the layers with missing cells
    finals: int  # missing final parts: aux row and state components
    waits_for: str  # text; empty on a decode rank, which does not know the reason
    age_ns: int  # since they were ready; if not ready, since the room's state or its last part changed


class RoomDetail(RoomRow):
    """One row of `room`: a room with its timeline; several rooms may have had the same number."""

    timeline: list[TimelineEvent]
    timeline_dropped: int
    owed_parts: NotRequired[list[OwedParts]]  # active rooms only


class RingAllocation(TypedDict):
    serial: int
    room: str
    nonce: str
    writer: str  # of an observed engine all ranks that still have to write it, separated by ", "
    chunk: int
    layers: list[int]
    offset: int
    end: int
    round: int
    age_ns: int  # since the grant
    state: str  # granted, landed, revoking, quarantined
    posted: bool  # the writer refused to give the region back: its write is already posted
    room_state: str  # state of the room on this rank; "gone" if the room is unknown, which would be a bug
    aside: bool  # the writer does not answer: the watermark has passed the region, and nobody else gets its bytes


class GatedPart(TypedDict):
    room: str
    peer: str
    chunk: int
    layers: list[int]
    bytes: int
    waiting_for: str  # "grant" or "watermark round 3 tail 1048576"
    age_ns: int  # since the part was ready
    requests: int  # grant requests sent, including resends
    asked_age_ns: int | None  # since the first request; None: not requested yet


class Watermark(TypedDict):
    round: int
    tail: int
    age_ns: int


class CopyUse(TypedDict):
    """Progress of the copies from ring to pages, which a decode rank's control loop makes."""

    waiting: int  # landed parts that are not copied yet
    copying_age_ns: int | None  # age of the oldest running copy; None: no copy runs
    turn_age_ns: int | None  # since the thread last began an iteration of its loop; None: it has not begun one


class RingState(TypedDict):
    """A staging ring without its allocations."""

    size_bytes: int
    head_bytes: int
    round: int
    used_bytes: int  # of all allocations; exceeds size_bytes while regions of later rounds are granted ahead
    high_water_bytes: int
    watermark: Watermark
    refused_largest_bytes: int | None  # size of the largest part ever refused; None: none was refused


class RingView(RingState):
    allocations: list[RingAllocation]  # oldest first
    copies: CopyUse
    granted_total: int
    refused_total: int
    revoked_total: int


class StagingBuffers(TypedDict):
    size_bytes: int
    piece_bytes: int
    pieces: int
    pieces_used: int | None  # None: unknown, of an observed engine
    pieces_high_water: int | None


class Staging(TypedDict):
    """Reply to `staging`: the ring of a decode rank, or the buffers and gated parts of a prefill rank."""

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
    """One row of `layers`: stage times of a layer group on one path, over all rooms."""

    agent: str
    layers: list[int]  # [lo, hi)
    path: str
    parts: int
    bytes: int
    stages: dict[str, LayerStage]  # duration of each stage, by STAGES name
    exposed_ns: int | None  # mean transfer time of a part after the end of the forward
    overlapped_ns: int | None  # mean transfer time of a part before the end of the forward


class TcpConnections(TypedDict):
    """TCP connections between an agent's host and the host of one peer, of all processes, by the kernel's tables."""

    established: int
    opening: int  # this host asked for them and has got no answer
    half_open: int  # this host answered in the last seconds, and its answer has not been confirmed
    unacknowledged_bytes: int  # of established connections that are sending again
    retransmits: int  # how often the bytes that were sent again most often were


class PeerRow(TypedDict):
    """One row of `peers`: a peer and the connection to it, as this agent sees them."""

    agent: str
    peer: str
    role: Role
    state: str  # connecting, ready, suspect, lost, refused
    incarnation: str | None
    endpoint: str
    last_heard_ns: int | None
    unheard_ns: int | None  # since the sending of the latest heartbeat that the peer is known to have got
    rtt_ns: int | None
    clock_offset_ns: int | None
    clock_error_ns: int | None
    control_queue: int | None  # messages queued for the peer, or rejected by its full socket since it last took one
    watermark_sent: list[int] | None  # decode: [round, tail, sequence] last sent to this peer
    watermark_seen: list[int] | None  # prefill: [round, tail, sequence] last received from this peer
    lane: str
    lane_gb_per_s: float | None  # prefill: rate of one large write; None: not measured
    lane_descriptor_ns: int | None  # prefill: cost of one scattered descriptor of 512 bytes; None: not measured
    lane_measured_age_ns: int | None
    lane_kind: str | None  # prefill, pool on a GPU: cuda_ipc, rdma, "tcp through the host"
    lane_expected: str | None  # the fastest kind that this hardware allows
    lane_source: str | None  # origin of lane_kind: engine, or rate of a large write
    lane_direct: str | None  # prefill, pool on a GPU: mapping of the peer's memory: nvlink, same device, pcie
    lane_why_not: str | None  # why the peer's memory is not mapped
    same_host: bool | None  # the peer's process is visible here, so its death can be proven; None: not connected yet
    peer_host: str | None  # name of the peer's host; None: not connected yet
    address: str | None  # of the peer's host, as this agent knows it; None: unknown, or this host
    wire_ns: int | None  # prefill: median of the latest parts' time on the wire; None: too few
    oldest_write_ns: int | None  # prefill: time since the oldest write that has not ended was begun; None: none
    tcp: TcpConnections | None  # with the peer's host, while the peer is silent or a write takes long; otherwise None
    process: str | None  # "process 4711 on node-3"; None: not connected yet
    needed: bool  # whether rooms need it; otherwise it has closed, was replaced, or its instance is not known any more
    former: list[str]  # earlier processes with this name that may still write here, with their incarnations
    rooms: int
    errors_total: int | None
    last_error: str | None
    differences: list[str]  # incompatible settings, such as "page_size 64 ≠ 48"


class Gid(TypedDict):
    """One address of an RDMA port."""

    index: int
    gid: str  # as an IPv6 address
    kind: str  # InfiniBand, RoCE v1, RoCE v2; "" if the driver does not tell
    interface: str  # network interface that has the address; "" for none


class Nic(TypedDict):
    """A port of an RDMA device (`mlx5_0:1`), or a network interface (`eth0`), of an agent's host.

    The counters are those of the whole host since the device was started, whoever sent the bytes. They are
    None where the driver has none. `errors`, `retransmits` and `congestion` have the counters that are not 0, by the
    kernel's names.
    """

    name: str
    kind: Literal["rdma", "interface"]
    link: str  # InfiniBand, RoCE, EFA, RDMA (others without a link layer); of an interface Ethernet, loopback, …
    model: str  # of an RDMA device, such as MT4129; driver of an interface
    state: str  # active, down, init, armed, …; of an interface up, down, unknown, …
    bits_per_s: int | None
    mtu: int | None  # of an interface
    pci: str | None  # address, such as 0000:19:00.0; None: not a PCI device
    numa_node: int | None
    interfaces: list[str]  # of an RDMA port: its network interfaces; of a bond: its members
    gids: list[Gid]
    gpus: dict[str, str]  # GPUs of the host by PCI address: PIX, PXB, PHB, NODE or SYS, as in nvidia-smi topo -m
    sent_bytes_total: int | None
    received_bytes_total: int | None
    sent_packets_total: int | None
    errors: dict[str, int]
    retransmits: dict[str, int]
    congestion: dict[str, int]


class Lane(TypedDict):
    """Network devices through which the bytes of a rank go to other hosts."""

    devices: list[str]  # names of `Nic` rows, or of RDMA devices; empty: unknown
    source: str  # engine, open devices, settings: the origin of `devices`; route: of packets, nothing better is known
    protocol: str  # as the engine tells, such as rdma; "" if it does not


class Nics(TypedDict):
    """Reply to `nics`: the network devices of the agent's host, and those that this rank uses."""

    agent: str
    host: str
    network: str  # network namespace, such as net:[4026531840]; interfaces of another one are others
    at_ns: int  # monotonic clock of the host when the counters were read, at most a second before the reply
    nics: list[Nic]
    left_out: int  # devices not in `nics`, because there are too many
    segments_sent_total: int | None  # TCP segments of the network namespace
    segments_retransmitted_total: int | None
    segments_duplicate_total: int | None  # of those sent again, that were not lost: peers told that they had them
    cpu_nodes: list[int]  # NUMA nodes with cores on which the process may run
    gpu: str | None  # PCI address of the rank's GPU
    lane: Lane
    gid_index: int | None  # GID that the settings name; None: the engine chooses


class TransferCost(TypedDict):
    """One row of `cost`: what a prompt's transfer from this prefill rank's instance to one decode rank costs.

    A transfer begins when the prompt is computed and the decode ranks to which this rank writes have opened the room,
    and ends when all decode ranks of the room have it. `alone_ns` is `fixed_ns` + `bytes` / `bytes_per_s`;
    `predicted_ns` adds `ahead_ns`.
    """

    agent: str
    peer: str
    incarnation: str | None
    rank: dict[str, int] | None  # dp, pp, cp, tp, unique of the decode rank; None: not connected yet
    state: str  # as in `peers`
    rooms: int  # in transfer to this decode rank from this prefill rank
    queued_bytes: int | None  # of these rooms, not sent by this rank yet
    bytes: int | None  # of the prompt, by all ranks of the prefill instance to all of the decode dp group
    bytes_per_token: float | None
    path: str | None  # of the latest room
    fixed_ns: int | None
    bytes_per_s: int | None  # of one prompt, beyond the fixed time
    alone_ns: int | None  # while no other room is in transfer from this rank
    predicted_ns: int | None  # now
    basis: str | None  # "rooms": fitted to the latest ones
    samples: int  # rooms that the fit is based on
    age_ns: int | None  # since the end of the latest of them
    error_ratio: float | None  # their median relative deviation from the fit
    reason: str | None  # why there is no prediction


class Cost(TypedDict):
    """Reply to `cost`: what transfers of a prompt cost now, to each decode rank; of a decode rank, its load only."""

    agent: str
    role: Role
    rank: dict[str, int]  # dp, pp, cp, tp, unique
    accepting: bool  # accepts new rooms
    tokens: int  # length of the prompt, without a cached prefix
    rooms: int  # active
    ring: RingUse | None  # decode only
    ahead_ns: int  # prefill: how long a room that begins now waits for those in transfer from this rank
    costs: list[TransferCost]  # prefill only


class EventRow(TypedDict):
    """One entry of the flight recorder, as listed by `events`."""

    sequence: int
    at_ns: int
    agent: str
    kind: str
    severity: str  # debug, info, warning, error
    room: str | None
    peer: str | None
    text: str


class Events(TypedDict):
    """Reply to `events`: entries of the flight recorder."""

    events: list[EventRow]
    next: int  # value of `since` for the next request
    dropped: int  # entries from `since` on that the bounded recorder has already overwritten


class MetricSample(TypedDict):
    labels: dict[str, str]
    value: float | int | None
    buckets: NotRequired[list[list[float | None]]]  # histogram: [upper bound or None for +inf, cumulative count]
    sum: NotRequired[float]
    count: NotRequired[int]


class MetricFamily(TypedDict):
    """One row of `metrics`: a declared metric with its current values."""

    name: str
    kind: str  # counter, gauge, histogram
    unit: str
    help: str
    samples: list[MetricSample]


class ListedAgent(TypedDict):
    """One row of the answer to `agents` of a bootstrap registry; an older agent leaves texts empty."""

    name: str
    role: Role
    host: str  # name of its host
    incarnation: str
    admin: str  # tcp:// endpoint of its admin server as it is bound, which may be a wildcard address; "" if it has none
    socket: str  # path of its Unix socket, on its host
    address: str  # IP address from which it asks the registry; "" over a Unix socket
    heard_ns: int  # time since it was last heard; it asks at least once a second


class SettingValue(TypedDict):
    key: str
    value: str | int | float | bool | None


class PeerIdentity(TypedDict):
    peer: str
    incarnation: str | None
    peer_host: str | None


class Health(TypedDict):
    """Reply to `health`: the replies to the commands of the same names, without rows that are plainly in order."""

    status: Status
    rooms: list[RoomRow]  # failed ones, and those that have been in their state for 5 s and longer
    failed: FailedRooms  # of the last 10 minutes
    staging: Staging  # allocations and gated parts only if one of them is old
    peers: list[PeerRow]  # those that are not ready, not heard, incompatible, slow, or do not read
    metrics: list[MetricFamily]  # those that health codes read; histograms without buckets
    config: list[SettingValue]  # those that health codes read
    oldest_room_ns: int  # age of the oldest active room; 0 without any
    omitted: dict[str, int]  # number of rows left out of rooms, failed and peers
    mentioned: list[PeerIdentity]  # peers that rooms and staging name, so that peers with equal names are told apart


class RegisteredRank(TypedDict):
    """One prefill rank that has registered with a bootstrap registry."""

    name: str
    endpoint: str
    incarnation: str
    rank: dict[str, int]  # dp, pp, cp, tp


class Bootstrap(TypedDict):
    """One row of `bootstrap`: the registered and missing ranks of a prefill instance, from its registry."""

    agent: str
    registry: str  # endpoint
    expected: int | None  # number of ranks; None: no rank has registered, or the registry has not answered
    sizes: dict[str, int] | None  # dp, pp, cp, tp of the instance
    registered: list[RegisteredRank]
    missing: list[dict[str, int]]  # coordinates of the ranks not registered, at most 256
    text: str  # describes the ranks that are missing or refused; empty when complete


class ThreadStack(TypedDict):
    """One row of `stacks`: the Python stack of a thread of the worker process."""

    name: str
    ident: int
    daemon: bool
    frames: list[str]


# An action that would be unsafe, or is not applicable, is refused with `ErrorCode.REFUSED` instead of a result.
Result = Literal[
    "aborted",  # the room has failed
    "released",  # freed at once, because the operator vouches for it
    "revoking",  # the writer was asked to give the region back
    "aside",  # the watermark passes the region, but nobody else gets its bytes
    "draining",  # accepts no new rooms
    "accepting",  # accepts new rooms
    "set",
    "forgotten",  # the peer is not known any more
    "unchanged",  # the state was already as requested
]


class ActionResult(TypedDict):
    """One row of `abort`, `release`, `forget`, `drain`, `resume` or `set`: its result for one subject."""

    agent: str
    subject: str  # "room 7", "allocation 17", "rooms", or a configuration key
    result: Result
    text: str


class ProbeRow(TypedDict):
    """One row of `probe`: best cost of writes with descriptors of one size; the last row is one large write."""

    agent: str
    peer: str
    bytes: int  # size of one descriptor
    descriptors: int  # descriptors in one write
    write_ns: int  # from post to completion
    descriptor_ns: int  # cost of each descriptor beyond the fixed cost of a write; at 64 bytes, the fixed cost
    gb_per_s: float  # 10⁹ bytes per second over the whole write


class Probe(TypedDict):
    """Reply to `probe`; `rows` is empty while the measurement runs, and repeating the request returns them later."""

    agent: str
    peer: str
    lane: str
    running: bool
    moved_bytes: int | None  # of all writes of the measurement; None while it runs
    rows: list[ProbeRow]
