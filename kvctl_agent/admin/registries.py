"""What the bootstrap registries have told this agent, rank by rank, missing ones with their coordinates."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl_agent.contract.snapshots import Bootstrap, RegisteredRank
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.protocol.registry import Rank, Roster

_MOST_MISSING = 256


def instances(agent: str, rosters: Iterable[tuple[str, Roster]]) -> list[Bootstrap]:
    """Answer to `bootstrap`.

    Args:
        rosters: endpoint of a registry and what it said last.
    """
    return [_instance(agent, endpoint, roster) for endpoint, roster in rosters]


def _instance(agent: str, endpoint: str, roster: Roster) -> Bootstrap:
    side = _side(roster.ranks[0].sizes) if roster.ranks else None
    registered = {tuple(rank.coord) for rank in roster.ranks}
    absent = [side.coord(unique) for unique in range(side.size)] if side is not None else []
    return {
        "agent": agent,
        "registry": endpoint,
        "expected": roster.size or None,
        "sizes": _axes(side.dp, side.pp, side.cp, side.tp) if side is not None else None,
        "registered": [_rank(rank) for rank in roster.ranks],
        "missing": [_axes(*coord) for coord in absent if tuple(coord) not in registered][:_MOST_MISSING],
        "text": roster.refused or roster.missing,
    }


def _rank(rank: Rank) -> RegisteredRank:
    return {
        "name": rank.name,
        "endpoint": rank.endpoint,
        "incarnation": f"{rank.incarnation:016x}",
        "rank": _axes(*rank.coord),
    }


def _side(sizes: list[int]) -> ParallelConfig | None:
    """None where a registry of a newer release, or a stranger, says what is no instance."""
    try:
        dp, pp, cp, tp = sizes
        return ParallelConfig(dp, pp, cp, tp)
    except (LayoutError, ValueError):
        return None


def _axes(*place: int) -> dict[str, int]:
    return dict(zip(RankCoord._fields, place, strict=False))
