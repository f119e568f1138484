"""Metrics of the engines that kvctl reads, by engine, with the release whose source or exporter they were taken from.

An endpoint may export the metrics of several engines: a worker of Dynamo has those of its engine beside its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

Families = Mapping[str, Mapping[str, Any]]
"""Rows of an answer to `metrics`, by name."""

SOURCES, EXTERNAL = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
"""Counter of vLLM: prompt tokens by source; the source that is no computation and no cache of the server."""

_LARGEST = 1e18

ALIVE = "process_start_time_seconds"
"""Gauge of a process of Python's and other clients: when it began."""


class Use(StrEnum):
    """What a metric tells."""

    QUEUE = "queue"  # gauge: requests that wait
    FINISHED = "finished"  # counter: requests that ended as they should
    TOKENS = "tokens"  # counter: generated tokens
    COMPUTED = "computed"  # counter: tokens of forwards, as they run
    FAILED = "failed"  # counter: requests or transfers that failed
    EXPIRED = "expired"  # counter: prompts whose memory prefill released before they were read
    RECOMPUTED = "recomputed"  # counter: requests whose KV was computed again


@dataclass(frozen=True, slots=True)
class Signal:
    """One metric, or its samples with some labels.

    Attributes:
        metric: its name, of a counter with `_total`.
        noun: what it counts, in the plural, for findings.
        state: of a queue, the state of a room that corresponds; "" for a queue that contains the others.
        labels: labels of the samples that count, each with the values that do.
    """

    metric: str
    use: Use
    noun: str
    state: str = ""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfers:
    """Metrics of the finished transfers: histograms, or counters for both.

    Attributes:
        moved: metrics of their size, in units of `moved_bytes`; several are added up.
        time: metric of the time that they took, in units of `time_ns`.
        counts: counters of transfers, which are added up; () where `time` is a histogram.
    """

    moved: tuple[str, ...]
    moved_bytes: int
    time: str
    time_ns: int
    counts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """The metrics of one engine.

    Attributes:
        prefix: text that begins their names.
        release: release whose names these are.
        role_labels: labels of its metrics, one of which may have the role as its value.
        finished_or_failed: whether it counts failed requests as finished, too.
    """

    name: str
    prefix: str
    release: str
    signals: tuple[Signal, ...]
    transfers: Transfers | None = None
    role_labels: tuple[str, ...] = ()
    finished_or_failed: bool = False


_BOOTSTRAPPING, _WAITING, _TRANSFERRING = "Bootstrapping", "WaitingForInput", "Transferring"
_GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses")
_ENDED_WELL = ("stop", "length", "repetition")

_SGLANG = (
    Signal("sglang:http_requests_active", Use.QUEUE, "requests of clients", labels={"endpoint": _GENERATING}),
    Signal("sglang:num_queue_reqs", Use.QUEUE, "requests that wait for a forward", _WAITING),
    Signal("sglang:num_prefill_bootstrap_queue_reqs", Use.QUEUE, "requests that decode has not opened", _BOOTSTRAPPING),
    Signal("sglang:num_prefill_inflight_queue_reqs", Use.QUEUE, "computed requests not sent", _TRANSFERRING),
    Signal("sglang:num_decode_prealloc_queue_reqs", Use.QUEUE, "requests without memory or prefill", _BOOTSTRAPPING),
    Signal("sglang:num_decode_transfer_queue_reqs", Use.QUEUE, "requests whose KV has not arrived", _TRANSFERRING),
    Signal("sglang:num_requests_total", Use.FINISHED, "requests"),
    Signal("sglang:generation_tokens_total", Use.TOKENS, "tokens"),
    Signal("sglang:realtime_tokens_total", Use.COMPUTED, "tokens"),
    Signal("sglang:num_bootstrap_failed_reqs_total", Use.FAILED, "requests whose other half did not come"),
    Signal("sglang:num_transfer_failed_reqs_total", Use.FAILED, "transfers"),
    Signal("sglang:num_prefill_retries_total", Use.RECOMPUTED, "prompts that prefill computed again"),
    Signal("sglang:num_retracted_requests_total", Use.RECOMPUTED, "requests that decode dropped for want of memory"),
)
_VLLM_WAITING, _VLLM_ENDED = "vllm:num_requests_waiting_by_reason", "vllm:request_success_total"
_VLLM = (
    Signal(_VLLM_WAITING, Use.QUEUE, "requests that wait for memory or a forward", _WAITING, {"reason": ("capacity",)}),
    Signal(
        _VLLM_WAITING, Use.QUEUE, "requests that wait for KV from elsewhere", _TRANSFERRING, {"reason": ("deferred",)}
    ),
    Signal(_VLLM_ENDED, Use.FINISHED, "requests", labels={"finished_reason": _ENDED_WELL}),
    Signal("vllm:generation_tokens_total", Use.TOKENS, "tokens"),
    Signal(_VLLM_ENDED, Use.FAILED, "requests that ended with an error", labels={"finished_reason": ("error",)}),
    Signal("vllm:nixl_num_failed_transfers_total", Use.FAILED, "transfers, handshakes or notifications"),
    Signal("vllm:hf3fs_num_failed_load_total", Use.FAILED, "loads from 3FS"),
    Signal("vllm:mooncake_store_operation_failed_keys_total", Use.FAILED, "keys of the Mooncake store"),
    Signal("vllm:nixl_num_kv_expired_reqs_total", Use.EXPIRED, "prompts that decode did not read in time"),
    Signal("vllm:nixl_num_notifications_after_expiry_total", Use.EXPIRED, "prompts that were read after their release"),
    Signal("vllm:num_preemptions_total", Use.RECOMPUTED, "requests that were preempted for want of memory"),
)
_DYNAMO_ENDED = "dynamo_frontend_requests_total"
_DYNAMO = (
    Signal("dynamo_frontend_queued_requests", Use.QUEUE, "requests without a first token", _WAITING),
    Signal("dynamo_frontend_router_queue_pending_requests", Use.QUEUE, "requests that wait in the router", _WAITING),
    Signal(_DYNAMO_ENDED, Use.FINISHED, "requests", labels={"status": ("success",)}),
    Signal("dynamo_frontend_output_tokens_total", Use.TOKENS, "tokens"),
    Signal(_DYNAMO_ENDED, Use.FAILED, "requests", labels={"status": ("error",)}),
    Signal("dynamo_component_errors_total", Use.FAILED, "requests of the worker"),
    Signal("dynamo_frontend_model_migration_total", Use.RECOMPUTED, "requests that were moved to another worker"),
)

