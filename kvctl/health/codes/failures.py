"""Rooms that failed of late, by first cause: every rank that knew a room tells of it, and it counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.health.answers import inner, number, text
from kvctl.health.snapshot import Snapshot

LATELY_NS = 600_000_000_000


@dataclass(frozen=True, slots=True)
class Failed:
    """One room that failed.

    Attributes:
        rank: the agent that found the cause.
        known_to: agents that know of it, the one that answered first in name order first.
        ago_ns: since it failed, by the clock of the agent that tells.
    """

    room: str
    code: str
    rank: str
    text: str
    known_to: tuple[str, ...]
    ago_ns: int


def failed_lately(snapshot: Snapshot) -> Mapping[str, Sequence[Failed]]:
    """By code, the latest first; use `snapshot.once(failed_lately)`."""
    rooms: dict[tuple[str, str, str, str], Failed] = {}
    for agent in snapshot.agents.values():
        for row in agent.known_rooms:
            failure = inner(row, "failure")
            code, rank, words = (text(failure, key) for key in ("code", "rank", "text"))
            at_ns = number(failure, "at_ns") if number(row, "finished_at_ns") is None else number(row, "finished_at_ns")
            if not code or at_ns is None:
                continue
            ago_ns = max(0, agent.now_ns - int(at_ns))
            if ago_ns > LATELY_NS:
                continue
            key = (text(row, "room"), code, rank, words)
            known = rooms.get(key)
            known_to = (agent.name,) if known is None else (*known.known_to, agent.name)
            ago_ns = ago_ns if known is None else max(ago_ns, known.ago_ns)
            rooms[key] = Failed(key[0], code, rank, words, tuple(dict.fromkeys(known_to)), ago_ns)
    found: dict[str, list[Failed]] = {}
    for failed in sorted(rooms.values(), key=lambda failed: failed.ago_ns):
        found.setdefault(failed.code, []).append(failed)
    return found


def all_names(snapshot: Snapshot) -> frozenset[str]:
    """Every agent that anybody here speaks of; use `snapshot.once(all_names)`."""
    peers = {text(row, "peer") for agent in snapshot.agents.values() for row in agent.peers}
    return frozenset(snapshot.agents) | peers
