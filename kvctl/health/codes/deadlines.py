"""Rooms that ran into their deadline of late: one room is told once, whichever of its ends gave it up first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kvctl.health.codes.draining import expired_for_drain
from kvctl.health.codes.failures import Failed, all_names, failed_lately
from kvctl.health.codes.formatting import counted, listed, named_in
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration


def by_culprit(snapshot: Snapshot, code: str, live: Collection[str]) -> dict[str, list[Failed]]:
    """Rooms that failed with this code, by the agent that they waited for, the latest first.

    Args:
        live: rooms that some rank still waits for, and that are told of as such.
    """
    rooms: dict[str, list[Failed]] = {}
    for failed in snapshot.once(failed_lately).get(code, ()):
        if failed.room not in live and not expired_for_drain(snapshot, failed):
            rooms.setdefault(failed.room, []).append(failed)
    found: dict[str, list[Failed]] = {}
    for told in rooms.values():
        names = [name for failed in told for name in _named(snapshot, failed)]
        if any(name in snapshot.once(absent) for name in names):
            continue  # who is absent explains them
        first = _nearest(snapshot, told)
        found.setdefault(next(iter(_named(snapshot, first)), _teller(snapshot, first, told)), []).append(first)
    return found


def _nearest(snapshot: Snapshot, told: Sequence[Failed]) -> Failed:
    """Of what a room's ends say, what is nearest to the cause.

    Their deadlines are over within moments of each other, so that several give the room up before they hear of it. Each
    names whom it waited for: the last of them waited for nobody else who tells. Where no end names another, a prefill
    rank waited for a decode rank to open the room, and the decode rank says what kept it from that.
    """
    ranks = {failed.rank for failed in told}

    def distance(failed: Failed) -> tuple[int, bool]:
        agent = snapshot.agents.get(failed.rank)
        others = ranks.intersection(_named(snapshot, failed)) - {failed.rank}
        return len(others), agent is None or agent.role != "decode"

    first = min(told, key=distance)
    known_to = dict.fromkeys(name for failed in told for name in (failed.rank, *failed.known_to))
    return replace(first, known_to=tuple(known_to))


def _teller(snapshot: Snapshot, first: Failed, told: Sequence[Failed]) -> str:
    """Whose finding it is where a rank waited for nobody in particular.

    A room that no decode rank opened fails at all its prefill ranks alike: the same one of them stands for all.
    """
    ranks = sorted({failed.rank for failed in told})
    roles = {snapshot.agents[rank].role for rank in ranks if rank in snapshot.agents}
    return ranks[0] if roles == {"prefill"} and len(ranks) > 1 else first.rank


def _named(snapshot: Snapshot, failed: Failed) -> list[str]:
    return named_in(failed.text, snapshot.once(all_names))


def ended(snapshot: Snapshot, code: str, culprit: str, failures: Sequence[Failed]) -> Finding:
    """The finding about rooms that waited for one agent."""
    latest = failures[0]
    told_by = listed(dict.fromkeys(one.rank for one in failures))
    return Finding(
        code=code,
        severity=Severity.WARNING,
        subject=f"room {latest.room}" if len(failures) == 1 else culprit,
        agents=tuple(dict.fromkeys((culprit, *_named(snapshot, latest), latest.rank, *latest.known_to))),
        since_ns=latest.ago_ns,
        weight=len(failures),
        evidence={
            "failed_rooms": len(failures),
            "rooms": [one.room for one in failures[:8]],
            "latest_ago_ns": latest.ago_ns,
            "latest": latest.text,
        },
        cause=f"{counted(len(failures), 'room')} ran into the deadline on {told_by}, last {duration(latest.ago_ns)} "
        f"ago: {latest.text}",
        remedy=f"`kvctl rooms show {latest.room}` shows what it waited for at both ends",
    )


def with_ended(finding: Finding, failures: Sequence[Failed]) -> Finding:
    """A finding about rooms that wait now, with those that waited for the same agent in vain."""
    if not failures:
        return finding
    return replace(
        finding,
        evidence={**finding.evidence, "failed_rooms": len(failures)},
        cause=f"{finding.cause}; {counted(len(failures), 'room')} before it ran into the deadline, "
        f"last {duration(failures[0].ago_ns)} ago",
    )
