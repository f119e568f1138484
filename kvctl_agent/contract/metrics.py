"""Every metric, once: the agent counts these, `kvctl metrics` and the Prometheus endpoint print them.

Names carry base units, counters end in `_total`, labels stay few and never hold a room.
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
    """One metric family; `labels` are the label names, each with few values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("kvctl_rooms_active", "gauge", "", "Rooms not finished, by state.", ("state",)),
    Metric("kvctl_rooms_finished_total", "counter", "", "Rooms finished, by result.", ("result",)),
    Metric("kvctl_rooms_opened_total", "counter", "", "Rooms opened."),
    Metric("kvctl_room_failures_total", "counter", "", "Failed rooms, by first cause.", ("code",)),
    Metric(
        "kvctl_room_seconds",
        "histogram",
        "seconds",
        "Decode: open to success. Prefill: first part ready to sent.",
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
    Metric("kvctl_descriptors_total", "counter", "", "Descriptors handed to the engine, by path.", ("path",)),
    Metric("kvctl_writes_total", "counter", "", "Tagged writes: one per part, by path.", ("path",)),
    Metric(
        "kvctl_engine_posts_total",
        "counter",
        "",
        "Submissions to the engine, pieces of staged parts included, by path.",
        ("path",),
    ),
    Metric("kvctl_stage_seconds", "histogram", "seconds", "Time a part spent in a stage.", ("stage",), _SECONDS),
    Metric(
        "kvctl_pipeline_decisions_total",
        "counter",
        "",
        "Prefill forwards, by why their layers were grouped or not.",
        ("reason",),
    ),
    Metric(
        "kvctl_transfer_hidden_seconds",
        "histogram",
        "seconds",
        "Prefill: transfer time of a sent room that its forward hid.",
        (),
        _SECONDS,
    ),
    Metric(
        "kvctl_transfer_exposed_seconds",
        "histogram",
        "seconds",
        "Prefill: transfer time of a sent room after its forward was done.",
        (),
        _SECONDS,
    ),
    Metric(
        "kvctl_fallbacks_total",
        "counter",
        "",
        "Parts that took another path than the chosen one, by reason.",
        ("reason",),
    ),
    Metric("kvctl_parts_parked", "gauge", "", "Parts waiting for a grant or for the watermark."),
    Metric("kvctl_ring_size_bytes", "gauge", "bytes", "Size of the staging ring."),
    Metric(
        "kvctl_ring_used_bytes",
        "gauge",
        "bytes",
        "Ring bytes with a live owner; more than the ring has where regions are granted ahead.",
    ),
    Metric("kvctl_ring_high_water_bytes", "gauge", "bytes", "Most ring bytes ever in use at once."),
    Metric("kvctl_ring_grants_total", "counter", "", "Staging grants given."),
    Metric("kvctl_ring_refusals_total", "counter", "", "Staging requests that can never fit the ring."),
    Metric("kvctl_ring_revokes_total", "counter", "", "Unwritten grants taken back."),
    Metric(
        "kvctl_quarantined_bytes",
        "gauge",
        "bytes",
        "Memory kept from reuse because a write may be in flight.",
    ),
    Metric("kvctl_peers", "gauge", "", "Peers, by state.", ("state",)),
    Metric("kvctl_peer_lost_total", "counter", "", "Peers lost."),
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
        "Control messages sent again for want of an answer, by type.",
        ("type",),
    ),
    Metric(
        "kvctl_tags_dropped_total",
        "counter",
        "",
        "Arrival tags that changed nothing, by reason.",
        ("reason",),
    ),
    Metric(
        "kvctl_internal_errors_total",
        "counter",
        "",
        "Bugs that cost an event or an action of the control loop: the flight recorder says which.",
    ),
    Metric("kvctl_transport_errors_total", "counter", "", "Errors raised by the engine."),
    Metric(
        "kvctl_connections_refused_total",
        "counter",
        "",
        "Connections of clients without a key, or with an unknown one.",
    ),
    Metric(
        "kvctl_spans_dropped_total", "counter", "", "Rooms of which no span was sent, because too many were waiting."
    ),
    Metric("kvctl_admin_requests_total", "counter", "", "Admin requests, by command.", ("command",)),
    Metric("kvctl_admin_errors_total", "counter", "", "Admin requests refused, by code.", ("code",)),
)

METRICS_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