ENGINES: tuple[Engine, ...] = (
    Engine(
        "sglang",
        "sglang:",
        "0.5.23",
        _SGLANG,
        Transfers(("sglang:kv_transfer_total_mb",), 1 << 20, "sglang:kv_transfer_latency_ms", 1_000_000),
        role_labels=("engine_type",),
        finished_or_failed=True,
    ),
    Engine(
        "vllm",
        "vllm:",
        "0.32.0",
        _VLLM,
        Transfers(("vllm:nixl_bytes_transferred",), 1, "vllm:nixl_xfer_time_seconds", 1_000_000_000),
    ),
    Engine("dynamo", "dynamo_", "1.7.0", _DYNAMO, role_labels=("worker_type", "dynamo_component")),
    Engine(
        "nixl",
        "agent_",
        "1.5.1",
        (Signal("agent_errors_total", Use.FAILED, "operations of NIXL"),),
        Transfers(
            ("agent_tx_bytes_total", "agent_rx_bytes_total"),
            1,
            "agent_xfer_time_total",
            1_000,
            ("agent_tx_requests_num_total", "agent_rx_requests_num_total"),
        ),
    ),
)


def exported(families: Families) -> list[Engine]:
    """Returns the engines of which an endpoint exports metrics."""
    return [engine for engine in ENGINES if any(name.startswith(engine.prefix) for name in families)]


def total(families: Families, signal: Signal) -> float | None:
    """Returns the sum of a counter's or gauge's samples; None if there are none."""
    family = families.get(signal.metric)
    values = [
        sample["value"]
        for sample in (family or {}).get("samples", ())
        if sample["value"] is not None
        and all(sample["labels"].get(name) in wanted for name, wanted in signal.labels.items())
    ]
    return min(sum(values), _LARGEST) if values else None


def reads_prefill(families: Families) -> bool:
    """Returns whether an endpoint is vLLM with KV from prefill servers, by NIXL, not from a cache as LMCache's."""
    sources = families.get(SOURCES, {}).get("samples", ())
    external = any(each["labels"].get("source") == EXTERNAL and each["value"] for each in sources)
    return external and any(name.startswith("vllm:nixl_") for name in families)


def totals(engine: Engine, families: Families, use: Use) -> Iterator[tuple[Signal, float]]:
    """Yields the metrics of one use that an endpoint exports, with their values."""
    for signal in engine.signals:
        if signal.use is use and (value := total(families, signal)) is not None:
            yield signal, value


class Moved(NamedTuple):
    """Transfers that have finished; `ns` is the sum of the times of each."""

    nbytes: float
    ns: float
    transfers: float

    def since(self, before: Moved) -> Moved:
        """Returns the transfers after those of `before`."""
        return Moved(self.nbytes - before.nbytes, self.ns - before.ns, self.transfers - before.transfers)

    @property
    def gb_per_s(self) -> float | None:
        """Rate of one transfer; None without any."""
        return self.nbytes / self.ns if self.ns > 0 and self.nbytes > 0 else None


def moved(engine: Engine, families: Families) -> Moved | None:
    """Returns the finished transfers of an endpoint; None if the engine does not export them."""
    wanted = engine.transfers
    if wanted is None or (time := _sum(families, wanted.time)) is None:
        return None
    counts = [_sum(families, name) for name in wanted.counts] or [_sum(families, wanted.time, "count")]
    nbytes = sum(_sum(families, name) or 0 for name in wanted.moved) * wanted.moved_bytes
    return Moved(*(min(each, _LARGEST) for each in (nbytes, time * wanted.time_ns, sum(each or 0 for each in counts))))


def _sum(families: Families, name: str, of_histogram: str = "sum") -> float | None:
    """Returns the sum of a metric's values, or of the field `of_histogram` of a histogram; None without the metric."""
    family = families.get(name)
    if family is None:
        return None
    key = of_histogram if family["kind"] == "histogram" else "value"
    return sum(sample[key] or 0 for sample in family["samples"])
