"""Health codes about rooms: corrupt data, duplicate room numbers, missing traffic, internal errors."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.client.metrics.names import Use
from kvctl.health.answers import amount
from kvctl.health.codes.engine_metrics import counted_by_engines
from kvctl.health.codes.facts import (
    FailedRoom,
    all_names,
    failed_by_instance,
    failed_rooms,
    failure_alert,
    failure_finding,
    unopened_rooms,
)
from kvctl.health.finding import Code, Finding, Severity, counted, health_code, listed, named_in
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration

_MIN_WAITING_ROOMS = 8
_MIN_WAIT_NS = 20_000_000_000
_MIN_SUCCESSES = 20
_REPORT = "save `kvctl record incident.kvrec --for 2s` and report it: this must never happen"


# ---- corrupt data ----------------------------------------------------------------------------------------------


def _corruption(snapshot: Snapshot, code: Code, symptom: str, remedy: str) -> Iterator[Finding]:
    """Yields findings about data corruption detected under this code.

    Recent failures are grouped by the agent that the failure text blames; for earlier failures only the agent's counter
    is reported.

    Args:
        symptom: description of the corruption, the beginning of the cause.
    """
    recent = snapshot.once(failed_rooms).get(code.name, ())
    by_culprit: dict[str, list[FailedRoom]] = {}
    for failed in recent:
        names = named_in(failed.text, snapshot.once(all_names))
        by_culprit.setdefault(next((name for name in names if name != failed.rank), failed.rank), []).append(failed)
    for culprit, failures in by_culprit.items():
        found_by = sorted({failed.rank for failed in failures})
        yield failure_finding(
            snapshot,
            code,
            failures,
            f"{symptom} in {counted(len(failures), 'room')}, found by {listed(found_by)}",
            f"the part and its path; {remedy}",
            subject=culprit,
            agents=(culprit, *found_by),
            evidence={"found_by": found_by},
        )
    reported = {name for failed in recent for name in failed.known_to}
    for agent in snapshot.agents.values():
        count = agent.total("kvctl_room_failures_total", code=code.name) or 0
        if count > 0 and agent.name not in reported:
            yield code.finding(
                agent.name,
                severity=Severity.WARNING,
                weight=count,
                evidence={"failed_rooms": int(count)},
                cause=f"{symptom} in {counted(count, 'room')} of {agent.name} since its start, but not recently",
                remedy=f"`kvctl events -e {agent.name}` may still contain the event; {remedy}",
            )


@health_code(
    "KV_CHECKSUM_MISMATCH",
    Severity.CRITICAL,
    "rooms",
    sees="wrong text with HTTP 200, or rooms that fail although all data arrived",
    means="With checksum on, the writer sends a checksum with each part, and the decode rank compares it with the "
    "bytes in its pages. They differ: the bytes changed between the writer's memory and the decode rank's pages, or "
    "the writer's pages were overwritten while they were sent. The room fails, so that no wrong text is produced.",
    remedy="Find out which writer and which path the parts have in common: a single writer points to memory or the "
    "network card of its host, a single path (staged, slice) to a bug. Take that rank out of service first.",
    alert=failure_alert("KV_CHECKSUM_MISMATCH"),
)
def checksum_mismatch(snapshot: Snapshot) -> Iterator[Finding]:
    return _corruption(
        snapshot,
        checksum_mismatch,
        "received bytes differ from the bytes sent",
        "take the writer out of service until its memory and network card are checked",
    )


@health_code(
    "KV_PAGE_REUSED",
    Severity.CRITICAL,
    "rooms",
    sees="corruption after rooms were aborted or timed out",
    means="Pages or ring regions were given to another room while a write to them was still in flight. The design "
    "excludes this: memory is released only when its writer has reported that nothing is in flight, or is proven dead.",
    remedy="Save a recording and report it.",
    alert=failure_alert("KV_PAGE_REUSED"),
)
def page_reused(snapshot: Snapshot) -> Iterator[Finding]:
    return _corruption(snapshot, page_reused, "memory was reused during a write", _REPORT)


@health_code(
    "KV_READY_VIOLATION",
    Severity.CRITICAL,
    "rooms",
    sees="text that is wrong at the edges of chunks",
    means="A part was posted before the event that reports that its pages are computed.",
    remedy="Save a recording and report it.",
    alert=failure_alert("KV_READY_VIOLATION"),
)
def ready_violation(snapshot: Snapshot) -> Iterator[Finding]:
    return _corruption(snapshot, ready_violation, "a part was sent before it was computed", _REPORT)


# ---- traffic ---------------------------------------------------------------------------------------------------


@health_code(
    "KV_IDLE",
    Severity.WARNING,
    "rooms",
    sees="no errors, but no KV is transferred",
    means="Requests arrive and no KV is transferred: the router sends requests to one side only, or the decode engine "
    "computes the prompts itself, so that rooms succeed without a byte.",
    remedy="Check the router: which workers it knows, and whether it gives both sides the same room.",
    alert="sum by (namespace) (rate(kvctl_rooms_finished_total[10m])) > 0 and "
    "sum by (namespace) (rate(kvctl_part_bytes_total[10m])) == 0",
)
def idle(snapshot: Snapshot) -> Iterator[Finding]:
    decode = list(snapshot.of_role("decode"))
    if decode and all(agent.total("kvctl_rooms_opened_total") == 0 for agent in decode):
        yield from _prefill_only(snapshot)
    for agent in decode:
        successes = snapshot.since_before(agent.name, "kvctl_rooms_finished_total", result="Success")
        nbytes = snapshot.since_before(agent.name, "kvctl_part_bytes_total")
        if successes is None or successes < _MIN_SUCCESSES or nbytes != 0:
            continue
        yield idle.finding(
            agent.name,
            since_ns=snapshot.since_ns,
            evidence={"successes_since_last_reading": int(successes), "bytes": 0},
            cause=f"{counted(successes, 'room')} of {agent.name} succeeded in the last {duration(snapshot.since_ns)} "
            "without a byte of KV",
            remedy=f"`kvctl rooms history -e {agent.name}` shows their pages: with 0 pages each, the decode engine "
            "computes the prompts itself or asks for prefill only",
        )


def _prefill_only(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields a finding about rooms that prefill ranks began, if many wait and no decode rank has opened any."""
    waiting = [
        (agent, row)
        for agent, row in unopened_rooms(snapshot, refused=False)
        if amount(row, "state_age_ns") >= _MIN_WAIT_NS
    ]
    if len(waiting) < _MIN_WAITING_ROOMS:
        return
    prefill = sorted({agent.name for agent, _ in waiting})
    decode = sorted(agent.name for agent in snapshot.of_role("decode"))
    yield idle.finding(
        decode[0],
        agents=(*decode, *prefill),
        since_ns=max(int(amount(row, "state_age_ns")) for _, row in waiting),
        weight=len(waiting),
        evidence={"waiting_rooms": len(waiting), "opened_rooms": 0, "prefill": prefill, "decode": decode},
        cause=f"{listed(prefill)} began {counted(len(waiting), 'room')} and {listed(decode)} never opened one: "
        "requests reach only the prefill side",
        remedy="`kvctl agents` lists the decode ranks that are here; the router's log shows which ones get these "
        "requests",
    )


