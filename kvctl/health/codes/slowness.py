"""How long parts are on the wire, writer by writer: one that is far slower than those beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from kvctl.health.snapshot import Snapshot

_PARTS = 20  # that both sides of a comparison must have sent
_TIMES = 5.0  # slower than the others
_SHORTEST_S = 0.1  # below, on a busy machine, it is a question of who gets a core


@dataclass(frozen=True, slots=True)
class Wire:
    """What one writer's parts took between their post and their completion."""

    seconds_a_part: float
    ns_a_byte: float
    parts: int
    bytes: int

    @property
    def gb_per_s(self) -> float:
        return 1 / self.ns_a_byte if self.ns_a_byte else 0.0


@dataclass(frozen=True, slots=True)
class SlowWriter:
    """A writer, and the median of those beside it."""

    wire: Wire
    others: Wire
    other_names: tuple[str, ...]


def slow_writers(snapshot: Snapshot) -> Mapping[str, SlowWriter]:
    """By name; use `snapshot.once(slow_writers)`.

    A writer is slow when its parts take far longer than those of the others, by part and by byte: ranks of a pipeline
    have parts of different sizes.
    """
    wires = {agent.name: wire for agent in snapshot.of_role("prefill") if (wire := _wire(snapshot, agent.name))}
    found: dict[str, SlowWriter] = {}
    for name, wire in wires.items():
        beside = {other: theirs for other, theirs in wires.items() if other != name}
        if not beside or wire.seconds_a_part < _SHORTEST_S:
            continue
        others = Wire(
            median(theirs.seconds_a_part for theirs in beside.values()),
            median(theirs.ns_a_byte for theirs in beside.values()),
            sum(theirs.parts for theirs in beside.values()),
            sum(theirs.bytes for theirs in beside.values()),
        )
        by_part = wire.seconds_a_part >= _TIMES * others.seconds_a_part
        if by_part and wire.ns_a_byte >= _TIMES * others.ns_a_byte:
            found[name] = SlowWriter(wire, others, tuple(sorted(beside)))
    return found


def _wire(snapshot: Snapshot, name: str) -> Wire | None:
    """Since the snapshot before where enough was sent since, else since the agent was started."""
    recent = snapshot.spent_since_before(name, "kvctl_stage_seconds", stage="wire")
    nbytes = snapshot.since_before(name, "kvctl_part_bytes_total")
    if recent is None or nbytes is None or recent.times < _PARTS:
        agent = snapshot.agents[name]
        recent, nbytes = agent.spent("kvctl_stage_seconds", stage="wire"), agent.total("kvctl_part_bytes_total")
    if not nbytes or recent.times < _PARTS:
        return None
    seconds = recent.seconds
    return Wire(seconds / recent.times, seconds * 1e9 / nbytes, int(recent.times), int(nbytes))
