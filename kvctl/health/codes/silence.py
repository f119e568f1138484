"""Who is silent to whom: what a lost agent leaves behind is explained by it, and not reported room by room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.client.faults import SILENT
from kvctl.health.answers import amount, number, text
from kvctl.health.snapshot import Snapshot

# Short settings make a busy agent suspect whenever its process gets no core for a moment.
_SHORTEST_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Silence:
    """What one agent says of a peer that it does not hear.

    Attributes:
        lost: it was given up; else it is suspect.
        closed: it said goodbye.
        for_ns: since it was last heard; None where it never was.
        rooms: that still wait for it.
        error: why it was given up, in the agent's words.
    """

    agent: str
    role: str
    peer: str
    lost: bool
    closed: bool
    for_ns: int | None
    rooms: int
    error: str


def silences(snapshot: Snapshot) -> Mapping[str, list[Silence]]:
    """By the agent that is not heard; use `snapshot.once(silences)`."""
    found: dict[str, list[Silence]] = {}
    for agent in snapshot.agents.values():
        shortest_ns = max(agent.period_ns("suspect_s"), _SHORTEST_NS)
        for row in agent.peers:
            state, heard, error = text(row, "state"), number(row, "last_heard_ns"), text(row, "last_error")
            lost = state == "lost"
            if lost or (state == "suspect" and heard is not None and heard >= shortest_ns):
                found.setdefault(text(row, "peer"), []).append(
                    Silence(
                        agent.name,
                        agent.role,
                        text(row, "peer"),
                        lost,
                        error.endswith("it was closed"),
                        None if heard is None else int(heard),
                        int(amount(row, "rooms")),
                        error if lost else "",
                    )
                )
    return found


def mute_agents(snapshot: Snapshot) -> frozenset[str]:
    """Agents that do not answer us although somebody's socket is there: stopped, or without a core."""
    return frozenset(fault.agent for fault in snapshot.faults if fault.code in SILENT)


def absent(snapshot: Snapshot) -> frozenset[str]:
    """Agents that explain why others wait: silent to a peer or to us, or gone; use `snapshot.once(absent)`."""
    gone = {endpoint.name for endpoint in snapshot.survey.discovery.stale}
    return frozenset(snapshot.once(silences)) | mute_agents(snapshot) | gone
