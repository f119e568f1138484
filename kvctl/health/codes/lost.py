"""Agents that others do not hear any more."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvctl.client.faults import FaultCode
from kvctl.health.answers import number
from kvctl.health.codes.failures import failed_lately
from kvctl.health.codes.formatting import counted, listed, pair
from kvctl.health.codes.peers import stale_pairs
from kvctl.health.codes.silence import Silence, mute_agents, silences
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration

_LOST_CODE = "KV_PEER_LOST"
_FORGOTTEN_NS = 600_000_000_000
_OF_PEER = re.compile(r"\bpeer (\S+) \(incarnation")


def _lost(snapshot: Snapshot) -> Iterator[Finding]:
    failed = _rooms_failed(snapshot)
    stale = {subject for subject, _, _ in stale_pairs(snapshot)}
    for name, all_told in snapshot.once(silences).items():
        told = [one for one in all_told if pair(one.agent, name) not in stale]
        if told:
            finding = _of_silent(snapshot, name, told, failed.get(name, 0))
            if finding is not None:
                yield finding
    for name, count in failed.items():
        if name not in snapshot.once(silences):
            yield _came_back(snapshot, name, count)


def _of_silent(snapshot: Snapshot, name: str, told: list[Silence], failed: int) -> Finding | None:
    lost = [one for one in told if one.lost]
    closed = bool(lost) and all(one.closed for one in lost)
    needed = any(one.role == "decode" for one in lost)  # no room of its instance can be opened without it
    heard = [one.for_ns for one in told if one.for_ns is not None]
    silent_ns = min(heard, default=None)
    if closed and not needed:
        return None  # a decode rank that left in order is missed by nobody
    recent = silent_ns is None or silent_ns < _FORGOTTEN_NS
    severity = Severity.CRITICAL if lost and not closed and (needed or recent) else Severity.WARNING
    cause, remedy = _words(snapshot, name, told, lost, closed, silent_ns)
    if lost and needed:
        cause += (
            f"; {listed(sorted(one.agent for one in lost if one.role == 'decode'))} can open no room of its instance"
        )
    return Finding(
        code=_LOST_CODE,
        severity=severity,
        subject=name,
        agents=(name, *sorted({one.agent for one in told})),
        since_ns=silent_ns,
        weight=len(told) + failed,
        evidence={
            "state": "closed" if closed else "lost" if lost else "suspect",
            "last_heard_ns": silent_ns,
            "missed_by": sorted({one.agent for one in told}),
            "rooms": sum(one.rooms for one in told),
            "failed_rooms": failed,
            "answers_kvctl": name in snapshot.agents,
            "last_error": next((one.error for one in lost if one.error), ""),
        },
        cause=cause,
        remedy=remedy,
    )


def _words(
    snapshot: Snapshot, name: str, told: list[Silence], lost: list[Silence], closed: bool, silent_ns: int | None
) -> tuple[str, str]:
    seen_by = listed(sorted({one.agent for one in told}))
    since = "" if silent_ns is None else f" for {duration(silent_ns)}"
    error = next((one.error for one in lost if one.error), "")
    process = _process(snapshot, name)
    if closed:
        return f"{name} was closed and has not come back; {seen_by} waited for it", (
            f"`kvctl peers` shows who waits for it; start {name} again, or take it out of its instance"
        )
    if error.endswith("has ended"):
        heard = "" if silent_ns is None else f", last heard {duration(silent_ns)} ago"
        return f"{name} died: {error.rpartition(': ')[2]}{heard}; {seen_by} lost it", (
            f"`kvctl peers` shows who lost it; start {name} again, and the others take it up by themselves; its own "
            "log tells why it died"
        )
    if name in snapshot.agents:
        agent = snapshot.agents[name]
        return (
            f"{seen_by} heard nothing from {name}{since}, and yet it answers kvctl: the network between them is cut",
            (f"`kvctl peers -e {agent.name}` tells whom it hears; then look at the network between their hosts"),
        )
    stopped = next((each for each in snapshot.faults if each.agent == name and each.code == FaultCode.STOPPED), None)
    if stopped is not None:
        text, _, remedy = stopped.message.partition("; ")
        return f"{seen_by} heard nothing of {name}{since}: {text}", (
            f"{remedy}; see who stopped it (a debugger, job control, a freezer)"
        )
    if name in mute_agents(snapshot):
        return f"{seen_by} heard nothing from {name}{since}, nor does it answer kvctl: it is stopped or hangs", (
            f"`kvctl agents` shows whether its process is stopped (then kill -CONT {process}); a process that runs and "
            "does not answer must be started again"
        )
    return f"{seen_by} heard nothing from {name}{since}, and no agent of that name answers kvctl here", (
        f"`kvctl agents` shows whether {name} runs; start it again, and the others take it up by themselves"
    )


def _process(snapshot: Snapshot, name: str) -> str:
    then = snapshot.before.agents.get(name) if snapshot.before is not None else None
    pid = number(then.status, "pid") if then is not None else None
    return "its pid" if pid is None else f"{pid:.0f}"


def _rooms_failed(snapshot: Snapshot) -> dict[str, int]:
    """How many rooms failed lately because of whom."""
    found: dict[str, int] = {}
    for failed in snapshot.once(failed_lately).get(_LOST_CODE, ()):
        if match := _OF_PEER.search(failed.text):
            found[match[1]] = found.get(match[1], 0) + 1
    return found


def _came_back(snapshot: Snapshot, name: str, count: int) -> Finding:
    failures = [one for one in snapshot.once(failed_lately)[_LOST_CODE] if f"peer {name} (" in one.text]
    latest = failures[0]
    return Finding(
        code=_LOST_CODE,
        severity=Severity.WARNING,
        subject=name,
        agents=(name, *latest.known_to),
        since_ns=latest.ago_ns,
        weight=count,
        evidence={"state": "back", "failed_rooms": count, "last_error": latest.text},
        cause=f"{counted(count, 'room')} failed when {name} was lost, last {duration(latest.ago_ns)} ago; "
        "it is connected again",
        remedy=f"`kvctl events -e {latest.known_to[0]}` tells when it was lost and came back; its own log tells why",
    )


PEER_LOST = Code(
    name=_LOST_CODE,
    sees="every room of one pair of agents fails, or none of an instance can be opened",
    means="An agent has not heard from another one. After suspect_s of silence it gives it no new grants, which is a "
    "warning here; after lost_s, or as soon as its process is seen to have ended, all rooms between the two fail. A "
    "decode rank opens a room at every rank of a prefill instance, so one lost prefill rank stops its whole instance. "
    "Ring and pages that a lost rank might still write are kept until it is proven dead (KV_QUARANTINE). Rooms that "
    "wait for a silent agent are not reported one by one: this finding explains them.",
    remedy="Start the agent again; the others take it up by themselves. If it still runs, see whether its process is "
    "stopped, or the network between the hosts is cut.",
    severity=Severity.CRITICAL,
    find=_lost,
    alert='sum by (instance) (kvctl_peers{state="lost"}) > 0',
)
