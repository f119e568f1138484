"""Agents that were told to take no new rooms, and the rooms that are refused or wait because of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from kvctl.health.answers import Row, amount, counts, number, text, texts
from kvctl.health.codes.failures import Failed, failed_lately
from kvctl.health.codes.formatting import counted, listed
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

_CODE = "KV_DRAINING"
BOOTSTRAP = "KV_ROOM_STUCK_BOOTSTRAP"
# A room is some moments older at one rank than at the other.
_SLACK_NS = 2_000_000_000


def draining(snapshot: Snapshot) -> Mapping[str, Sequence[Agent]]:
    """Draining agents by role, in the order of their names; use `snapshot.once(draining)`."""
    found: dict[str, list[Agent]] = {}
    for name in sorted(snapshot.agents):
        agent = snapshot.agents[name]
        if agent.status.get("draining") is True:
            found.setdefault(agent.role, []).append(agent)
    return found


def _since_ns(agents: Sequence[Agent]) -> int | None:
    """How long the first of them has been draining; None where none of them says."""
    ages = [age for agent in agents if (age := number(agent.status, "draining_age_ns")) is not None]
    return int(max(ages)) if ages else None


def _windows(snapshot: Snapshot) -> list[tuple[float, float]]:
    """When decode ranks took no new rooms: the ages (ns) of the beginning and of the end, which is 0 while it lasts."""
    found = []
    for agent in snapshot.of_role("decode"):
        began = number(agent.status, "draining_age_ns")
        ended = 0.0 if agent.status.get("draining") is True else number(agent.status, "resumed_age_ns")
        if began is not None and ended is not None:
            found.append((began + _SLACK_NS, ended - _SLACK_NS))
    return found


def unopened_for_drain(snapshot: Snapshot, age_ns: float) -> bool:
    """Whether a room of this age, which no decode rank has opened, can be one that a draining decode rank refused."""
    return any(ended <= age_ns <= began for began, ended in snapshot.once(_windows))


def expired_for_drain(snapshot: Snapshot, failed: Failed) -> bool:
    """Whether a room that no decode rank opened in time is one that a draining decode rank refused."""
    knew = [snapshot.agents[name] for name in (failed.rank, *failed.known_to) if name in snapshot.agents]
    if failed.code != BOOTSTRAP or {agent.role for agent in knew} != {"prefill"}:
        return False
    return unopened_for_drain(snapshot, failed.ago_ns + knew[0].period_ns("bootstrap_timeout_s"))


def unanswered_rooms(snapshot: Snapshot, *, refused: bool) -> Iterator[tuple[Agent, Row]]:
    """Rooms that prefill ranks began and that have no peer yet, as (prefill rank, its row).

    Args:
        refused: only those that a draining decode rank can have refused; otherwise only the others.
    """
    for agent in snapshot.of_role("prefill"):
        for row in agent.rooms:
            unanswered = text(row, "state") == "Bootstrapping" and not texts(row, "peers")
            if unanswered and unopened_for_drain(snapshot, amount(row, "state_age_ns")) == refused:
                yield agent, row


def decode_rooms(snapshot: Snapshot) -> set[str]:
    """Rooms that decode ranks have opened."""
    return {text(row, "room") for agent in snapshot.of_role("decode") for row in agent.rooms}


def _waiting(snapshot: Snapshot) -> list[str]:
    """Rooms that prefill ranks began while a decode rank took none, and that no decode rank has opened."""
    rooms = {text(row, "room") for _, row in unanswered_rooms(snapshot, refused=True)}
    return sorted(rooms - decode_rooms(snapshot))


def _nobody_left(snapshot: Snapshot, role: str, agents: Sequence[Agent]) -> bool:
    """Whether no other instance of this role takes rooms.

    A room needs every rank of a prefill instance, so one draining rank stops the whole of it.
    """
    ranks = list(snapshot.of_role(role))
    if role == "prefill":
        instance = max(int(prod(counts(agent.status, "sizes").values())) for agent in agents)
        return len(ranks) <= max(instance, len(agents))
    return len(agents) == len(ranks)


def _expired(snapshot: Snapshot) -> set[str]:
    failures = snapshot.once(failed_lately).get(BOOTSTRAP, ())
    return {failed.room for failed in failures if expired_for_drain(snapshot, failed)}


def _find(snapshot: Snapshot) -> Iterator[Finding]:
    for role, agents in snapshot.once(draining).items():
        yield _draining(snapshot, role, agents)
    if "decode" not in snapshot.once(draining):
        yield from _resumed(snapshot)


def _draining(snapshot: Snapshot, role: str, agents: Sequence[Agent]) -> Finding:
    names = [agent.name for agent in agents]
    since_ns = _since_ns(agents)
    refused = [
        failed.room
        for failed in snapshot.once(failed_lately).get(_CODE, ())
        if failed.rank in names and (since_ns is None or failed.ago_ns <= since_ns)
    ]
    waiting, expired = (_waiting(snapshot), _expired(snapshot)) if role == "decode" else ([], set())
    harmful = bool(refused or waiting or expired) or _nobody_left(snapshot, role, agents)
    cause = f"{listed(names)} {'is' if len(names) == 1 else 'are'} draining"
    if since_ns is not None:
        cause += f", for {duration(since_ns)} now,"
    cause += f" and take{'s' * (len(names) == 1)} no new rooms"
    if refused:
        cause += f"; {counted(len(set(refused)), 'room')} refused, the last one {refused[0]}"
    cause += _left_behind(waiting, expired)
    if harmful and not (refused or waiting or expired):
        cause += f"; no other {role} instance takes rooms"
    return Finding(
        code=_CODE,
        severity=Severity.WARNING if harmful else Severity.INFO,
        subject=names[0],
        agents=tuple(names),
        since_ns=since_ns,
        weight=len(names),
        evidence={
            "draining": names,
            "draining_age_ns": since_ns,
            "refused_rooms": len(set(refused)),
            "waiting_rooms": len(waiting),
            "expired_rooms": len(expired),
        },
        cause=cause,
        remedy=f"`kvctl resume {' '.join(names)}` lets {'it' if len(names) == 1 else 'them'} take new rooms again; "
        "or take the engine out of its router",
    )


def _left_behind(waiting: Collection[str], expired: Collection[str]) -> str:
    text = ""
    if waiting:
        text += f"; {counted(len(waiting), 'room')} of prefill ranks wait for a decode rank to open them"
    if expired:
        text += f"; {counted(len(expired), 'room')} failed because no decode rank opened them in time"
    return text


def _resumed(snapshot: Snapshot) -> Iterator[Finding]:
    """What a drain that is over has left behind: rooms whose engine was refused are opened by nobody."""
    waiting, expired = _waiting(snapshot), _expired(snapshot)
    agents = [agent for agent in snapshot.of_role("decode") if number(agent.status, "resumed_age_ns") is not None]
    if not agents or not (waiting or expired):
        return
    names = [agent.name for agent in agents]
    resumed_ns = int(min(amount(agent.status, "resumed_age_ns") for agent in agents))
    yield Finding(
        code=_CODE,
        severity=Severity.INFO,
        subject=names[0],
        agents=tuple(names),
        since_ns=resumed_ns,
        weight=len(waiting) + len(expired),
        evidence={
            "resumed_age_ns": resumed_ns,
            "waiting_rooms": len(waiting),
            "expired_rooms": len(expired),
        },
        cause=f"{listed(names)} took no new rooms until {duration(resumed_ns)} ago{_left_behind(waiting, expired)}",
        remedy="`kvctl rooms -l role=prefill --filter state=Bootstrapping` lists the rooms that still wait; they fail "
        "at bootstrap_timeout_s, or earlier with kvctl rooms abort",
    )


DRAINING = Code(
    name=_CODE,
    sees="no new room is served although all agents answer; rooms fail with KV_DRAINING",
    means="An agent was told to take no new rooms, by kvctl drain or by its engine before it closes. Rooms in flight "
    "go on. A draining prefill rank refuses the rooms that decode ranks open there, so that its whole instance serves "
    "no new room. A draining decode rank refuses its engine; prefill ranks whose engine has begun such a room wait for "
    "it until bootstrap_timeout_s. Reported as information while rooms can go elsewhere, as a warning when rooms are "
    "refused or wait, or when no other instance of that role is left; and as information after kvctl resume, for as "
    "long as rooms wait or have failed because of it.",
    remedy="Let it take new rooms again with kvctl resume, or take its engine out of the router.",
    severity=Severity.WARNING,
    find=_find,
    alert='sum by (instance) (increase(kvctl_room_failures_total{code="KV_DRAINING"}[10m])) > 0',
)
