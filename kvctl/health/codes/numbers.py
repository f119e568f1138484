"""Numbers that cannot be: dashboards and decisions made from them would lie."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount, inner, number, rows, text
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot

# Far above what any card's NVLink or network carries.
_FASTEST_GB_PER_S = 10_000.0


def _implausible(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        wrong = {**_below_zero(agent), **_beyond(agent), **_shrunk(snapshot, agent)}
        if not wrong:
            continue
        metric, (value, why) = next(iter(wrong.items()))
        yield Finding(
            code="KV_METRIC_IMPLAUSIBLE",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            weight=len(wrong),
            evidence={name: value for name, (value, _) in wrong.items()},
            cause=f"{agent.name} reports {metric} = {value:g}, {why}",
            remedy=f"`kvctl debug bundle bundle.tar.zst` saves what is to be reported; trust nothing that is "
            f"derived from {metric} meanwhile",
        )


_Wrong = dict[str, tuple[float, str]]


def _below_zero(agent: Agent) -> _Wrong:
    found: _Wrong = {}
    for name, family in agent.families.items():
        for sample in rows(family.get("samples")):
            for value in (number(sample, "value"), number(sample, "sum"), number(sample, "count")):
                if value is not None and value < 0:
                    found[name] = value, "which is below zero"
    rate = number(inner(agent.status, "rate"), "gb_per_s")
    if rate is not None and rate < 0:
        found["rate.gb_per_s"] = rate, "which is below zero"
    return found


def _beyond(agent: Agent) -> _Wrong:
    found: _Wrong = {}
    rate = number(inner(agent.status, "rate"), "gb_per_s")
    if rate is not None and rate > _FASTEST_GB_PER_S:
        found["rate.gb_per_s"] = rate, f"above the {_FASTEST_GB_PER_S:g} GB/s of any lane"
    ring = inner(agent.staging, "ring")
    if amount(ring, "high_water_bytes") > amount(ring, "size_bytes"):
        found["ring.high_water_bytes"] = amount(ring, "high_water_bytes"), "more than the ring has"
    for row in agent.rooms:
        coverage = inner(row, "coverage")
        planned = number(coverage, "planned")
        for key in ("sent", "landed", "scattered"):
            cells = number(coverage, key)
            if planned and cells is not None and cells > planned:
                what = f"more cells than the {planned:g} planned of room {text(row, 'room')}"
                found[f"coverage.{key}"] = cells, what
    return found


def _shrunk(snapshot: Snapshot, agent: Agent) -> _Wrong:
    """Counters that went down in one life of an agent."""
    then = snapshot.earlier(agent.name)
    if then is None:
        return {}
    found: _Wrong = {}
    for name, family in agent.families.items():
        after, earlier = agent.total(name), then.total(name)
        if text(family, "kind") == "counter" and after is not None and earlier is not None and after < earlier:
            found[name] = after, f"less than the {earlier:g} of a moment ago"
    return found


METRIC_IMPLAUSIBLE = Code(
    name="KV_METRIC_IMPLAUSIBLE",
    sees="dashboards show what cannot be",
    means="Some number is below zero, a counter went down in one life of the agent, a rate is above what any lane "
    "carries, or a room has more cells than it was planned with. Here throughput is bytes over the wall-clock union of "
    "the transfers' spans, so it cannot exceed the lane.",
    remedy="Report it with a debug bundle, and do not trust what is derived from the number.",
    severity=Severity.WARNING,
    find=_implausible,
    alert="min by (instance) (kvctl_ring_used_bytes) < 0",
)
