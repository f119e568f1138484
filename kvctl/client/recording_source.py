"""Recordings and bundles in place of a live fleet: stored answers are found by agent, command and room."""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import FINISHED, Survey, gather, room_rows
from kvctl.client.recording_reader import Answer, Moment, RecordedAgent, load, understood
from kvctl_agent.contract.admin import ErrorCode

_ROWS = 1000  # default limit of the agents


class RecordingSource:
    """Answers from one moment of a file; a `Source`.

    Args:
        endpoints: names, globs or addresses of agents; empty means all that are in the file.
        labels: as of a live fleet.
        at: index of the moment to begin with.

    Attributes:
        moments: when each moment was, wall clock, ns.
        moment: index of the present one.

    Raises:
        CliError: the file cannot be read.
    """

    def __init__(
        self, path: Path, endpoints: Sequence[str] = (), labels: Mapping[str, str] | None = None, *, at: int = -1
    ) -> None:
        self._path = path
        self._endpoints = endpoints
        self._labels = labels or {}
        self._file = load(path)
        self._histories: dict[tuple[Endpoint, str], _History] = {}
        self._remembered = 0  # moments that are in the histories
        self.moments: Sequence[int] = self._file.at_ns
        self.moment = 0
        self.seek(at % len(self.moments))

    def __enter__(self) -> RecordingSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def seek(self, index: int) -> None:
        """Makes that moment the present one.

        Raises:
            IndexError: there is no such moment.
        """
        if not 0 <= index < len(self.moments):
            raise IndexError(f"{self._path} has {len(self.moments)} moments, and none with index {index}")
        self.moment = index

    def advance(self) -> bool:
        """Goes on to the next moment; False, and stays, at the last."""
        if self.moment + 1 == len(self.moments):
            return False
        self.moment += 1
        return True

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """What the agents answered at the present moment; clocks are as sharp as they were measured then."""
        moment = self._file[self.moment]
        with understood(self._path):
            survey = gather(self._select(moment), calls, self._labels, self._ask)
            survey.at_ns = survey.tick_ns = moment.at_ns
            survey.remarks.append(self._when())
            for agent in survey.agents:
                if any(not rank["timeline"] and not rank["timeline_dropped"] for rank in agent.data.get("room", ())):
                    survey.remarks.append(f"{agent.name}: the timeline of this room was left out of {self._path.name}")
        return survey

    def _select(self, moment: Moment) -> Discovery:
        """Agents that the user asks for, in the order of the request, and those of them that are not there."""
        live = [agent.endpoint for agent in moment.agents]
        if not self._endpoints:
            return Discovery(moment.directory, live, list(moment.stale), list(moment.faults))
        found = Discovery(moment.directory)
        for wanted in self._endpoints:
            named = [each for each in live if _named(each, wanted)]
            stale = [each for each in moment.stale if _named(each, wanted)]
            found.live += [each for each in named if each not in found.live]
            found.stale += [each for each in stale if each not in found.stale]
            if faults := [fault for fault in moment.faults if fault.agent == wanted]:
                found.faults += faults
            elif stale:
                text = "the agent was gone and had left its socket"
                found.faults += [Fault(each.name, FaultCode.UNREACHABLE, text) for each in stale]
            elif not named:
                names = [each.name for each in live]
                near = difflib.get_close_matches(wanted, names, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(names)}" if names else ""
                text = f"{self._path} has no agent {wanted}{hint}"
                found.faults.append(Fault(wanted, FaultCode.UNREACHABLE, text))
        return found

    def _ask(self, requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        agents = {agent.endpoint: agent for agent in self._file[self.moment].agents}
        return [self._reply(agents[endpoint], call) for endpoint, call in requests]

    def _reply(self, agent: RecordedAgent, call: Call) -> Reply:
        answer = self._answer(agent, call)
        sent_at_ns = received_at_ns = 0
        if call.command == "hello" and answer.fault is None:  # sent so that its clock is estimated as it was then
            error_ns = agent.clock.error_ns
            sent_at_ns = answer.data["now_ns"] - agent.clock.offset_ns - error_ns
            received_at_ns = sent_at_ns + 2 * error_ns
        return Reply(agent.endpoint, call, answer.data, answer.fault, sent_at_ns, received_at_ns, agent.rtt_ns)

    def _answer(self, agent: RecordedAgent, call: Call) -> Answer:
        if agent.hello.fault is not None:
            return agent.hello
        command, room = call.command, call.args.get("room")
        stored = agent.find(command, room)
        if stored is None and room is not None:
            return self._history(agent).finished_room(agent, command, room)
        if stored is None:
            return _missing(agent, call, f"{command} was not asked when this was recorded")
        if stored.fault is not None or not (command == "events" or command in _LISTS):
            return stored
        if command == "events":
            return Answer(command, None, self._history(agent).events_page(stored.data["next"], call.args))
        return Answer(command, None, _narrow(stored.data, call.args))

    def _history(self, agent: RecordedAgent) -> _History:
        """What is known of this process of the agent up to now, and perhaps beyond."""
        while self._remembered <= self.moment:
            for each in self._file[self._remembered].agents:
                if each.hello.fault is None:
                    self._histories.setdefault(_process(each), _History()).add(each)
            self._remembered += 1
        return self._histories[_process(agent)]

    def _when(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.moments[self.moment] / 1e9))
        count = len(self.moments)
        place = f", moment {self.moment + 1} of {count}; -w shows them all" if count > 1 else ""
        return f"{self._path.name} as of {at}{place}"


