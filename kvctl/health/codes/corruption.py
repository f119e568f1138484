"""What must be 0: bytes that are not those that were sent, or that were where others were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvctl.health.codes.failures import Failed, all_names, failed_lately
from kvctl.health.codes.formatting import counted, listed, named_in
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

_FAILURES = "kvctl_room_failures_total"


def _find(code: str, what: str, remedy: str) -> Callable[[Snapshot], Iterator[Finding]]:
    """Rooms that failed with this code: lately, with their cause; or ever, as the counter says."""

    def find(snapshot: Snapshot) -> Iterator[Finding]:
        lately = snapshot.once(failed_lately).get(code, ())
        by_culprit: dict[str, list[Failed]] = {}
        for failed in lately:
            names = named_in(failed.text, snapshot.once(all_names))
            by_culprit.setdefault(next((name for name in names if name != failed.rank), failed.rank), []).append(failed)
        for culprit, rooms in by_culprit.items():
            yield _lately(code, what, remedy, culprit, rooms)
        told = {name for failed in lately for name in failed.known_to}
        for agent in snapshot.agents.values():
            ever = agent.total(_FAILURES, code=code) or 0
            if ever > 0 and agent.name not in told:
                yield _ever(code, what, remedy, agent, ever)

    return find


def _lately(code: str, what: str, remedy: str, culprit: str, rooms: list[Failed]) -> Finding:
    latest = rooms[0]
    found_by = sorted({failed.rank for failed in rooms})
    return Finding(
        code=code,
        severity=Severity.CRITICAL,
        subject=culprit,
        agents=tuple(dict.fromkeys((culprit, *found_by, *latest.known_to))),
        since_ns=latest.ago_ns,
        weight=len(rooms),
        evidence={
            "failed_rooms": len(rooms),
            "found_by": found_by,
            "latest_room": latest.room,
            "latest_ago_ns": latest.ago_ns,
            "latest": latest.text,
        },
        cause=f"{what} in {counted(len(rooms), 'room')} found by {listed(found_by)}, last {duration(latest.ago_ns)} "
        f"ago in room {latest.room}: {latest.text}",
        remedy=f"`kvctl rooms show {latest.room}` shows the part and its path; {remedy}",
    )


def _ever(code: str, what: str, remedy: str, agent: Agent, count: float) -> Finding:
    return Finding(
        code=code,
        severity=Severity.WARNING,
        subject=agent.name,
        agents=(agent.name,),
        weight=count,
        evidence={"failed_rooms": int(count)},
        cause=f"{what} in {counted(count, 'room')} of {agent.name} since it was started, none of them lately",
        remedy=f"`kvctl events -e {agent.name}` may still tell of it; {remedy}",
    )


_SAVE = "save `kvctl debug bundle bundle.tar.zst` and report it: this must never happen"

CHECKSUM_MISMATCH = Code(
    name="KV_CHECKSUM_MISMATCH",
    sees="wrong text with HTTP 200, or rooms that fail although everything arrived",
    means="With checksum on, the writer sends a checksum of each part's bytes beside them and the reader compares it "
    "with what is in its pages. They differ: the bytes changed between the writer's memory and the reader's pages, or "
    "pages were computed again while they were sent. The room fails rather than answer with wrong text.",
    remedy="See which writer and which path the parts share: one writer points to its host's memory or network card, "
    "one path (staged, slice) to a bug. Take that rank out of service first.",
    severity=Severity.CRITICAL,
    find=_find(
        "KV_CHECKSUM_MISMATCH",
        "bytes that arrived are not those that were sent,",
        "take the writer out of service until its memory and network card are checked",
    ),
    alert=f'sum by (instance) (increase({_FAILURES}{{code="KV_CHECKSUM_MISMATCH"}}[10m])) > 0',
)

PAGE_REUSED = Code(
    name="KV_PAGE_REUSED",
    sees="corruption after rooms were aborted or timed out",
    means="Pages or ring regions were given to another room while a write to them was still under way. Everything here "
    "is built so that this cannot be: memory is released when its writer has said that nothing is in flight, or is "
    "proven dead.",
    remedy="Save a debug bundle and report it.",
    severity=Severity.CRITICAL,
    find=_find("KV_PAGE_REUSED", "memory was reused under a write", _SAVE),
    alert=f'sum by (instance) (increase({_FAILURES}{{code="KV_PAGE_REUSED"}}[10m])) > 0',
)

READY_VIOLATION = Code(
    name="KV_READY_VIOLATION",
    sees="text that is wrong at the edges of chunks",
    means="A part was posted before the event that says that its pages are computed.",
    remedy="Save a debug bundle and report it.",
    severity=Severity.CRITICAL,
    find=_find("KV_READY_VIOLATION", "a part was sent before it was computed", _SAVE),
    alert=f'sum by (instance) (increase({_FAILURES}{{code="KV_READY_VIOLATION"}}[10m])) > 0',
)
