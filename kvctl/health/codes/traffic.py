"""Traffic that is not there, or that comes twice."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount
from kvctl.health.codes.draining import unanswered_rooms
from kvctl.health.codes.failures import all_names, failed_lately
from kvctl.health.codes.formatting import counted, listed, named_in
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration

_ROOMS = 8
_WAITED_NS = 20_000_000_000
_SUCCESSES = 20


def _idle(snapshot: Snapshot) -> Iterator[Finding]:
    decode = list(snapshot.of_role("decode"))
    if decode and all(agent.total("kvctl_rooms_opened_total") == 0 for agent in decode):
        yield from _never_asked(snapshot)
    for agent in decode:
        successes = snapshot.since_before(agent.name, "kvctl_rooms_finished_total", result="Success")
        nbytes = snapshot.since_before(agent.name, "kvctl_part_bytes_total")
        if successes is None or successes < _SUCCESSES or nbytes != 0:
            continue
        yield Finding(
            code="KV_IDLE",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name,),
            since_ns=snapshot.since_ns,
            weight=1,
            evidence={"successes_since_before": int(successes), "bytes_since_before": 0},
            cause=f"{counted(successes, 'room')} of {agent.name} succeeded in the last {duration(snapshot.since_ns)} "
            "and not a byte of KV came with them",
            remedy=f"`kvctl rooms history -e {agent.name}` shows their pages: with 0 pages each, the decode engine "
            "computes the prompts itself or asks for prefill only",
        )


def _never_asked(snapshot: Snapshot) -> Iterator[Finding]:
    """The engines of prefill ranks begin rooms, and no decode rank was ever told of one."""
    waiting = [
        (agent, row)
        for agent, row in unanswered_rooms(snapshot, refused=False)
        if amount(row, "state_age_ns") >= _WAITED_NS
    ]
    if len(waiting) < _ROOMS:
        return
    prefill = sorted({agent.name for agent, _ in waiting})
    decode = sorted(agent.name for agent in snapshot.of_role("decode"))
    age = max(int(amount(row, "state_age_ns")) for _, row in waiting)
    yield Finding(
        code="KV_IDLE",
        severity=Severity.WARNING,
        subject=decode[0],
        agents=(*decode, *prefill),
        since_ns=age,
        weight=len(waiting),
        evidence={"waiting_rooms": len(waiting), "opened_rooms": 0, "prefill": prefill, "decode": decode},
        cause=f"{listed(prefill)} began {counted(len(waiting), 'room')} and {listed(decode)} never opened one: "
        "requests reach the prefill side alone",
        remedy="`kvctl agents` lists the decode ranks that are here; the router's log tells to which it sends these "
        "requests",
    )


IDLE = Code(
    name="KV_IDLE",
    sees="everything is green, and disaggregation does nothing",
    means="Requests flow and no KV is transferred: the router sends requests to one side only, or the decode engine "
    "computes the prompts itself, so rooms succeed without a byte.",
    remedy="Look at the router: which workers it knows, and whether it gives both sides the same room.",
    severity=Severity.WARNING,
    find=_idle,
    alert="sum(rate(kvctl_rooms_finished_total[10m])) > 0 and sum(rate(kvctl_part_bytes_total[10m])) == 0",
)


def _duplicate(snapshot: Snapshot) -> Iterator[Finding]:
    by_rank: dict[str, list[str]] = {}
    failures = snapshot.once(failed_lately).get("KV_ROOM_DUPLICATE", ())
    for failed in failures:
        by_rank.setdefault(failed.rank, []).append(failed.room)
    for rank, rooms in by_rank.items():
        latest = next(failed for failed in failures if failed.rank == rank)
        holders = [name for name in named_in(latest.text, snapshot.once(all_names)) if name != rank]
        asked = [name for name in latest.known_to if name not in (*holders, rank)]
        yield Finding(
            code="KV_ROOM_DUPLICATE",
            severity=Severity.WARNING,
            subject=f"room {latest.room}" if len(rooms) == 1 else rank,
            agents=tuple(dict.fromkeys((rank, *holders, *asked))),
            since_ns=latest.ago_ns,
            weight=len(rooms),
            evidence={
                "failed_rooms": len(rooms),
                "rooms": rooms[:8],
                "active_for": holders,
                "asked_by": asked,
                "latest": latest.text,
            },
            cause=f"room {latest.room} was opened by {listed(asked or ['another decode rank'])} while it was active "
            f"for {listed(holders or ['one'])} on {rank}"
            + (f", as were {counted(len(rooms) - 1, 'more room')}" if len(rooms) > 1 else ""),
            remedy=f"`kvctl rooms show {latest.room}` shows both; the router must give every request a room number of "
            "its own, at random from 64 bits",
        )


ROOM_DUPLICATE = Code(
    name="KV_ROOM_DUPLICATE",
    sees="single requests fail at once, more of them the more there are in flight",
    means="Two requests have the same bootstrap_room at the same time. The second one is refused, since its bytes "
    "would land in the first one's pages. Room numbers are the router's: it retries with the same number, or draws "
    "them from too few.",
    remedy="Let the router draw each number from 64 random bits, and a new one for each retry.",
    severity=Severity.WARNING,
    find=_duplicate,
    alert='sum by (instance) (increase(kvctl_room_failures_total{code="KV_ROOM_DUPLICATE"}[10m])) > 0',
)
