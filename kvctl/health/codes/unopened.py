"""Rooms that a prefill engine has announced and that no decode rank opens."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount, text, texts
from kvctl.health.codes.draining import unopened_for_drain
from kvctl.health.codes.formatting import counted, listed
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration

BOOTSTRAP = "KV_ROOM_STUCK_BOOTSTRAP"


def never_opened(snapshot: Snapshot) -> Iterator[Finding]:
    """Rooms that a prefill engine has announced and no decode rank has opened, at half of their time."""
    decode = list(snapshot.of_role("decode"))
    if not decode or snapshot.once(absent) or not all(agent.rooms_complete for agent in decode):
        return
    opened = {text(row, "room") for agent in decode for row in agent.rooms}
    late: dict[str, float] = {}
    agents: list[str] = []
    for agent in snapshot.of_role("prefill"):
        limit_ns = agent.period_ns("bootstrap_timeout_s") // 2
        mine = {
            text(row, "room"): amount(row, "state_age_ns")
            for row in agent.rooms
            if text(row, "state") == "Bootstrapping"
            and amount(row, "state_age_ns") >= limit_ns
            and text(row, "room") not in opened
            and not texts(row, "peers")
            and not unopened_for_drain(snapshot, amount(row, "state_age_ns"))
        }
        if mine:
            late |= mine
            agents.append(agent.name)
    if not late:
        return
    room = max(late, key=lambda each: late[each])
    age = int(late[room])
    engines = f"engine{'s' * (len(agents) > 1)} of {listed(agents)}"
    yield Finding(
        code=BOOTSTRAP,
        severity=Severity.WARNING,
        subject=agents[0],
        agents=tuple(agents),
        since_ns=age,
        weight=len(late),
        evidence={"waiting_rooms": len(late), "oldest_room": room, "state_age_ns": age, "prefill": agents},
        cause=f"the {engines} began {counted(len(late), 'room')} that no decode rank has opened, the oldest, room "
        f"{room}, {duration(age)} ago",
        remedy=f"`kvctl rooms show {room}` shows who knows it; see whether the router sent it to a decode instance "
        f"that knows this prefill instance; `kvctl rooms abort {room}` ends it",
    )
