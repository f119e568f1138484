"""View of the peers of each agent."""

from __future__ import annotations

from kvctl.render import palette
from kvctl.render.kinds import Kind
from kvctl.render.view import Column, View, Width

PEERS = View(
    "peers",
    (
        Column("agent"),
        Column("peer"),
        Column("state", styles=palette.PEER_STATES),
        Column("last_heard", kind=Kind.DURATION, header="HEARD"),
        Column("rtt", kind=Kind.DURATION),
        Column("lane", width=Width.NORMAL),
        Column("rooms", kind=Kind.COUNT),
        Column("errors", "errors_total", Kind.COUNT),
        Column("control_queue", kind=Kind.COUNT, width=Width.NORMAL, header="QUEUE"),
        Column("differences", kind=Kind.LIST, width=Width.NORMAL),
        Column("last_error", width=Width.NORMAL),
        Column("lane_gb_per_s", kind=Kind.RATE, width=Width.WIDE, header="LANE GB/S"),
        Column("lane_descriptor", kind=Kind.DURATION, width=Width.WIDE, header="DESCRIPTOR"),
        Column("lane_measured_age", kind=Kind.DURATION, width=Width.WIDE, header="MEASURED"),
        Column("lane_kind", width=Width.WIDE, header="CARRIED BY"),
        Column("lane_direct", width=Width.WIDE, header="DIRECT BY"),
        Column("lane_why_not", width=Width.WIDE, header="NOT DIRECT"),
        Column("same_host", kind=Kind.FLAG, width=Width.WIDE),
        Column("role", styles=palette.ROLES, width=Width.WIDE),
        Column("clock_offset", kind=Kind.DURATION, width=Width.WIDE),
        Column("clock_error", kind=Kind.DURATION, width=Width.WIDE),
        Column("watermark_sent", kind=Kind.LIST, width=Width.WIDE),
        Column("watermark_seen", kind=Kind.LIST, width=Width.WIDE),
        Column("incarnation", width=Width.WIDE),
        Column("endpoint", width=Width.WIDE),
        Column("process", width=Width.WIDE),
        Column("former", kind=Kind.LIST, width=Width.WIDE),
    ),
    sort=("agent", "peer"),
    empty="no peers",
)