@health_code(
    "KV_WRONG_ROLE",
    Severity.CRITICAL,
    "rooms",
    sees="every request fails or is computed by one engine alone, and no room is opened",
    means="An engine asked its agent to receive rooms although the agent is a prefill agent, or to send rooms although "
    "it is a decode agent. The agent refuses such rooms. The two servers have each other's role, or the router sends "
    "requests for prefill to the decode server and the reverse.",
    remedy="Exchange the roles of the servers, or their addresses in the router's configuration.",
    alert='sum by (instance) (increase(kvctl_rooms_refused_total{reason="role"}[10m])) > 0',
)
def wrong_role(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        count = agent.total("kvctl_rooms_refused_total", reason="role") or 0
        if count <= 0:
            continue
        recent = snapshot.since_before(agent.name, "kvctl_rooms_refused_total", reason="role")
        task = "receive" if agent.role == "prefill" else "send"
        yield wrong_role.finding(
            agent.name,
            severity=Severity.CRITICAL if recent else Severity.WARNING,
            weight=count,
            evidence={"refused_rooms_total": int(count), "refused_since_last_reading": recent},
            cause=f"the engine of {agent.name} asked it to {task} {counted(count, 'room')}, but it is a {agent.role} "
            "agent",
            remedy="`kvctl agents` shows the role of each agent; exchange the roles of the servers, or their addresses "
            "in the router's configuration",
        )


# ---- rooms that one side never begins ---------------------------------------------------------------------------


@health_code(
    "KV_ROOM_UNCLAIMED",
    Severity.WARNING,
    "rooms",
    sees="requests fail unclaimed_s after their start, while the prefill workers have nothing to do for them",
    means="A decode rank opened a room, and the engine of a prefill rank did not call send() for it within "
    "unclaimed_s. The request did not reach that engine, or waits in its queue for longer than that.",
    remedy="Check that the router sends the request to the instance that the decode side names, under the same room "
    "number; raise unclaimed_s if prefill queues are that long.",
    alert=failure_alert("KV_ROOM_UNCLAIMED"),
)
def room_unclaimed(snapshot: Snapshot) -> Iterator[Finding]:
    for instance, failures in failed_by_instance(snapshot, "KV_ROOM_UNCLAIMED").items():
        yield failure_finding(
            snapshot,
            room_unclaimed,
            failures,
            f"the engine of {instance} never began {counted(len(failures), 'room')} that decode ranks had opened",
            "which ranks know it; check where the router sent the request, and how long the engine's queue is",
            subject=instance,
        )


@health_code(
    "KV_HOLD_EXPIRED",
    Severity.WARNING,
    "rooms",
    sees="prompts are computed in vain: their rooms fail hold_s after their forward",
    means="A prefill rank computed a room, and no decode rank opened it, opened it again after a recall, or renewed it "
    "within hold_s. The rank has released the pages, so that other requests can use them. Likewise the leases that an "
    "engine without an agent counts as expired; what is read after that may be the KV of other requests.",
    remedy="Find out why the decode side did not come: its queue is longer than hold_s and its engine does not call "
    "Agent.renew, or the request ended there. Raise hold_s, or let the engine renew.",
    alert=failure_alert("KV_HOLD_EXPIRED"),
)
def hold_expired(snapshot: Snapshot) -> Iterator[Finding]:
    for instance, failures in failed_by_instance(snapshot, "KV_HOLD_EXPIRED").items():
        yield failure_finding(
            snapshot,
            hold_expired,
            failures,
            f"{instance} computed {counted(len(failures), 'room')} that no decode rank opened in time",
            "which ranks know it; check whether its request reached a decode engine, and whether that renews it",
            subject=instance,
        )
    yield from counted_by_engines(
        snapshot,
        hold_expired,
        Use.EXPIRED,
        "not read in time",
        "check whether the requests reach decode, and raise the lease (vLLM: kv_lease_duration)",
    )


@health_code(
    "KV_ROOM_DUPLICATE",
    Severity.WARNING,
    "rooms",
    sees="single requests fail at once, the more requests in flight, the more often",
    means="Two requests have the same bootstrap_room at the same time. The second one is refused, because its bytes "
    "would be written to the first one's pages. The router chooses room numbers: it retries with the same number, or "
    "chooses from too few.",
    remedy="Let the router choose each number from 64 random bits, and a new one for each retry.",
    alert=failure_alert("KV_ROOM_DUPLICATE"),
)
def room_duplicate(snapshot: Snapshot) -> Iterator[Finding]:
    for instance, failures in failed_by_instance(snapshot, "KV_ROOM_DUPLICATE").items():
        latest, rooms = failures[0], [failed.room for failed in failures]
        rank = latest.rank
        holders = [name for name in named_in(latest.text, snapshot.once(all_names)) if name != rank]
        requesters = [name for name in latest.known_to if name not in (*holders, rank)]
        more = f", and {counted(len(rooms) - 1, 'more room')} likewise" if len(rooms) > 1 else ""
        yield failure_finding(
            snapshot,
            room_duplicate,
            failures,
            f"room {latest.room} was opened by {listed(requesters or ['another decode rank'])} while it was active for "
            f"{listed(holders or ['one'])} on {rank}{more}",
            "both; the router must give every request a room number of its own, at random from 64 bits",
            subject=f"room {latest.room}" if len(rooms) == 1 else instance,
            agents=(rank, *holders, *requesters),
            evidence={"rooms": rooms[:8], "active_for": holders, "asked_by": requesters},
        )


@health_code(
    "KV_INTERNAL_ERROR",
    Severity.WARNING,
    "rooms",
    sees="single rooms behave oddly, and nothing else is wrong",
    means="The handler of an event, or one of the engine's callbacks, raised an exception. That event or action is "
    "lost, and the agent continues. It is always a bug.",
    remedy="Report it with a recording: the flight recorder contains the exception.",
    alert="sum by (instance) (kvctl_internal_errors_total) > 0",
)
def internal_error(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        count = agent.total("kvctl_internal_errors_total") or 0
        if count <= 0:
            continue
        yield internal_error.finding(
            agent.name,
            weight=count,
            evidence={
                "internal_errors_total": int(count),
                "errors_since_last_reading": snapshot.since_before(agent.name, "kvctl_internal_errors_total"),
            },
            cause=f"{counted(count, 'exception')} in the control loop of {agent.name} or in a callback; the event "
            "concerned was skipped",
            remedy=f"`kvctl events -e {agent.name}` shows them under the kind control; save `kvctl record "
            "incident.kvrec --for 2s` and report them",
        )
