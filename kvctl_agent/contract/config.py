"""Declares the agent's configuration keys: type, unit, default, help, and whether a key can change at run time."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.contract.choices import CP_MODES, PATHS, PIPELINE_MODES, RANK0

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key.

    Attributes:
        default: None means that the agent chooses the value ("automatic").
        minimum, maximum: inclusive bounds of a number.
        runtime: whether `kvctl config set` can change the value while the agent runs.
        sglang: the flag or environment variable of SGLang with the same purpose; "" if there is none.
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
        """The name of the environment variable that sets this key."""
        return f"KVCTL_{self.name.upper()}"


KEYS: tuple[Key, ...] = (
    Key(
        "transport",
        str,
        "nixl",
        "Transfer engine that moves the bytes.",
        choices=("nixl", "mooncake", "loopback"),
        sglang="--disaggregation-transfer-backend",
    ),
    Key(
        "transport_params",
        str,
        "",
        "Engine parameters: name=value pairs separated by commas. nixl: backend, and the parameters of that backend. "
        "num_threads (UCX): threads among which large writes are divided; no effect with KV on a GPU; automatic: on "
        "prefill ranks with host memory the rank's share of the cores, at most 8, none if that is one core; of several "
        "ranks each leaves half of its share, if 4 threads remain; with at most 4 cores they rest while other threads "
        "of the process compute. "
        "mooncake: protocol (tcp, rdma, nvlink, nvlink_intra, efa), device (several joined by +), host (for peers; "
        "automatic: its address on the way to the registry). loopback: directory.",
        sglang="SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS",
    ),
    Key(
        "path",
        str,
        "auto",
        "Transfer path of every part; auto: the calibrated cost model chooses a path for each part.",
        choices=("auto", *PATHS),
    ),
    Key(
        "direct_sms",
        int,
        None,
        "GPU multiprocessors that the kernels of the direct path may use; automatic: 64.",
        minimum=1,
        maximum=1024,
    ),
    Key(
        "mem_pool",
        str,
        "default",
        "Allocator of the staging buffers and the ring on a GPU: default (cudaMalloc), or vmm (cuMemCreate), which "
        "other hosts of a multi-node NVLink domain can map; CUDA IPC handles work on one host only.",
        choices=("default", "vmm"),
        sglang="SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
    ),
    Key(
        "staging",
        str,
        "auto",
        "When to use the staged path: off (never), on (always), or auto (where the cost model predicts that it is "
        "faster).",
        choices=("off", "on", "auto"),
        sglang="SGLANG_DISAGG_STAGING_BUFFER",
    ),
    Key(
        "staging_buffer_mb",
        int,
        None,
        "Size of a prefill rank's staging buffer; automatic: 256 on the host, 64 with at most 4 cores, 512 on a GPU.",
        unit="MiB",
        minimum=1,
        maximum=1 << 20,
        sglang="SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB",
    ),
    Key(
        "staging_ring_mb",
        int,
        4096,
        "Size of the decode rank's staging ring, into which staged parts are written.",
        unit="MiB",
        minimum=1,
        maximum=1 << 20,
        sglang="SGLANG_DISAGG_STAGING_POOL_SIZE_MB",
    ),
    Key(
        "copy_threads",
        int,
        None,
        "Threads that gather and scatter in host memory; 0: the control loop does. Automatic: none with at most 4 "
        "cores, otherwise half of the rank's share of the cores, from 1 to 8. A prefill rank whose NIXL has "
        "num_threads copies on those threads.",
        minimum=0,
        maximum=64,
    ),
    Key(
        "switch_interval_ms",
        float,
        None,
        "Time after which a thread that runs Python gives the interpreter to a thread that waits for it, such as the "
        "agent's: sys.setswitchinterval of the whole process. Automatic: unchanged, in Python 5 ms. A main thread "
        "that often releases the interpreter, as schedulers do, lends it to the agent without it.",
        unit="ms",
        minimum=0.05,
        maximum=100,
    ),
    Key(
        "chunk_tokens",
        int,
        8192,
        "Tokens per cell of the fixed chunk grid. Decode ranks use the grid of each prefill instance.",
        unit="tokens",
        minimum=1,
        maximum=1 << 24,
        sglang="chunked_prefill_size",
    ),
    Key(
        "cp_mode",
        str,
        RANK0,
        "Which context-parallel prefill ranks send a room: rank0 (the first one), all (each sends a share of the "
        "room), all-chunk (each sends a share of every chunk), or room-hash (one, chosen by the room number).",
        choices=CP_MODES,
        sglang="SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER",
    ),
    Key(
        "cp_interleave",
        int,
        1,
        "Decode: consecutive tokens of a prompt on one of the cp ranks that share it; it divides the page size.",
        minimum=1,
        maximum=1 << 20,
    ),
    Key(
        "checksum",
        bool,
        False,
        "Prefill: send a checksum with every part, which the decode rank compares with that of the bytes in its pages, "
        "in host memory or on a GPU. On a difference the room fails, and the error names the writer and the part. "
        "Costs one pass over the bytes on each side. Decode, with a pool on a GPU: compile the kernels in advance.",
    ),
    Key(
        "pp_early_send",
        bool,
        True,
        "Every pipeline stage except the last sends as soon as its own forward is done.",
        sglang="--enable-pp-disagg-pipeline-kv-transfer",
    ),
    Key(
        "pipeline",
        str,
        "off",
        "Send layer groups while later layers are computed: off (never), on (group size by the formula), or auto "
        "(group size by the measured compute and transfer times).",
        choices=PIPELINE_MODES,
        runtime=True,
        sglang="SGLANG_PIPELINED_KV_TRANSFER",
    ),
    Key(
        "pipeline_min_tokens",
        int,
        3072,
        "Smallest average of tokens per request at which a forward is pipelined; 0 means 1.",
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
        "Number of layer groups for the shortest pipelined prompts.",
        minimum=1,
        maximum=1024,
        runtime=True,
        sglang="SGLANG_PIPELINE_MAX_ITERS",
    ),
    Key(
        "pipeline_min_iters",
        int,
        4,
        "Number of layer groups for long prompts.",
        minimum=1,
        maximum=1024,
        runtime=True,
        sglang="SGLANG_PIPELINE_MIN_ITERS",
    ),
    Key(
        "pipeline_group_size",
        int,
        None,
        "Layers per group; overrides pipeline_min_tokens and the formula. Automatic: by the formula.",
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
        "A prompt of at least pipeline_min_tokens times this value counts as long and gets pipeline_min_iters groups.",
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
        "Longest time a room may stay in WaitingForInput or Transferring.",
        unit="s",
        minimum=0.1,
        maximum=86400,
        runtime=True,
        sglang="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    ),
    Key(
        "unclaimed_s",
        float,
        120.0,
        "Longest time from the opening of a room by a decode rank until the prefill engine calls send() for it. The "
        "prefill rank enforces it, and the room fails on both sides.",
        unit="s",
        minimum=0.1,
        maximum=86400,
    ),
    Key(
        "hold_s",
        float,
        None,
        "Longest time for which a prefill rank keeps a computed room that no decode rank has opened; Agent.renew on "
        "the decode side restarts it. Automatic: none, so that bootstrap_timeout_s applies to computed rooms, too.",
        unit="s",
        minimum=0.1,
        maximum=86400,
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
        "Time without a message from a peer after which it gets no new grants.",
        unit="s",
        minimum=0.1,
        maximum=600,
    ),
    Key(
        "lost_s",
        float,
        15.0,
        "Time without a message from a peer after which it counts as lost and its rooms fail, without the time in "
        "which this rank itself could not run. A room whose prefill instance's registry does not answer fails after "
        "this time, too.",
        unit="s",
        minimum=0.2,
        maximum=3600,
    ),
    Key(
        "resend_s",
        float,
        1.0,
        "Time after which an unacknowledged control message is sent again.",
        unit="s",
        minimum=0.02,
        maximum=60,
    ),
    Key(
        "name_suffix",
        str,
        "",
        "Text that is appended to the agent's name after an @, so that engines on several hosts may give their agents "
        "the same names. The value hostname stands for the name of this host. Peers, kvctl and the admin socket use "
        "the whole name.",
    ),
    Key(
        "host",
        str,
        "",
        "Name of this host, by which kvctl groups agents and tells them apart. Automatic: the system's host name. Set "
        "it in containers, which have names of their own; in Kubernetes, from spec.nodeName.",
    ),
    Key(
        "listen",
        str,
        "",
        "Prefill: address or address:port of this host at which decode ranks reach the rank, such as 10.0.0.5. "
        "Automatic: the directory or address of the registry, which only ranks on the registry's host can bind.",
    ),
    Key(
        "fleet_key",
        str,
        "",
        "File with the key pair that all agents of a fleet share (made by kvctl key new). If set, every control and "
        "registry socket on TCP is encrypted and accepts only agents with this key.",
    ),
    Key(
        "admin_endpoint",
        str,
        "",
        "tcp://address:port on which the agent accepts kvctl from other machines; needs fleet_key and admin_clients. "
        "With a trailing +, as in tcp://0.0.0.0:7311+, the agent takes the first free port from that one upwards, for "
        "several ranks on one host. The registry of the prefill instance names it to kvctl.",
    ),
    Key(
        "admin_clients",
        str,
        "",
        "File that lists the clients of admin_endpoint, one per line: level (read, operate or admin), public key, "
        "comment. They may also ask the registry of a prefill instance for its list of agents. Changes to the file "
        "take effect at once.",
    ),
    Key(
        "metrics_endpoint",
        str,
        "",
        "address:port on which the agent serves /metrics for Prometheus, and /readyz and /livez for probes, such as "
        "127.0.0.1:9400. With a trailing + the agent takes the first free port from that one upwards, for several "
        "ranks on one host. /metrics needs kvctl's extra prometheus.",
    ),
    Key(
        "metrics_public",
        bool,
        False,
        "Allow metrics_endpoint on an address that other machines can reach. It only reads, over plain HTTP and "
        "without keys.",
    ),
    Key(
        "otel_endpoint",
        str,
        "",
        "URL to which one span per finished room is sent as OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces. "
        "Needs kvctl's extra otel.",
    ),
    Key(
        "nvtx",
        bool,
        False,
        "Mark rooms, parts and scatters as NVTX ranges, which Nsight Systems shows (nsys profile --trace=nvtx,cuda). "
        "Needs torch with CUDA, or the package nvtx.",
    ),
    Key(
        "insecure",
        bool,
        False,
        "Allow control sockets without keys, and metrics_endpoint, on addresses that other machines can reach.",
    ),
    Key(
        "history_rooms",
        int,
        256,
        "Finished rooms kept for the command history, and as many for slow.",
        minimum=0,
        maximum=65536,
    ),
    Key(
        "failed_rooms",
        int,
        256,
        "Failed rooms kept for the command failed, at most 16 MiB of them; the oldest rooms of the most frequent "
        "failure code are dropped first.",
        minimum=0,
        maximum=16384,
    ),
    Key("timeline_events", int, 512, "Timeline events kept per room.", minimum=0, maximum=65536),
    Key("recorder_events", int, 4096, "Entries kept by the flight recorder.", minimum=16, maximum=1 << 20),
    Key(
        "observer",
        str,
        "process",
        "Where the admin socket, metrics and probes are served: process (one observer process for all workers of this "
        "user with this socket directory, started if necessary; a thread where no process can be started), or thread "
        "(a thread of this process).",
        choices=("process", "thread"),
    ),
    Key(
        "black_box_s",
        int,
        3600,
        "Time for which the observer process keeps what it knows of a worker that ended without closing its agent; "
        "0: it keeps nothing.",
        unit="s",
        minimum=0,
        maximum=7 * 86400,
    ),
    Key(
        "log_mb",
        int,
        4,
        "Size of the log in shared memory in which the agent writes its events; less where shared memory is small.",
        unit="MiB",
        minimum=1,
        maximum=1024,
    ),
)

KEYS_BY_NAME: dict[str, Key] = {key.name: key for key in KEYS}

# Prefixes of the environment variables that plugins of engines read; the loader ignores them and KVCTL_SGLANG itself.
PLUGIN_PREFIXES: tuple[str, ...] = ("KVCTL_SGLANG_", "KVCTL_VLLM_")

# Environment variables of the command line. They share the prefix KVCTL_ with the keys; the loader reports every
# KVCTL_ variable that is neither a key nor in this list nor a plugin's as an error.
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
