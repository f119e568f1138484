"""Health codes about agents that cannot serve: missing ranks, drains, ports in use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

from kvctl.health import answers
from kvctl.health.answers import amount, counts, inner, number, text
from kvctl.health.codes.facts import (
    BOOTSTRAP,
    absent,
    all_names,
    decode_rooms,
    draining,
    expired_for_drain,
    failed_rooms,
    failure_alert,
    unopened_rooms,
)
from kvctl.health.codes.peers import refused_pairs
from kvctl.health.codes.stuck_rooms import stuck_rooms
from kvctl.health.finding import Finding, Severity, agree, counted, health_code, listed, named_in
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration
from kvctl_agent.contract.states import UNREGISTERED

_STARTUP_NS = 60_000_000_000


@health_code(
    "KV_NOT_READY",
    Severity.WARNING,
    "ready",
    sees="an agent runs and cannot serve, or cannot serve with one of its instances",
    means="A prefill rank waits for its registry; a decode rank waits until every rank of its prefill instances is "
    "registered and has said hello. An agent that has waited for a minute is reported, whether or not rooms need the "
    "missing rank. A decode rank with another instance is ready nevertheless, as its /readyz and kvctl wait say. If "
    "rooms are stuck for this reason, KV_ROOM_STUCK_BOOTSTRAP is reported instead.",
    remedy="Start the missing ranks, or remove the instance from the agent's configuration.",
)
def not_ready(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields one finding for all agents that wait for the same reason.

    Agents whose wait is explained by stuck rooms, silent agents or their engine's sleep mode are left out.
    """
    known = snapshot.once(all_names) | snapshot.once(absent)
    reported = {stuck.room.agent.name for stuck in snapshot.once(stuck_rooms) if stuck.code == BOOTSTRAP}
    by_reason: dict[tuple[str, bool], list[Agent]] = {}
    for agent in snapshot.agents.values():
        reason = text(agent.status, "waiting_for")
        if not reason or agent.name in reported:
            continue
        named = named_in(reason, known)
        if any(name in snapshot.once(absent) for name in named):
            continue
        if named and all((name, agent.name) in snapshot.once(refused_pairs) for name in named):
            continue  # KV_COMPAT_MISMATCH reports it
        if agent.status.get("draining") or reason == UNREGISTERED or amount(agent.status, "uptime_ns") < _STARTUP_NS:
            continue
        by_reason.setdefault((reason, not answers.not_ready(agent.status)), []).append(agent)
    for (reason, ready), agents in by_reason.items():
        names = [agent.name for agent in agents]
        uptime = max(int(amount(agent.status, "uptime_ns")) for agent in agents)
        done = int(sum(amount(inner(agent.status, "rooms_finished_total"), "Success") for agent in agents))
        cause = f"{listed(names)} cannot serve, {duration(uptime)} after the start: {reason}"
        if ready:
            cause = (
                f"{listed(names)} {'waits' if len(names) == 1 else 'wait'}, {duration(uptime)} after the start: "
                f"{reason}; rooms that do not need it are served ({counted(done, 'room')} done)"
            )
        yield not_ready.finding(
            names[0],
            agents=names,
            since_ns=uptime,
            weight=len(names),
            evidence={"waiting_for": reason, "uptime_ns": uptime, "waiting_agents": names, "done_rooms_total": done},
            cause=cause,
            remedy="`kvctl bootstrap` shows which ranks have registered and which registries do not answer: start the "
            "missing ones, or remove the instance from the agent's configuration",
        )


@health_code(
    "KV_DRAINING",
    Severity.CRITICAL,
    "ready",
    sees="no new room is served although all agents answer; rooms fail with KV_DRAINING",
    means="An agent accepts no new rooms, because of kvctl drain or because its engine is about to close it. Rooms in "
    "flight continue. A draining prefill rank refuses the rooms that decode ranks open there, so its whole instance "
    "serves no new room. A draining decode rank refuses its engine's requests; prefill ranks whose engine has begun "
    "such a room wait for it until bootstrap_timeout_s. Reported as information while other instances accept rooms, as "
    "a warning when rooms are refused or wait or no other instance of that role is left, as critical when both are so, "
    "and as information after kvctl resume, as long as rooms wait or have failed because of it.",
    remedy="Let the agent accept new rooms again with kvctl resume, or remove its engine from the router.",
    alert=failure_alert("KV_DRAINING"),
)
def agent_draining(snapshot: Snapshot) -> Iterator[Finding]:
    for role, agents in snapshot.once(draining).items():
        yield _draining(snapshot, role, agents)
    if "decode" not in snapshot.once(draining):
        yield from _resumed(snapshot)


