"""A ring that is too small for its load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from kvctl.health.answers import amount
from kvctl.health.codes.formatting import counted, listed
from kvctl.health.codes.ring import gated_behind, ring_of
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot, Spent
from kvctl.render.units import duration, percent, size

_PARTS = 20
_FULL = 0.9
# Of the time between ready and sent. A ring that is somewhat small costs little: bytes wait here or elsewhere.
_SHARE = 0.8
_LONG_S = 2.0
# A short look tells of a short while: what was so for the whole life of an agent is believed at once.
_LONG_LOOK_NS = 10_000_000_000
_STAGES = ("gate", "queue", "gather", "post", "wire")
_METRIC = "kvctl_stage_seconds"
_MIB = 1 << 20


class Gate(NamedTuple):
    """What one writer's parts waited for rings: as a share of their time from ready to sent, and each."""

    share: float
    seconds: float


def gated_writers(snapshot: Snapshot) -> Mapping[str, Gate]:
    """Writers whose parts spend their time waiting for rings; use `snapshot.once(gated_writers)`."""
    found: dict[str, Gate] = {}
    for agent in snapshot.of_role("prefill"):
        lately = [snapshot.spent_since_before(agent.name, _METRIC, stage=stage) for stage in _STAGES]
        gate = _gate([one for one in lately if one is not None])
        if gate is None or gate.share < _SHARE or gate.seconds < _LONG_S:
            continue
        life = _gate([agent.spent(_METRIC, stage=stage) for stage in _STAGES])
        if snapshot.since_ns >= _LONG_LOOK_NS or (life and life.share >= _SHARE / 2 and life.seconds >= _LONG_S / 2):
            found[agent.name] = gate
    return found


def _gate(stages: Sequence[Spent]) -> Gate | None:
    total = sum(stage.seconds for stage in stages)
    if not stages or stages[0].times < _PARTS or not total:
        return None
    return Gate(stages[0].seconds / total, stages[0].seconds / stages[0].times)


def _small(snapshot: Snapshot) -> Iterator[Finding]:
    gates = snapshot.once(gated_writers)
    if not gates:
        return
    for agent in snapshot.of_role("decode"):
        ring = ring_of(agent)
        total, high = amount(ring, "size_bytes"), amount(ring, "high_water_bytes")
        waiting = [gated for gated in gated_behind(snapshot, agent.name) if gated.writer in gates]
        if not waiting or not total or high < _FULL * total or snapshot.once(absent):
            continue
        waiting_bytes = int(sum(amount(gated.row, "bytes") for gated in waiting))
        needed = ceil((total + waiting_bytes) / _MIB)
        writers = sorted({gated.writer for gated in waiting})
        share, mean_s = max(gates[name] for name in writers)
        yield Finding(
            code="KV_RING_SMALL",
            severity=Severity.WARNING,
            subject=f"{agent.name} ring",
            agents=(agent.name, *writers),
            since_ns=snapshot.since_ns,
            weight=waiting_bytes,
            evidence={
                "gate_ratio": round(share, 3),
                "gate_a_part_ns": round(mean_s * 1e9),
                "ring_bytes": int(total),
                "high_water_bytes": int(high),
                "waiting_bytes": waiting_bytes,
                "waiting_parts": len(waiting),
                "needed_ring_mb": needed,
            },
            cause=f"parts of {listed(writers)} waited {duration(mean_s * 1e9)} each for {agent.name}'s ring of "
            f"{size(total)}, {percent(share)} of the time from ready to sent; "
            f"{counted(len(waiting), 'part')} ({size(waiting_bytes)}) wait now",
            remedy=f"`kvctl staging -e {agent.name} -e {writers[0]}` shows the ring and what waits for it; start "
            f"{agent.name} with a staging_ring_mb of {needed} or more: what waits now would have found room",
        )


RING_SMALL = Code(
    name="KV_RING_SMALL",
    sees="throughput goes up and down like a saw, writers are gated most of the time",
    means="The ring has been full, and the writers' parts spend most of their time waiting for the watermark of a full "
    "ring, two seconds or more each. The size that would have sufficed is the ring's plus what waits for it now.",
    remedy="Raise staging_ring_mb on the decode rank.",
    severity=Severity.WARNING,
    find=_small,
    alert='sum by (instance) (rate(kvctl_stage_seconds_sum{stage="gate"}[5m])) > sum by (instance) '
    '(rate(kvctl_stage_seconds_count{stage="gate"}[5m]))',
)
