"""What the health codes of kvctl read from an agent, declared here for the admin command `health`."""

from __future__ import annotations

HEALTH_METRICS = (
    "kvctl_descriptors_total",
    "kvctl_internal_errors_total",
    "kvctl_interpreter_wait_seconds",
    "kvctl_late_reads_total",
    "kvctl_part_bytes_total",
    "kvctl_parts_total",
    "kvctl_quarantined_bytes",
    "kvctl_recomputed_prompts_total",
    "kvctl_ring_refusals_total",
    "kvctl_room_failures_total",
    "kvctl_rooms_finished_total",
    "kvctl_rooms_opened_total",
    "kvctl_rooms_refused_total",
    "kvctl_stage_seconds",
    "kvctl_transport_errors_total",
    "kvctl_writes_total",
)
HEALTH_SETTINGS = (
    "bootstrap_timeout_s",
    "chunk_tokens",
    "heartbeat_s",
    "hold_s",
    "lost_s",
    "resend_s",
    "suspect_s",
    "waiting_timeout_s",
)

HEALTH_ROOMS = 200
"""Active rooms of an agent that are examined, the oldest."""
HEALTH_HISTORY = 50
"""Finished rooms of an agent that are examined, the latest."""
HEALTH_FAILED = 200
"""Failed rooms of an agent that are examined, the latest."""
FAILED_NS = 600_000_000_000
"""Time for which a failed room is reported."""
FINISHED_NS = 300_000_000_000
"""Time over which agents count finished rooms for the share of failed ones."""
