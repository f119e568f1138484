"""Declares the agent's metrics, which `kvctl metrics` and the Prometheus endpoint report.

Names contain the base unit, counters end in `_total`, and labels have few values: never a room number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of one metric family; `labels` are the label names, `buckets` the upper bounds of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("kvctl_rooms_active", "gauge", "", "Active rooms, by state.", ("state",)),
    Metric("kvctl_rooms_finished_total", "counter", "", "Finished rooms, by result.", ("result",)),
    Metric("kvctl_rooms_opened_total", "counter", "", "Rooms opened."),
    Metric(
        "kvctl_rooms_refused_total",
        "counter",
        "",
        "Rooms refused to the engine, as the agent has the other role, or is draining or closed, by reason.",
        ("reason",),
    ),
    Metric(
        "kvctl_recomputed_prompts_total",
        "counter",
        "",
        "Observed decode: prompts that the engine computes itself, as their KV could not be loaded or the proxy named "
        "no prefill engine, by reason.",
        ("reason",),
    ),
    Metric(
        "kvctl_late_reads_total",
        "counter",
        "",
        "Observed: transfers of blocks that the engine had freed before, such as after the end of a lease.",
    ),
    Metric("kvctl_room_failures_total", "counter", "", "Failed rooms, by code of the first failure.", ("code",)),
    Metric(
        "kvctl_room_seconds",
        "histogram",
        "seconds",
        "Decode: time from open to success. Prefill: time from the first ready part until the room is sent.",
        (),
        _SECONDS,
    ),
    Metric("kvctl_parts_total", "counter", "", "Parts sent (prefill) or landed (decode), by path.", ("path",)),
    Metric(
        "kvctl_part_bytes_total",
        "counter",
        "bytes",
        "KV bytes sent (prefill) or landed (decode), by path.",
        ("path",),
    ),
    Metric("kvctl_descriptors_total", "counter", "", "Descriptors posted to the transfer engine, by path.", ("path",)),
    Metric("kvctl_writes_total", "counter", "", "Tagged writes: one per part, by path.", ("path",)),
    Metric(
        "kvctl_engine_posts_total",
        "counter",
        "",
        "Submissions to the transfer engine, by path; each piece of a staged part counts.",
        ("path",),
    ),
    Metric("kvctl_stage_seconds", "histogram", "seconds", "Time a part spent in a stage.", ("stage",), _SECONDS),
    Metric(
        "kvctl_pipeline_decisions_total",
        "counter",
        "",
        "Prefill forwards, by the reason for grouping their layers or not.",
        ("reason",),
    ),
    Metric(
        "kvctl_transfer_hidden_seconds",
        "histogram",
        "seconds",
        "Prefill: transfer time of a sent room that overlapped its forward.",
        (),
        _SECONDS,
    ),
    Metric(
        "kvctl_transfer_exposed_seconds",
        "histogram",
        "seconds",
        "Prefill: transfer time of a sent room after the end of its forward.",
        (),
        _SECONDS,
    ),
    Metric(
        "kvctl_fallbacks_total",
        "counter",
        "",
        "Parts sent on another path than the chosen one, by reason.",
        ("reason",),
    ),
    Metric("kvctl_parts_parked", "gauge", "", "Parts waiting for a grant or for the watermark."),
    Metric("kvctl_ring_size_bytes", "gauge", "bytes", "Size of the staging ring."),
    Metric(
        "kvctl_ring_used_bytes",
        "gauge",
        "bytes",
        "Bytes of all live ring allocations; exceeds the size of the ring while regions are granted ahead.",
    ),
    Metric("kvctl_ring_high_water_bytes", "gauge", "bytes", "Largest number of ring bytes in use at once."),
    Metric("kvctl_ring_grants_total", "counter", "", "Staging grants given."),
    Metric(
        "kvctl_ring_refusals_total",
        "counter",
        "",
        "Staging requests refused because the part can never fit into the ring.",
    ),
    Metric(
        "kvctl_rooms_recalled_total",
        "counter",
        "",
        "Recalls of rooms whose pages the local engine took back, as when it preempts a request.",
    ),
    Metric("kvctl_ring_revokes_total", "counter", "", "Unwritten grants revoked."),
    Metric(
        "kvctl_quarantined_bytes",
        "gauge",
        "bytes",
        "Quarantined memory: not reused because a write to it may still be in flight.",
    ),
    Metric(
        "kvctl_interpreter_wait_seconds",
        "gauge",
        "seconds",
        "Mean wait of the agent's loop for the Python interpreter (GIL), each time, over the last 10 s.",
    ),
    Metric("kvctl_peers", "gauge", "", "Peers, by state.", ("state",)),
    Metric("kvctl_peer_lost_total", "counter", "", "Peers lost."),
    Metric(
        "kvctl_peers_forgotten_total",
        "counter",
        "",
        "Peers forgotten, since they were closed, replaced, gone for long or not needed any more.",
    ),
    Metric(
        "kvctl_control_messages_total",
        "counter",
        "",
        "Control messages, by direction and type.",
        ("direction", "type"),
    ),
    Metric("kvctl_control_dropped_total", "counter", "", "Control messages dropped, by reason.", ("reason",)),
    Metric(
        "kvctl_control_resends_total",
        "counter",
        "",
        "Control messages resent because no acknowledgement arrived, by type.",
        ("type",),
    ),
    Metric(
        "kvctl_tags_dropped_total",
        "counter",
        "",
        "Arrival tags ignored (duplicate, late or invalid), by reason.",
        ("reason",),
    ),
    Metric(
        "kvctl_internal_errors_total",
        "counter",
        "",
        "Internal errors that lost an event or an action of the control loop; the flight recorder names it.",
    ),
    Metric("kvctl_transport_errors_total", "counter", "", "Errors raised by the transfer engine."),
    Metric(
        "kvctl_connections_refused_total",
        "counter",
        "",
        "Connections refused because the client has no key or an unknown key.",
    ),
    Metric(
        "kvctl_spans_dropped_total",
        "counter",
        "",
        "OpenTelemetry spans that were not sent, because the export queue was full or the collector failed; a room "
        "whose spans were not made yet counts once.",
    ),
    Metric(
        "kvctl_log_gaps_total",
        "counter",
        "",
        'Gaps in what the observer knows of an agent: "lost" counts times at which the agent wrote its log faster than '
        'it was read, "unreadable" single records.',
        ("reason",),
    ),
    Metric("kvctl_admin_requests_total", "counter", "", "Admin requests, by command.", ("command",)),
    Metric("kvctl_admin_errors_total", "counter", "", "Admin requests refused, by code.", ("code",)),
)

METRICS_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
