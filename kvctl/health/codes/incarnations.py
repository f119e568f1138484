"""Who knows an agent by a life of it that is over."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount, text
from kvctl.health.codes.formatting import pair
from kvctl.health.snapshot import Agent, Snapshot

# Greetings are repeated until they are answered: after this much a new life is known to all who hear it.
_SETTLED_NS = 10_000_000_000


def stale_pairs(snapshot: Snapshot) -> Iterator[tuple[str, Agent, Agent]]:
    """Pairs of which one knows a life of the other that is over, long after the new one began."""
    for agent in snapshot.agents.values():
        patience_ns = max(agent.period_ns("lost_s"), _SETTLED_NS)
        for row in agent.peers:
            other = snapshot.agents.get(text(row, "peer"))
            known = text(row, "incarnation")
            if other is None or not known or not other.incarnation or known == other.incarnation:
                continue
            if min(amount(other.status, "uptime_ns"), amount(agent.status, "uptime_ns")) >= patience_ns:
                yield pair(agent.name, other.name), agent, other
