"""Joins the answers of all ranks about one room into a timeline, with its parts, missing parts and first failure.

Each rank stamps events with its own wall clock. Times are converted to the local clock with the offset measured by the
round trip of `hello`, if that offset is larger than its error.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvctl.client.clock import ClockOffset
from kvctl_agent.contract.states import STAGES, STATE_LABELS

if TYPE_CHECKING:
    from kvctl_agent.contract.snapshots import Failure, OwedParts, RoomDetail

_NO_NONCE = "0"  # reported by a prefill rank before a decode rank has opened the room


@dataclass(slots=True)
class PartTimeline:
    """Times of one part, from ready on its writer to scattered on its decode rank.

    Attributes:
        decode: name of the decode rank; "-" if unknown.
        moments: local wall clock in ns at the end of each stage, by stage.
    """

    writer: int
    chunk: int
    layers: tuple[int, int]
    decode: str
    moments: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MissingParts:
    """Parts that a decode rank still expects from a writer.

    Attributes:
        cells: number of cells (chunk, layer) that have not arrived.
        chunks, layers: range [first, end) of those cells; None if only final parts are missing.
        finals: number of missing aux rows and state components.
        waits_for: why the parts have not arrived, as a predicate whose subject is the writer.
        age_ns: time since the parts were ready; if they are not ready, since the latest progress of the room.
    """

    writer: str
    decode: str
    cells: int
    chunks: tuple[int, int] | None
    layers: tuple[int, int] | None
    finals: int
    waits_for: str
    age_ns: int


@dataclass(slots=True)
class RoomTimeline:
    """One room, as joined from the answers of all ranks that know it.

    Attributes:
        nonce: the nonce of one of the decode ranks; "0" if none has opened the room.
        state: the least advanced of the ranks' states; Failed if one of them has failed.
        clocks: clock offsets of the ranks, and of the rank that failed first, if they answered.
        started_at_ns: local wall clock at the first event.
        age_ns: time from the first event to the end of the room, or until now.
        timeline: events of all ranks in local time; `relative_ns` is the time since the first event.
        failure: the first cause of the failure, in local time; None if the room has not failed.
        missing_parts: missing parts of an active room, the longest wait first.
    """

    room: str
    nonce: str
    state: str
    ranks: list[RoomDetail]
    clocks: dict[str, ClockOffset]
    hosts: dict[str, str]
    started_at_ns: int
    age_ns: int
    timeline: list[dict[str, Any]]
    parts: list[PartTimeline]
    failure: Failure | None
    missing_parts: list[MissingParts]

    @property
    def request_ids(self) -> list[str]:
        """The engines' ids of the request, each once; prefill and decode may have ids of their own."""
        return list(dict.fromkeys(found for rank in self.ranks if (found := rank.get("request_id"))))

    @property
    def failing_rank(self) -> str | None:
        return self.failure["rank"] if self.failure else None

    @property
    def failed_after_ns(self) -> int | None:
        """Time from the first event to the failure, None without one; negative if the ranks opened the room later."""
        if self.failure is None:
            return None
        after = self.failure["at_ns"] - self.started_at_ns
        clock = self.clocks.get(self.failure["rank"])
        error = max((each.error_ns for each in self.clocks.values()), default=0) if clock else 0
        return max(after, 0) if after >= -2 * error else after


def join(
    details: Iterable[RoomDetail],
    clocks: Mapping[str, ClockOffset],
    hosts: Mapping[str, str] | None = None,
    silent: Mapping[str, str] | None = None,
) -> list[RoomTimeline]:
    """Joins the answers about one room number; returns one timeline for each use of the number, newest first.

    Args:
        silent: why agents did not answer, by name.
    """
    shifts = {agent: clock.correction_ns for agent, clock in clocks.items()}
    rooms = [_join_one(ranks, clocks, shifts, hosts or {}, silent or {}) for ranks in _uses(details, shifts)]
    return sorted(rooms, key=lambda room: room.started_at_ns, reverse=True)