def _draining(snapshot: Snapshot, role: str, agents: Sequence[Agent]) -> Finding:
    names = [agent.name for agent in agents]
    ages = [age for agent in agents if (age := number(agent.status, "draining_age_ns")) is not None]
    since_ns = int(max(ages)) if ages else None
    refused = [
        failed.room
        for failed in snapshot.once(failed_rooms).get("KV_DRAINING", ())
        if failed.rank in names and (since_ns is None or failed.ago_ns <= since_ns)
    ]
    waiting, expired = (_waiting(snapshot), _expired(snapshot)) if role == "decode" else ([], set())
    affects_rooms, last = bool(refused or waiting or expired), _no_other_instance(snapshot, role, agents)
    severity = Severity.WARNING if affects_rooms or last else Severity.INFO
    one = len(names) == 1
    cause = f"{listed(names)} {'is' if one else 'are'} draining"
    if since_ns is not None:
        cause += f", for {duration(since_ns)} now,"
    cause += f" and accept{'s' * one} no new rooms"
    if refused:
        cause += f"; {counted(len(set(refused)), 'room')} refused, the last one {refused[0]}"
    cause += _affected(waiting, expired)
    if last:
        cause += f"; no other {role} instance accepts rooms"
    return agent_draining.finding(
        names[0],
        severity=Severity.CRITICAL if affects_rooms and last else severity,
        agents=names,
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
        remedy=f"`kvctl resume {' '.join(names)}` lets {'it' if one else 'them'} accept new rooms again; or remove the "
        "engine from its router",
    )


def _resumed(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields a finding about rooms that were refused during a drain that has ended since.

    Their prefill ranks still wait or have timed out, because no decode rank opens a room that was refused.
    """
    waiting, expired = _waiting(snapshot), _expired(snapshot)
    agents = [agent for agent in snapshot.of_role("decode") if number(agent.status, "resumed_age_ns") is not None]
    if not agents or not (waiting or expired):
        return
    names = [agent.name for agent in agents]
    resumed_ns = int(min(amount(agent.status, "resumed_age_ns") for agent in agents))
    yield agent_draining.finding(
        names[0],
        severity=Severity.INFO,
        agents=names,
        since_ns=resumed_ns,
        weight=len(waiting) + len(expired),
        evidence={"resumed_age_ns": resumed_ns, "waiting_rooms": len(waiting), "expired_rooms": len(expired)},
        cause=f"{listed(names)} accepted no new rooms until {duration(resumed_ns)} ago{_affected(waiting, expired)}",
        remedy="`kvctl rooms -l role=prefill --filter state=Bootstrapping` lists the rooms that still wait; they fail "
        "at bootstrap_timeout_s, or earlier with kvctl rooms abort",
    )


def _waiting(snapshot: Snapshot) -> list[str]:
    """Returns the numbers of rooms that prefill ranks began during a drain and that no decode rank has opened."""
    rooms = {text(row, "room") for _, row in unopened_rooms(snapshot, refused=True)}
    return sorted(rooms - decode_rooms(snapshot))


def _expired(snapshot: Snapshot) -> set[str]:
    failures = snapshot.once(failed_rooms).get(BOOTSTRAP, ())
    return {failed.room for failed in failures if expired_for_drain(snapshot, failed)}


def _no_other_instance(snapshot: Snapshot, role: str, agents: Sequence[Agent]) -> bool:
    """Returns whether no other instance of this role accepts rooms.

    A room needs every rank of a prefill instance, so one draining rank stops the whole instance.
    """
    ranks = list(snapshot.of_role(role))
    if role == "prefill":
        instance = max(int(prod(counts(agent.status, "sizes").values())) for agent in agents)
        return len(ranks) <= max(instance, len(agents))
    return len(agents) == len(ranks)


def _affected(waiting: Collection[str], expired: Collection[str]) -> str:
    words = ""
    if count := len(waiting):
        wait, them = agree(count, "waits", "wait"), agree(count, "it", "them")
        words += f"; {counted(count, 'room')} of prefill ranks {wait} for a decode rank to open {them}"
    if count := len(expired):
        them = agree(count, "it", "them")
        words += f"; {counted(count, 'room')} failed because no decode rank opened {them} in time"
    return words


@health_code(
    "KV_PORT_CLASH",
    Severity.CRITICAL,
    "ready",
    sees="address in use; six of eight ranks start",
    means="A fixed port that an agent is configured to bind is in use. By default an agent uses any free port; with "
    "fixed ports, two ranks of a host may have the same one, or an old process still has it. The agent names the "
    "process when it gives up, and kvctl doctor looks for it. Detected only by kvctl doctor, on its host.",
    remedy="Omit the port from the address, give each rank its own port, or end the old process.",
)
def port_clash(snapshot: Snapshot) -> Iterator[Finding]:
    return iter(())
