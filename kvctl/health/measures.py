"""The numbers of a fleet that `kvctl check` holds against thresholds, with what people write for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from kvctl.health.answers import amount, inner, number, rows, text
from kvctl.health.snapshot import Snapshot

_LATELY_NS = 300 * 1_000_000_000


class Unit(Enum):
    """What a measure counts; the value is its unit in plugins' performance data."""

    COUNT = ""
    SECONDS = "s"
    RATIO = "%"
    BYTES = "B"


@dataclass(frozen=True, slots=True)
class Measure:
    """One number.

    Attributes:
        read: seconds, a ratio, bytes or a count; None where no agent knows it.
        least: too little of it is bad, rather than too much.
    """

    name: str
    area: str
    unit: Unit
    read: Callable[[Snapshot], float | None]
    help: str
    least: bool = False


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _seconds(values: Iterable[float | None]) -> float | None:
    worst = _most(values)
    return None if worst is None else worst / 1e9


def _waiting(snapshot: Snapshot) -> float:
    return sum(bool(text(agent.status, "waiting_for")) for agent in snapshot.agents.values())


def _draining(snapshot: Snapshot) -> float:
    return sum(agent.status.get("draining") is True for agent in snapshot.agents.values())


def _peers(state: str) -> Callable[[Snapshot], float]:
    return lambda snapshot: sum(
        text(peer, "state") == state for agent in snapshot.agents.values() for peer in agent.peers
    )


def _silence(snapshot: Snapshot) -> float | None:
    return _seconds(number(peer, "last_heard_ns") for agent in snapshot.agents.values() for peer in agent.peers)


def _ring(snapshot: Snapshot) -> float | None:
    rings = [inner(agent.status, "ring") for agent in snapshot.agents.values()]
    return _most(
        amount(ring, "used_bytes") / size for ring in rings if (size := number(ring, "size_bytes")) and size > 0
    )


def _pin_age(snapshot: Snapshot) -> float | None:
    rings = [inner(agent.staging, "ring") for agent in snapshot.agents.values()]
    return _seconds(
        max((amount(one, "age_ns") for one in rows(ring.get("allocations"))), default=0) for ring in rings if ring
    )


def _gate_age(snapshot: Snapshot) -> float | None:
    return _seconds(
        max((amount(part, "age_ns") for part in rows(agent.staging.get("gated"))), default=0)
        for agent in snapshot.agents.values()
        if agent.staging
    )


def _quarantined(snapshot: Snapshot) -> float | None:
    totals = [agent.total("kvctl_quarantined_bytes") for agent in snapshot.of_role("decode")]
    known = [total for total in totals if total is not None]
    return sum(known) if known else None


def _room_age(snapshot: Snapshot) -> float | None:
    return _seconds(
        max((amount(room, "age_ns") for room in agent.rooms), default=0) for agent in snapshot.agents.values()
    )


def _active(snapshot: Snapshot) -> float:
    return len({text(room, "room") for agent in snapshot.agents.values() for room in agent.rooms})


def _failed(snapshot: Snapshot) -> float | None:
    """Of what finished in the last five minutes by each agent's own clock."""
    late = [
        text(room, "state")
        for agent in snapshot.agents.values()
        for room in agent.history
        if (at_ns := number(room, "finished_at_ns")) is not None and agent.now_ns - at_ns <= _LATELY_NS
    ]
    return late.count("Failed") / len(late) if late else None


def _fds(snapshot: Snapshot) -> float | None:
    uses = [inner(agent.status, "process") for agent in snapshot.agents.values()]
    return _most(amount(use, "fds") / limit for use in uses if (limit := number(use, "fds_limit")) and limit > 0)


def _queue(snapshot: Snapshot) -> float | None:
    return _most(number(peer, "control_queue") for agent in snapshot.agents.values() for peer in agent.peers)


MEASURES: tuple[Measure, ...] = (
    Measure("agents", "ready", Unit.COUNT, lambda snapshot: len(snapshot.agents), "agents that answer", least=True),
    Measure("waiting", "ready", Unit.COUNT, _waiting, "agents that wait for ranks of the other side"),
    Measure("draining", "ready", Unit.COUNT, _draining, "agents that were told to take no new rooms"),
    Measure("lost", "peers", Unit.COUNT, _peers("lost"), "peers that an agent has lost"),
    Measure("suspect", "peers", Unit.COUNT, _peers("suspect"), "peers that an agent has not heard in time"),
    Measure("silence", "peers", Unit.SECONDS, _silence, "longest since a peer was heard"),
    Measure("ring", "staging", Unit.RATIO, _ring, "fullest staging ring"),
    Measure("pin-age", "staging", Unit.SECONDS, _pin_age, "oldest allocation of a ring"),
    Measure("gate-age", "staging", Unit.SECONDS, _gate_age, "longest wait of a part for its place in a ring"),
    Measure("quarantined", "staging", Unit.BYTES, _quarantined, "bytes of rings kept back for silent writers"),
    Measure("active", "rooms", Unit.COUNT, _active, "active rooms"),
    Measure("room-age", "rooms", Unit.SECONDS, _room_age, "oldest active room"),
    Measure("failed", "rooms", Unit.RATIO, _failed, "share of rooms that failed, of those of the last 5 minutes"),
    Measure("fds", "transport", Unit.RATIO, _fds, "file descriptors in use, of their limit, worst agent"),
    Measure("queue", "transport", Unit.COUNT, _queue, "messages that wait to be sent to a peer"),
)

MEASURES_BY_NAME: dict[str, Measure] = {measure.name: measure for measure in MEASURES}
