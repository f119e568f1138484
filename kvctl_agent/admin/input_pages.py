"""Answers the admin command `inputs`: what the machine was told, page by page."""

from __future__ import annotations

import os

from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.version import VERSION
from kvctl_agent.layout.plan_inputs import PLAN_VERSION
from kvctl_agent.protocol.local_info import LocalInfo
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.telemetry.clock import Clock


def page(inputs: InputLog, local: LocalInfo, clock: Clock, since: int | None, until: int | None) -> InputPage:
    """Pieces from number `since` up to `until`; compressing them is the admin thread's work, not the control loop's."""
    pieces = inputs.pieces(since, until)
    return {
        "header": {
            "name": local.name,
            "role": local.role,
            "incarnation": f"{local.incarnation:016x}",
            "pid": os.getpid(),
            "version": VERSION,
            "protocol_version": PROTOCOL_VERSION,
            "plan_version": PLAN_VERSION,
            "clock_offset_ns": clock.offset_ns,
            "taken": inputs.taken,
            "missed": inputs.missed,
            "fault": inputs.fault,
        },
        "blobs": pieces.blobs,
        "next": pieces.next,
        "end": pieces.end,
        "dropped": pieces.dropped,
    }
