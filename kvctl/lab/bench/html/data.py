"""What a report is made of. Only the saved document is needed; whatever else is missing has no section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class PartTimeline(TypedDict):
    """What became of one part of a room.

    `layers` is [lo, hi); `moments` says when each stage (`contract.states.STAGES`) ended, in nanoseconds of the clock
    that all parts of the room share. Stages that the part's path does not have are absent.
    """

    agent: str
    peer: str
    writer: int
    chunk: int
    layers: Sequence[int]
    path: str
    moments: Mapping[str, int]


class RoomTimeline(TypedDict):
    """One room: its forward pass on the prefill side, the moment decode may start, and its parts; one clock."""

    title: str
    room: str
    path: str
    transport: str
    pipeline: str
    forward_start_ns: int
    forward_done_ns: int
    success_ns: int
    parts: Sequence[PartTimeline]


class RingTimeline(TypedDict):
    """Use of one agent's staging ring while one path ran: points are [time in ns, bytes used], by time.

    `title` says what ran, where the path alone does not.
    """

    agent: str
    path: str
    title: NotRequired[str]
    size_bytes: int
    points: Sequence[Sequence[int]]


class ReportData(TypedDict):
    """Everything a report can show.

    Attributes:
        document: what `--save` writes (`kvctl.lab.bench/1`); what an older document lacks is shown as unknown. Runs may
            say in `hidden_ms` what ran beside compute, summed up as `exposed_ms` is.
        title: headline; made from the document where absent.
        command: the command line that was run.
        started_at: when, as it should be read (`2026-11-20 12:49:42 UTC`).
        waterfalls: one typical room of each run worth looking at.
        rings: every ring sampled; times of all of them on one clock.
    """

    document: Mapping[str, Any]
    title: NotRequired[str]
    command: NotRequired[str]
    started_at: NotRequired[str]
    waterfalls: NotRequired[Sequence[RoomTimeline]]
    rings: NotRequired[Sequence[RingTimeline]]
