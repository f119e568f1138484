"""Joins the two ends of a room: every rank's view of it on one time axis, and the rank that failed first.

Each rank stamps events with its own wall clock. They are brought onto ours with the offset measured by the hello
round trip, where that offset is larger than its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvctl.client.clock import ClockOffset
from kvctl_agent.contract.snapshots import Failure, RoomDetail
from kvctl_agent.contract.states import STAGES, STATE_LABELS


@dataclass(slots=True)
class PartLife:
    """One part, from ready on its writer to scattered on its decode rank: stage -> our wall clock, ns."""

    writer: int
    chunk: int
    layers: tuple[int, int]
    decode: str
    moments: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class JoinedRoom:
    """One life of a room over all the ranks that know it.

    Attributes:
        state: the ranks' states combined by `min`, which lets Failed win.
        timeline: the ranks' events by our clock, each with `relative_ns` since the first.
        failure: the first cause; `failing_rank` names the agent.
    """

    room: str
    nonce: str
    state: str
    ranks: list[RoomDetail]
    clocks: dict[str, ClockOffset]
    started_at_ns: int
    timeline: list[dict[str, Any]]
    parts: list[PartLife]
    failure: Failure | None

    @property
    def failing_rank(self) -> str | None:
        return self.failure["rank"] if self.failure else None


def join(details: Iterable[RoomDetail], clocks: Mapping[str, ClockOffset]) -> list[JoinedRoom]:
    """Joins what all the ranks say of one room number; a reused number gives several, the newest first."""
    shifts = {agent: clock.correction_ns for agent, clock in clocks.items()}
    rooms = [_join_one(ranks, clocks, shifts) for ranks in _lives(details, shifts)]
    return sorted(rooms, key=lambda room: room.started_at_ns, reverse=True)


def _lives(details: Iterable[RoomDetail], shifts: Mapping[str, int]) -> list[list[RoomDetail]]:
    """Sorts records into lives of the room number: those that overlap in time, at most one of each rank.

    Nonces cannot tell: each decode rank mints its own for its share of the room.
    """

    def opened(rank: RoomDetail) -> int:
        return rank["opened_at_ns"] - shifts.get(rank["agent"], 0)

    def still_on(rank: RoomDetail, at_ns: int) -> bool:
        finished = rank["finished_at_ns"]
        return finished is None or finished - shifts.get(rank["agent"], 0) >= at_ns

    lives: list[list[RoomDetail]] = []
    for detail in sorted(details, key=opened):
        for life in reversed(lives):
            alone = all(rank["agent"] != detail["agent"] for rank in life)
            if alone and any(still_on(rank, opened(detail)) for rank in life):
                life.append(detail)
                break
        else:
            lives.append([detail])
    return lives


def _join_one(ranks: list[RoomDetail], clocks: Mapping[str, ClockOffset], shifts: Mapping[str, int]) -> JoinedRoom:
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
    return JoinedRoom(
        room=ranks[0]["room"],
        nonce=ranks[-1]["nonce"],  # decode ranks come last, and theirs are the nonces
        state=min((rank["state"] for rank in ranks), key=_state_order),
        ranks=ranks,
        clocks={rank["agent"]: clocks[rank["agent"]] for rank in ranks if rank["agent"] in clocks},
        started_at_ns=started,
        timeline=timeline,
        parts=_parts(events, {rank["agent"]: rank["role"] for rank in ranks}),
        failure=min(failures, key=lambda failure: failure["at_ns"], default=None),
    )


def _state_order(label: str) -> int:
    return STATE_LABELS.index(label) if label in STATE_LABELS else len(STATE_LABELS)


def _parts(events: Iterable[dict[str, Any]], roles: Mapping[str, str]) -> list[PartLife]:
    """Folds part events into lives. `ready` concerns all of a writer's receivers when it names no peer."""
    lives: dict[tuple[int, int, tuple[int, int], str], PartLife] = {}
    shared: list[tuple[tuple[int, int, tuple[int, int]], str, int]] = []
    for event in events:
        if event["stage"] not in STAGES or event["writer"] is None or event["chunk"] is None or not event["layers"]:
            continue
        part = (event["writer"], event["chunk"], (event["layers"][0], event["layers"][1]))
        decode = event["agent"] if roles.get(event["agent"]) == "decode" else event["peer"]
        if decode is None:
            shared.append((part, event["stage"], event["at_ns"]))
            continue
        life = lives.setdefault((*part, decode), PartLife(*part, decode))
        life.moments[event["stage"]] = event["at_ns"]
    for part, stage, at_ns in shared:
        mine = [life for life in lives.values() if (life.writer, life.chunk, life.layers) == part]
        for life in mine or [lives.setdefault((*part, "-"), PartLife(*part, "-"))]:
            life.moments.setdefault(stage, at_ns)
    return sorted(lives.values(), key=lambda life: (life.chunk, life.layers, life.writer, life.decode))
