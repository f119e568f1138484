"""What an operator can tell the fleet from the TUI: which calls to which agents, and the question that comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.client.calls import Call
from kvctl.render.view import Row
from kvctl.tui.store import Store
from kvctl_agent.contract.commands import COMMANDS_BY_NAME

_REASON = "aborted by an operator in kvctl top"


@dataclass(frozen=True, slots=True)
class Action:
    """Calls to agents by name, and what to ask before they are sent."""

    question: str
    calls: Sequence[tuple[str, Call]]


def abort(store: Store, room: str) -> Action | str:
    """Fails a room on every rank that is known to take part; or why that cannot be."""
    agents = sorted({row["agent"] for row in [*store.rows("rooms"), *store.rows("room")] if row["room"] == room})
    if not agents:
        return f"no agent that answers knows room {room}"
    refused = _refused(store, agents, "abort")
    if refused:
        return refused
    calls = [(agent, Call("abort", {"room": room, "reason": _REASON})) for agent in agents]
    return Action(f"Abort room {room} on {', '.join(agents)}?\nIts request fails; nothing else does.", calls)


def release(store: Store, row: Row) -> Action | str:
    """Gives up an allocation of a ring; or why that cannot be."""
    agent = str(row["agent"])
    refused = _refused(store, [agent], "release")
    if refused:
        return refused
    what = f"allocation {row['serial']} of room {row['room']} ({row['state']}) in the ring of {agent}"
    question = f"Release {what}?\nIts writer {row['writer']} must not write any more."
    return Action(question, [(agent, Call("release", {"serial": row["serial"]}))])


def _refused(store: Store, agents: Sequence[str], command: str) -> str:
    declared = COMMANDS_BY_NAME[command]
    for agent in agents:
        if not store.may(agent, declared.level):
            return f"{agent} lets us {store.agents[agent].level} only, {command} needs {declared.level.label}"
    return ""
