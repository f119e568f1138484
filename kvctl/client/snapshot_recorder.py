"""Asks a fleet all that reading commands ask, so that they can be answered later from a file.

The number of rooms that are asked for their timelines is bounded, failed and active ones first. Each moment of a series
holds the events and finished rooms that the ones before do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import SILENT
from kvctl.client.fleet import FINISHED, Fleet, room_rows
from kvctl.client.recording_reader import Answer, Moment, RecordedAgent, text_endpoint, text_fault, utf8
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
class _Process:
    """What the file has of one process of an agent.

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
        self._processes: dict[tuple[Endpoint, str], _Process] = {}

    def take(self) -> Moment:
        """One moment; what an agent does not answer is in it as its fault."""
        survey = self._fleet.survey(clock_rounds=_CLOCK_ROUNDS)
        at_ns = time.time_ns()
        found = survey.discovery
        silent = {fault.agent: fault for fault in survey.faults[len(found.faults) :]}
        keys = {agent.endpoint: (agent.endpoint, agent.hello["incarnation"]) for agent in survey.agents}
        self._processes = {key: self._processes.get(key, _Process()) for key in keys.values()}
        processes = {endpoint: self._processes[key] for endpoint, key in keys.items()}
        answers = {
            endpoint: [Answer("hello", None, None, text_fault(silent[endpoint.name]))]
            for endpoint in found.live
            if endpoint not in keys and endpoint.name in silent
        }
        requests = [(endpoint, call) for endpoint, process in processes.items() for call in _calls(process)]
        for reply in self._fleet.ask(requests):
            answers.setdefault(reply.endpoint, []).append(_stored(reply))
        left_out = self._add_rooms(answers, {each: _wanted(answers[each], processes[each]) for each in processes})
        for endpoint, process in processes.items():
            _remember(process, answers[endpoint])
        measured = {agent.endpoint: (agent.rtt_ns, agent.clock) for agent in survey.agents}
        agents = [
            RecordedAgent(text_endpoint(endpoint), *measured.get(endpoint, (0, ClockOffset(0, 0))), answers[endpoint])
            for endpoint in found.live
            if endpoint in answers
        ]
        stale = [text_endpoint(endpoint) for endpoint in found.stale]
        faults = [text_fault(fault) for fault in found.faults]
        return Moment(at_ns, Path(utf8(str(found.directory))), stale, faults, agents, [utf8(text) for text in left_out])

    def _add_rooms(self, answers: dict[Endpoint, list[Answer]], wanted: dict[Endpoint, list[str]]) -> list[str]:
        """Adds the timelines and layers of rooms to the answers; returns what was left out."""
        left_out: list[str] = []
        most = min(_ROOMS_OF_ONE, max(1, _ROOMS_OF_ALL // max(1, len(answers))))
        if too_many := sum(max(0, len(rooms) - most) for rooms in wanted.values()):
            known = sum(map(len, wanted.values()))
            left_out.append(f"timelines of {too_many} of {known} rooms; failed and active ones come first")
        waiting = {endpoint: rooms[:most] for endpoint, rooms in wanted.items() if rooms}
        failed: list[str] = []
        while waiting:
            requests = [
                (endpoint, Call(command, {"room": room}))
                for endpoint, rooms in waiting.items()
                for room in rooms[: _AT_ONCE // 2]
                for command in ("room", "layers")
            ]
            waiting = {each: rest for each, rooms in waiting.items() if (rest := rooms[_AT_ONCE // 2 :])}
            for reply in self._fleet.ask(requests):
                if reply.fault is None or reply.fault.code not in SILENT:
                    answers[reply.endpoint].append(_stored(reply))
                elif reply.endpoint.name not in failed:
                    failed.append(reply.endpoint.name)
                    waiting.pop(reply.endpoint, None)
        if failed:
            others = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
            left_out.append(f"some timelines of rooms, for which {', '.join(failed[:_NAMED])}{others} took too long")
        return left_out


def _calls(process: _Process) -> Iterator[Call]:
    """Every command that reads and needs no argument, asked for all that the file lacks."""
    for command in COMMANDS:
        if command.level <= Level.READ and not any(arg.required for arg in command.args):
            since = {"since": process.next} if command.name == "events" else {}
            yield Call(command.name, {"limit": _LIMITS.get(command.name), **since})


def _stored(reply: Reply) -> Answer:
    fault = None if reply.fault is None else text_fault(reply.fault)
    return Answer(reply.call.command, reply.call.args.get("room"), reply.data, fault)


def _data(answers: Sequence[Answer]) -> dict[str, Any]:
    return {each.command: each.data for each in answers if each.room is None and each.fault is None}


def _wanted(answers: Sequence[Answer], process: _Process) -> list[str]:
    """Rooms whose timelines the file lacks, those first that a person would look for."""
    data = _data(answers)
    finished = [row for command in FINISHED for row in room_rows(data, command)]
    new = [row for row in finished if (row["room"], row["nonce"]) not in process.finished]
    ordered = [*(row for row in new if row["failure"] is not None), *data.get("rooms", ()), *new]
    return list(dict.fromkeys(row["room"] for row in ordered))


def _remember(process: _Process, answers: Sequence[Answer]) -> None:
    data = _data(answers)
    if "events" in data:
        process.next = data["events"]["next"]
    known = {(row["room"], row["nonce"]) for command in FINISHED for row in room_rows(data, command)}
    stored = {
        (answer.room, detail["nonce"])
        for answer in answers
        if answer.command == "room" and answer.room is not None and answer.fault is None
        for detail in answer.data
        if detail["finished_at_ns"] is not None
    }
    process.finished = (process.finished | stored) & known
