"""Agents that cannot serve yet, long after their start."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount, inner, text
from kvctl.health.codes.draining import BOOTSTRAP
from kvctl.health.codes.failures import all_names
from kvctl.health.codes.formatting import counted, listed, named_in
from kvctl.health.codes.silence import absent
from kvctl.health.codes.stuck import stuck_rooms
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

_STARTS_WITHIN_NS = 60_000_000_000


def _not_ready(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for all agents that wait for the same; none where stuck rooms or a silent agent say it."""
    known = snapshot.once(all_names) | snapshot.once(absent)
    told = {stuck.ends.agent.name for stuck in snapshot.once(stuck_rooms) if stuck.code == BOOTSTRAP}
    by_wait: dict[str, list[Agent]] = {}
    for agent in snapshot.agents.values():
        waits = text(agent.status, "waiting_for")
        if not waits or agent.name in told or any(name in snapshot.once(absent) for name in named_in(waits, known)):
            continue
        if agent.status.get("draining") or amount(agent.status, "uptime_ns") < _STARTS_WITHIN_NS:
            continue
        by_wait.setdefault(waits, []).append(agent)
    for waits, agents in by_wait.items():
        names = [agent.name for agent in agents]
        uptime = max(int(amount(agent.status, "uptime_ns")) for agent in agents)
        done = int(sum(amount(inner(agent.status, "rooms_finished_total"), "Success") for agent in agents))
        cause = f"{listed(names)} cannot serve, {duration(uptime)} after the start: {waits}"
        if done:
            verb = "waits" if len(names) == 1 else "wait"
            cause = (
                f"{listed(names)} {verb}, {duration(uptime)} after the start: {waits}; rooms that need none of this "
                f"are served ({counted(done, 'room')} done)"
            )
        yield Finding(
            code="KV_NOT_READY",
            severity=Severity.WARNING,
            subject=names[0],
            agents=tuple(names),
            since_ns=uptime,
            weight=len(names),
            evidence={"waiting_for": waits, "uptime_ns": uptime, "waiting_agents": names, "done_rooms_total": done},
            cause=cause,
            remedy="`kvctl bootstrap` shows which ranks have registered and which registries do not answer: start "
            "those that are missing, or take the instance out of the agent's configuration",
        )


NOT_READY = Code(
    name="KV_NOT_READY",
    sees="an agent is up and cannot serve, or cannot serve with one of its instances",
    means="A prefill rank waits for its registry; a decode rank waits until every rank of its prefill instances is "
    "registered and has said hello. An agent that has waited for a minute is reported, whether or not rooms need what "
    "it waits for. Rooms that are stuck because of it are KV_ROOM_STUCK_BOOTSTRAP, and then this is not reported.",
    remedy="Start the ranks that are missing, or take the instance out of the agent's configuration.",
    severity=Severity.WARNING,
    find=_not_ready,
)