def most_informative_first(rooms: Iterable[RoomTimeline]) -> list[RoomTimeline]:
    """Sorts rooms: active rooms first, then rooms known to both prefill and decode ranks; the sort is stable."""

    def rank(room: RoomTimeline) -> tuple[bool, bool]:
        active = any(rank["finished_at_ns"] is None for rank in room.ranks)
        return not active, len({rank["role"] for rank in room.ranks}) == 1

    return sorted(rooms, key=rank)


def _uses(details: Iterable[RoomDetail], shifts: Mapping[str, int]) -> list[list[RoomDetail]]:
    """Groups the ranks' records by use of the room number.

    Each decode rank generates a nonce for the room, and all ranks receive the same first cause of a failure: records
    with a common nonce or cause belong together, whatever their times. Other records are grouped if they overlap in
    time; a group has at most one record of each rank.
    """

    def opened(rank: RoomDetail) -> int:
        return rank["opened_at_ns"] - shifts.get(rank["agent"], 0)

    def ended(rank: RoomDetail) -> float:
        finished = rank["finished_at_ns"]
        return float("inf") if finished is None else finished - shifts.get(rank["agent"], 0)

    def belong_together(use: Sequence[RoomDetail], other: Sequence[RoomDetail]) -> bool:
        if {rank["agent"] for rank in use} & {rank["agent"] for rank in other}:
            return False
        return any(opened(a) <= ended(b) and opened(b) <= ended(a) for a in use for b in other)

    uses: list[list[RoomDetail]] = []
    for linked in sorted(_linked(details), key=lambda ranks: min(map(opened, ranks))):
        use = next((use for use in reversed(uses) if belong_together(use, linked)), None)
        if use is None:
            uses.append(linked)
        else:
            use += linked
    return uses


def _linked(details: Iterable[RoomDetail]) -> list[list[RoomDetail]]:
    """Groups records that share a nonce or a failure, directly or through other records."""
    groups: list[tuple[set[Hashable], list[RoomDetail]]] = []
    for detail in details:
        marks, ranks = _marks(detail), [detail]
        apart = []
        for group in groups:
            if group[0] & marks:
                marks |= group[0]
                ranks = [*group[1], *ranks]
            else:
                apart.append(group)
        groups = [*apart, (marks, ranks)]
    return [ranks for _, ranks in groups]


def _marks(detail: RoomDetail) -> set[Hashable]:
    nonces = {detail["nonce"], *detail.get("nonces", ())} - {_NO_NONCE}
    failure = detail["failure"]
    return {*nonces, *([(failure["rank"], failure["at_ns"])] if failure is not None else [])}


def _join_one(
    ranks: list[RoomDetail],
    clocks: Mapping[str, ClockOffset],
    shifts: Mapping[str, int],
    hosts: Mapping[str, str],
    silent: Mapping[str, str],
) -> RoomTimeline:
    ranks = sorted(ranks, key=lambda rank: (rank["role"] != "prefill", rank["agent"]))
    events: list[dict[str, Any]] = [
        {**event, "at_ns": event["at_ns"] - shifts.get(event["agent"], 0)}
        for rank in ranks
        for event in rank["timeline"]
    ]
    events.sort(key=lambda event: event["at_ns"])
    opened = [rank["opened_at_ns"] - shifts.get(rank["agent"], 0) for rank in ranks]
    started = min([*opened, *(event["at_ns"] for event in events[:1])])
    timeline = [{"relative_ns": event["at_ns"] - started, **event} for event in events]
    failures: list[Failure] = [
        {**rank["failure"], "at_ns": rank["failure"]["at_ns"] - shifts.get(rank["failure"]["rank"], 0)}
        for rank in ranks
        if rank["failure"] is not None
    ]
    failure = min(failures, key=lambda failure: failure["at_ns"], default=None)
    known = {*(rank["agent"] for rank in ranks), *([failure["rank"]] if failure is not None else [])}
    return RoomTimeline(
        room=ranks[0]["room"],
        # Decode ranks come last; they generate the nonces.
        nonce=next((rank["nonce"] for rank in reversed(ranks) if rank["nonce"] != _NO_NONCE), _NO_NONCE),
        state=min((rank["state"] for rank in ranks), key=_state_order),
        ranks=ranks,
        clocks={agent: clock for agent, clock in clocks.items() if agent in known},
        hosts={agent: host for agent, host in hosts.items() if agent in known and host},
        started_at_ns=started,
        age_ns=max(at + rank["age_ns"] for at, rank in zip(opened, ranks, strict=True)) - started,
        timeline=timeline,
        parts=_parts(events, {rank["agent"]: rank["role"] for rank in ranks}),
        failure=failure,
        missing_parts=_missing_parts(ranks, clocks, silent),
    )


