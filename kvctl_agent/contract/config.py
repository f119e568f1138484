"""Every configuration key of the agent, once: type, unit, default, help, and whether it can change while running."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.contract.pipeline import PIPELINE_MODES

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key.

    `default` None means automatic; `minimum` and `maximum` are inclusive; `sglang` is the name people who come from
    SGLang know it by.
    """

    name: str
    type: type
    default: Value
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    runtime: bool = False
    sglang: str = ""

    @property
    def environment(self) -> str:
        return f"KVCTL_{self.name.upper()}"


KEYS: tuple[Key, ...] = (
    Key(
        "transport",
        str,
        "nixl",
        "Engine that moves the bytes.",
        choices=("nixl", "mooncake", "loopback"),
        sglang="--disaggregation-transfer-backend",
    ),
    Key(
        "transport_params",
        str,
        "",
        "Engine parameters, as name=value pairs joined by commas. nixl: backend, and that backend's own. mooncake: "
        "protocol (tcp, rdma, nvlink, nvlink_intra, efa), device (joined by +), host. loopback: directory.",
        sglang="SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS",
    ),
    Key(
        "path",
        str,
        "auto",
        "How parts move: fixed, or chosen per part by the calibrated cost model.",
        choices=("auto", "bulk", "slice", "staged", "direct"),
    ),
    Key(
        "direct_sms",
        int,
        None,
        "Multiprocessors of the GPU that kernels of the direct path may use; automatic: 64.",
        minimum=1,
        maximum=1024,
    ),
    Key(
        "mem_pool",
        str,
        "default",
        "Memory of staging and ring on a GPU: plain, or made by cuMemCreate so that other hosts of a multi-node NVLink "
        "domain can map it (CUDA IPC handles do not cover that).",
        choices=("default", "vmm"),
        sglang="SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
    ),
    Key(
        "staging",
        str,
        "auto",
        "Staged path: never, always, or where the cost model finds it faster.",
        choices=("off", "on", "auto"),
        sglang="SGLANG_DISAGG_STAGING_BUFFER",
    ),
    Key(
        "staging_buffer_mb",
        int,
        None,
        "Staging buffer of each transfer worker; automatic: 64, on a GPU 512.",
        unit="MiB",
        minimum=1,
        maximum=1 << 20,
        sglang="SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB",
    ),
    Key(
        "staging_ring_mb",
        int,
        4096,
        "Decode rank's ring that staged parts land in.",
        unit="MiB",
        minimum=1,
        maximum=1 << 20,
        sglang="SGLANG_DISAGG_STAGING_POOL_SIZE_MB",
    ),
    Key(
        "workers",
        int,
        None,
        "Transfer workers per prefill rank; automatic: 1 on up to 4 cores or with a pool on a GPU, else 4.",
        minimum=1,
        maximum=64,
        sglang="SGLANG_DISAGGREGATION_QUEUE_SIZE",
    ),
    Key(
        "copy_threads",
        int,
        None,
        "Threads that gather or scatter one part; automatic: 1 on up to 4 cores, else 2.",
        minimum=1,
        maximum=16,
    ),
    Key(
        "chunk_tokens",
        int,
        8192,
        "Tokens per chunk of the fixed chunk grid.",
        unit="tokens",
        minimum=1,
        maximum=1 << 24,
        sglang="chunked_prefill_size",
    ),
    Key(
        "cp_mode",
        str,
        "rank0",
        "Which context-parallel prefill ranks send: the first; all, a share of each room or chunk; or one per room.",
        choices=("rank0", "all", "all-chunk", "room-hash"),
        sglang="SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER",
    ),
    Key(
        "checksum",
        bool,
        False,
        "Prefill: send with every part a CRC-32 of its bytes, which the decode rank compares with what is in its "
        "pages; a room that differs fails and names writer and part. Costs a pass over the bytes on both sides.",
    ),
    Key(
        "pp_early_send",
        bool,
        True,
        "Pipeline stages but the last send as soon as their own forward is done.",
        sglang="--enable-pp-disagg-pipeline-kv-transfer",
    ),
    Key(
        "pipeline",
        str,
        "off",
        "Send layer groups while the next are computed: never, in groups by the formula, or by what was measured.",
        choices=PIPELINE_MODES,
        runtime=True,
        sglang="SGLANG_PIPELINED_KV_TRANSFER",
    ),
    Key(
        "pipeline_min_tokens",
        int,
        3072,
        "Average tokens per request from which a forward is pipelined; 0 means 1.",
        unit="tokens",
        minimum=0,
        maximum=1 << 24,
        runtime=True,
        sglang="SGLANG_PIPELINE_MIN_TOKENS",
    ),
    Key(
        "pipeline_max_iters",
        int,
        10,
        "Layer groups of the shortest pipelined prompts.",
        minimum=1,
        maximum=1024,
        runtime=True,
        sglang="SGLANG_PIPELINE_MAX_ITERS",
    ),
    Key(
        "pipeline_min_iters",
        int,
        4,
        "Layer groups of long prompts.",
        minimum=1,
        maximum=1024,
        runtime=True,
        sglang="SGLANG_PIPELINE_MIN_ITERS",
    ),
    Key(
        "pipeline_group_size",
        int,
        None,
        "Layers per group, in place of pipeline_min_tokens and the formula; automatic: by the formula.",
        unit="layers",
        minimum=1,
        maximum=1024,
        runtime=True,
        sglang="SGLANG_PIPELINE_GROUP_SIZE",
    ),
    Key(
        "pipeline_sat_multiplier",
        float,
        3.0,
        "Prompts of pipeline_min_tokens times this are long: from there on there are pipeline_min_iters groups.",
        minimum=1,
        maximum=1000,
        runtime=True,
        sglang="SGLANG_PIPELINE_SAT_MULTIPLIER",
    ),
    Key(
        "bootstrap_timeout_s",
        float,
        300.0,
        "Longest time a room may stay in Bootstrapping.",
        unit="s",
        minimum=0.1,
        maximum=86400,
        runtime=True,
        sglang="SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    ),
    Key(
        "waiting_timeout_s",
        float,
        300.0,
        "Longest time a room may wait for input or for its bytes.",
        unit="s",
        minimum=0.1,
        maximum=86400,
        runtime=True,
        sglang="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    ),
    Key(
        "heartbeat_s",
        float,
        1.0,
        "Time between heartbeats to each peer.",
        unit="s",
        minimum=0.05,
        maximum=60,
        sglang="SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
    ),
    Key(
        "suspect_s",
        float,
        3.0,
        "Silence after which a peer gets no new grants.",
        unit="s",
        minimum=0.1,
        maximum=600,
    ),
    Key(
        "lost_s",
        float,
        15.0,
        "Silence after which a peer is lost and its rooms fail.",
        unit="s",
        minimum=0.2,
        maximum=3600,
    ),
    Key(
        "resend_s",
        float,
        1.0,
        "Time before an unanswered control message is sent again.",
        unit="s",
        minimum=0.02,
        maximum=60,
    ),
    Key(
        "fleet_key",
        str,
        "",
        "File of the key pair that all agents of a fleet share (kvctl key new): with it every control and registry "
        "socket on TCP is encrypted and lets nobody else in.",
    ),
    Key(
        "admin_endpoint",
        str,
        "",
        "tcp://address:port where kvctl may ask from other machines; needs fleet_key and admin_clients.",
    ),
    Key(
        "admin_clients",
        str,
        "",
        "File of those who may use admin_endpoint, a line each: read, operate or admin, public key, comment. A change "
        "counts at once.",
    ),
    Key(
        "metrics_endpoint",
        str,
        "",
        "address:port where Prometheus may scrape this agent, such as 127.0.0.1:9400; with a + behind it the first "
        "free port from there on, for several ranks of one host. Needs kvctl[prometheus].",
    ),
    Key(
        "otel_endpoint",
        str,
        "",
        "Where a span per room is sent as OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces. Needs kvctl[otel].",
    ),
    Key(
        "insecure",
        bool,
        False,
        "Allow control sockets on addresses that others can reach, without keys.",
    ),
    Key(
        "history_rooms",
        int,
        256,
        "Finished rooms kept for `history` and `slow`, each.",
        minimum=0,
        maximum=65536,
    ),
    Key(
        "failed_rooms",
        int,
        256,
        "Failed rooms kept for `failed`, in 16 MiB at most; the oldest of the most frequent code go first.",
        minimum=0,
        maximum=16384,
    ),
    Key("timeline_events", int, 512, "Timeline events kept per room.", minimum=0, maximum=65536),
    Key("recorder_events", int, 4096, "Entries kept by the flight recorder.", minimum=16, maximum=1 << 20),
    Key(
        "record_inputs",
        int,
        65536,
        "Inputs of the protocol's machine kept for kvctl record and replay; 0: none.",
        minimum=0,
        maximum=1 << 22,
    ),
)

KEYS_BY_NAME: dict[str, Key] = {key.name: key for key in KEYS}

# Environment variables of the operator's tool. They share the prefix with the keys, so the loader must know them to
# call every other KVCTL_ name a mistake.
TOOL_VARIABLES: tuple[str, ...] = (
    "KVCTL_COLOR",
    "KVCTL_COLUMNS",
    "KVCTL_CONFIG",
    "KVCTL_CONTEXT",
    "KVCTL_ENDPOINT",
    "KVCTL_FILTER",
    "KVCTL_FROM",
    "KVCTL_KEY",
    "KVCTL_OUTPUT",
    "KVCTL_QUIET",
    "KVCTL_SELECTOR",
    "KVCTL_SERVER_KEY",
    "KVCTL_SOCKET_DIR",
    "KVCTL_SORT_BY",
    "KVCTL_TIMEOUT",
    "KVCTL_VERBOSE",
    "KVCTL_WATCH",
)