class _History:
    """What a moment of a series does not repeat, of one agent process: old events, and rooms that have finished.

    It may know more than the moment that asks; what that moment could not know yet is not given to it.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._rooms: dict[tuple[str, str], Any] = {}  # by number and nonce
        self._layers: dict[str, Answer] = {}  # by number

    def add(self, agent: RecordedAgent) -> None:
        """The answers of the next moment."""
        for answer in agent.answers:
            if answer.fault is not None:
                continue
            if answer.command == "events":
                self._events += answer.data["events"]
            elif answer.command == "room" and answer.room is not None:
                finished = [one for one in answer.data if one["finished_at_ns"] is not None]
                self._rooms.update(((answer.room, one["nonce"]), one) for one in finished)
                layers = agent.find("layers", answer.room)
                if len(finished) == len(answer.data) and layers is not None:
                    self._layers[answer.room] = layers

    def events_page(self, following: int, args: Mapping[str, Any]) -> Any:
        """The answer to `events` of an agent whose next event is number `following`, as its recorder gives it."""
        rows = [row for row in self._events if row["sequence"] < following]
        since, limit = args.get("since"), args.get("limit", _ROWS)
        if since is None:
            return {"events": rows[-limit:] if limit else [], "next": following, "dropped": 0}
        if since >= following:
            return {"events": [], "next": following, "dropped": 0}
        oldest = rows[0]["sequence"] if rows else following
        chosen = [row for row in rows if row["sequence"] >= since][:limit]
        following = chosen[-1]["sequence"] + 1 if chosen else max(since, oldest)
        return {"events": chosen, "next": following, "dropped": max(0, oldest - since)}

    def finished_room(self, agent: RecordedAgent, command: str, room: str) -> Answer:
        """The answer to `room` or `layers` about a room that was not asked for again at this moment."""
        data = {answer.command: answer.data for answer in agent.answers if answer.fault is None}
        rows = [row for each in ("rooms", *FINISHED) for row in room_rows(data, each) if row["room"] == room]
        rows = list({row["nonce"]: row for row in rows}.values())
        call = Call(command, {"room": room})
        if not rows:
            text = f"{agent.endpoint.name} knows no room {room}, active or lately"
            return _missing(agent, call, text, ErrorCode.UNKNOWN_ROOM)
        if command == "layers":
            if all(row["finished_at_ns"] is not None for row in rows) and room in self._layers:
                return self._layers[room]
            return _missing(agent, call, f"the layers of room {room} were left out when this was recorded")
        # Of a room whose timeline was left out there is still its row.
        bare = {"timeline": [], "timeline_dropped": 0}
        known = {
            row["nonce"]: self._rooms.get((room, row["nonce"])) for row in rows if row["finished_at_ns"] is not None
        }
        return Answer(command, room, [known.get(row["nonce"]) or {**row, **bare} for row in rows])


_LISTS = frozenset({"rooms", *FINISHED})


def _narrow(data: Any, args: Mapping[str, Any]) -> Any:
    """The rows that the agent would have answered with these arguments."""
    rows = data["rooms"] if isinstance(data, Mapping) else data
    rows = [row for row in rows if args.get("state") in {None, row["state"]}][: args.get("limit", _ROWS)]
    return {**data, "rooms": rows} if isinstance(data, Mapping) else rows


def _missing(agent: RecordedAgent, call: Call, text: str, code: str = FaultCode.NOT_CAPTURED) -> Answer:
    return Answer(call.command, call.args.get("room"), None, Fault(agent.endpoint.name, code, text))


def _process(agent: RecordedAgent) -> tuple[Endpoint, str]:
    """Distinguishes the processes that have served at one endpoint."""
    return agent.endpoint, agent.hello.data["incarnation"]


def _named(endpoint: Endpoint, wanted: str) -> bool:
    if "/" in wanted:
        return wanted in {endpoint.address, str(endpoint.path)}
    return fnmatch.fnmatchcase(endpoint.name, wanted)