def _missing_parts(
    ranks: Sequence[RoomDetail], answered: Container[str], silent: Mapping[str, str]
) -> list[MissingParts]:
    """Returns the parts that decode ranks are missing, each with the reason that its writer reports, oldest first.

    For a decode rank that did not answer, the parts are those that its writers report.

    Args:
        silent: why others did not, by name.
    """
    by_name = {rank["agent"]: rank for rank in ranks}
    found: list[MissingParts] = []
    for rank in ranks:
        if rank["finished_at_ns"] is not None:
            continue
        for owed in rank.get("owed_parts", ()):
            if rank["role"] == "prefill":
                if owed["decode"] not in by_name:
                    found.append(_missing_part(owed, f"waits for {owed['waits_for']}"))
                continue
            writer = by_name.get(owed["writer"])
            if writer is None or writer["failure"] is not None:
                reason = "was not asked or did not answer"
                if owed["writer"] in silent:
                    reason = f"does not answer: {silent[owed['writer']]}"
                unknown = "does not know the room" if owed["writer"] in answered else reason
                found.append(_missing_part(owed, "has failed the room" if writer else unknown))
                continue
            own = [each for each in writer.get("owed_parts", ()) if each["decode"] == rank["agent"]]
            found += [_missing_part(each, f"waits for {each['waits_for']}") for each in own]
            left = owed["cells"] - sum(each["cells"] for each in own)
            if left > 0 or (owed["finals"] and not own):
                found.append(
                    _missing_part({**owed, "cells": max(left, 0)}, "says that they are sent, and they have not arrived")
                )
    return sorted(found, key=lambda missing: missing.age_ns, reverse=True)


def _missing_part(owed: OwedParts, waits_for: str) -> MissingParts:
    chunks, layers = owed["chunks"], owed["layers"]
    return MissingParts(
        writer=owed["writer"],
        decode=owed["decode"],
        cells=owed["cells"],
        chunks=(chunks[0], chunks[1]) if chunks else None,
        layers=(layers[0], layers[1]) if layers else None,
        finals=owed["finals"],
        waits_for=waits_for,
        age_ns=owed["age_ns"],
    )


def _state_order(label: str) -> int:
    return STATE_LABELS.index(label) if label in STATE_LABELS else len(STATE_LABELS)


def _parts(events: Iterable[dict[str, Any]], roles: Mapping[str, str]) -> list[PartTimeline]:
    """Collects the stages of each part from events; an event without a peer applies to all receivers of its writer.

    `roles` has the role of each agent, by name.
    """
    parts: dict[tuple[int, int, tuple[int, int], str], PartTimeline] = {}
    shared: list[tuple[tuple[int, int, tuple[int, int]], str, int]] = []
    for event in events:
        if event["stage"] not in STAGES or event["writer"] is None or event["chunk"] is None or not event["layers"]:
            continue
        part = (event["writer"], event["chunk"], (event["layers"][0], event["layers"][1]))
        decode = event["agent"] if roles.get(event["agent"]) == "decode" else event["peer"]
        if decode is None:
            shared.append((part, event["stage"], event["at_ns"]))
            continue
        timeline = parts.setdefault((*part, decode), PartTimeline(*part, decode))
        timeline.moments[event["stage"]] = event["at_ns"]
    for part, stage, at_ns in shared:
        known = [each for each in parts.values() if (each.writer, each.chunk, each.layers) == part]
        for each in known or [parts.setdefault((*part, "-"), PartTimeline(*part, "-"))]:
            each.moments.setdefault(stage, at_ns)
    return sorted(parts.values(), key=lambda each: (each.chunk, each.layers, each.writer, each.decode))
