"""Rooms that cannot begin: agents that wait for others before any room is there, and rooms that nobody opens."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount, text, texts
from kvctl.health.codes.failures import all_names
from kvctl.health.codes.silence import absent
from kvctl.health.codes.wording import counted, listed, named_in
from kvctl.health.finding import Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.views.units import duration

BOOTSTRAP = "KV_ROOM_STUCK_BOOTSTRAP"

_STARTS_WITHIN_NS = 60_000_000_000


def not_there(snapshot: Snapshot) -> Iterator[Finding]:
    """Agents that wait for others before any room is there."""
    by_wait: dict[str, list[Agent]] = {}
    for agent in snapshot.agents.values():
        waits = text(agent.status, "waiting_for")
        names = named_in(waits, snapshot.once(all_names) | snapshot.once(absent))
        if not waits or any(name in snapshot.once(absent) for name in names):
            continue
        if agent.status.get("draining") or amount(agent.status, "uptime_ns") < _STARTS_WITHIN_NS:
            continue
        by_wait.setdefault(waits, []).append(agent)
    for waits, agents in by_wait.items():
        names = sorted(agent.name for agent in agents)
        uptime = max(int(amount(agent.status, "uptime_ns")) for agent in agents)
        yield Finding(
            code=BOOTSTRAP,
            severity=Severity.WARNING,
            subject=names[0],
            agents=tuple(names),
            since_ns=uptime,
            weight=len(names),
            evidence={"waiting_for": waits, "uptime_ns": uptime, "waiting_agents": names},
            cause=f"{listed(names)} cannot serve, {duration(uptime)} after the start: {waits}",
            remedy="`kvctl agents` shows who runs; start those that are missing",
        )


def never_opened(snapshot: Snapshot) -> Iterator[Finding]:
    """Rooms that a prefill engine has announced and no decode rank has opened, at half of their time."""
    decode = list(snapshot.of_role("decode"))
    if not decode or snapshot.once(absent) or not all(agent.rooms_complete for agent in decode):
        return
    opened = {text(row, "room") for agent in decode for row in agent.rooms}
    for agent in snapshot.of_role("prefill"):
        limit_ns = agent.period_ns("bootstrap_timeout_s") // 2
        late = [
            row
            for row in agent.rooms
            if text(row, "state") == "Bootstrapping"
            and amount(row, "state_age_ns") >= limit_ns
            and text(row, "room") not in opened
            and not texts(row, "peers")
        ]
        if not late:
            continue
        room, age = text(late[0], "room"), int(amount(late[0], "state_age_ns"))
        yield Finding(
            code=BOOTSTRAP,
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            since_ns=age,
            weight=len(late),
            evidence={"rooms_total": len(late), "oldest_room": room, "state_age_ns": age},
            cause=f"the engine of {agent.name} began {counted(len(late), 'room')} that no decode rank has opened, the "
            f"oldest, room {room}, {duration(age)} ago",
            remedy=f"see whether the router sent room {room} to a decode instance that knows this prefill instance; "
            f"`kvctl rooms abort {room}` ends it",
        )
