"""Asks a fleet all that reading commands ask, so that they can be answered later from a file.

What has no bound of its own is bounded here: how many rooms are asked for their timelines, failed and old ones first.
Of a series each moment holds what the ones before do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fanout import Reply
from kvctl.client.faults import SILENT
from kvctl.client.fleet import FINISHED, AgentAnswer, Fleet, room_rows
from kvctl.client.fleet_snapshot import AgentSnapshot, FleetSnapshot
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.commands import COMMANDS, Level

_CLOCK_ROUNDS = 3
_ROWS = 1000
_EVENTS = 4096  # as many as a recorder keeps by default
_ROOMS_OF_ALL = 4000
_ROOMS_OF_ONE = 200
_AT_ONCE = 24  # an agent's socket queues 64 requests
_NAMED = 5  # agents in one remark
_LIMITS = {"rooms": _ROWS, "history": _ROWS, "slow": _ROWS, "failed": _ROWS, "events": _EVENTS}


@dataclass(slots=True)
class _Life:
    """What the file has of one life of an agent.

    Attributes:
        next: the first event that is not in it.
        finished: (room, nonce) of finished rooms whose timelines are in it.
    """

    next: int | None = None
    finished: set[tuple[str, str]] = field(default_factory=set)


class SnapshotRecorder:
    """Takes moments of one fleet for one file."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lives: dict[tuple[str, str], _Life] = {}

    def take(self) -> FleetSnapshot:
        """One moment; what an agent does not answer is in it as its fault."""
        survey = self._fleet.survey(clock_rounds=_CLOCK_ROUNDS)
        at_ns = time.time_ns()
        discovery = survey.discovery
        greeted = {agent.endpoint: agent for agent in survey.agents}
        silent = {fault.agent: fault for fault in survey.faults[len(discovery.faults) :]}
        seen: list[AgentSnapshot] = []
        for endpoint in discovery.live:
            if endpoint in greeted:
                seen.append(AgentSnapshot(endpoint, None, greeted[endpoint]))
            elif endpoint.name in silent:
                seen.append(AgentSnapshot(endpoint, silent[endpoint.name]))
        answered = self._answered(seen)
        lives = {each.life: self._lives.get(each.life, _Life()) for each in answered}
        self._lives = lives
        detailed, left_out = self._detailed(answered)
        for each in detailed:
            _remember(lives[each.life], each)
        return FleetSnapshot(at_ns, discovery, detailed, left_out)

    def _answered(self, seen: Sequence[AgentSnapshot]) -> list[AgentSnapshot]:
        """With what they answer to every command that reads and needs no argument."""
        requests = [(each.endpoint, call) for each in seen if each.answer for call in self._calls(each)]
        replies: dict[Any, list[Reply]] = {}
        for reply in self._fleet.ask(requests):
            replies.setdefault(reply.endpoint, []).append(reply)
        return [_with(each, replies.get(each.endpoint, ())) for each in seen]

    def _calls(self, seen: AgentSnapshot) -> Iterator[Call]:
        for command in COMMANDS:
            if command.name == "hello" or command.level > Level.READ or any(arg.required for arg in command.args):
                continue
            args: dict[str, Any] = {}
            if command.name in _LIMITS:
                args["limit"] = _LIMITS[command.name]
            if command.name == "events" and seen.life in self._lives:
                args["since"] = self._lives[seen.life].next
            yield Call(command.name, args)

    def _detailed(self, seen: Sequence[AgentSnapshot]) -> tuple[list[AgentSnapshot], list[str]]:
        """With the timelines and layers of their rooms, and what was left out of those."""
        left_out: list[str] = []
        failed: list[str] = []
        found: dict[Any, AgentSnapshot] = {}
        waiting: dict[Any, list[str]] = {}
        each_may = min(_ROOMS_OF_ONE, max(1, _ROOMS_OF_ALL // max(1, len(seen))))
        known = too_many = 0
        for each in seen:
            wanted = list(self._wanted(each))
            waiting[each.endpoint] = wanted[:each_may]
            found[each.endpoint] = replace(each, rooms={}, layers={})
            known += len(wanted)
            too_many += max(0, len(wanted) - each_may)
        if too_many:
            left_out.append(f"timelines of {too_many} of {known} rooms; failed and active ones come first")
        while any(waiting.values()):
            requests = []
            for endpoint, rooms in waiting.items():
                requests += [
                    (endpoint, Call(command, {"room": room}))
                    for room in rooms[: _AT_ONCE // 2]
                    for command in ("room", "layers")
                ]
            waiting = {endpoint: rooms[_AT_ONCE // 2 :] for endpoint, rooms in waiting.items() if rooms}
            for reply in self._fleet.ask(requests):
                one = found[reply.endpoint]
                into = one.rooms if reply.call.command == "room" else one.layers
                if reply.fault is None:
                    into[reply.call.args["room"]] = reply.data  # type: ignore[index]
                elif reply.fault.code == ErrorCode.UNKNOWN_ROOM:
                    into[reply.call.args["room"]] = []  # type: ignore[index]
                elif reply.fault.code in SILENT and waiting.pop(reply.endpoint, None) is not None:
                    failed.append(one.endpoint.name)
        if failed:
            others = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
            left_out.append(f"some timelines of rooms, for which {', '.join(failed[:_NAMED])}{others} took too long")
        return [found[each.endpoint] for each in seen], left_out

    def _wanted(self, seen: AgentSnapshot) -> Iterator[str]:
        """Rooms whose timelines the file lacks, those first that a person would look for."""
        if seen.answer is None:
            return
        data = seen.answer.data
        finished = [row for command in FINISHED for row in room_rows(data, command)]
        active = data.get("rooms", ())
        had = self._lives[seen.life].finished
        new = [row for row in finished if (row["room"], row["nonce"]) not in had]
        ordered = [*(row for row in new if row["failure"] is not None), *active, *new]
        yield from dict.fromkeys(row["room"] for row in ordered)


def _with(seen: AgentSnapshot, replies: Sequence[Reply]) -> AgentSnapshot:
    if seen.answer is None:
        return seen
    answer: AgentAnswer = seen.answer
    answer.data.update((reply.call.command, reply.data) for reply in replies if reply.fault is None)
    return replace(seen, refused={reply.call.command: reply.fault for reply in replies if reply.fault is not None})


def _remember(life: _Life, seen: AgentSnapshot) -> None:
    if seen.answer is None:
        return
    events = seen.answer.data.get("events")
    if events is not None:
        life.next = events["next"]
    known = {(row["room"], row["nonce"]) for command in FINISHED for row in room_rows(seen.answer.data, command)}
    told = {
        (room, detail["nonce"])
        for room, details in seen.rooms.items()
        for detail in details
        if detail["finished_at_ns"] is not None
    }
    life.finished = (life.finished | told) & known
