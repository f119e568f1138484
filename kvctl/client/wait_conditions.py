"""What `kvctl wait` waits for: each goal looks at one survey and says what is still missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.client.room_timeline import join
from kvctl_agent.contract.states import STATE_LABELS, RoomState

_LARGEST_ROOM = (1 << 64) - 1
_STATES = {label.lower(): label for label in STATE_LABELS}


class WaitConditionError(ValueError):
    """What is to be waited for cannot be understood."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is.

    Attributes:
        reached: in words, what has come about; "" as long as it has not.
        missing: what is still to come, the first one to be looked at first.
        impossible: why it will never come; "" as long as it may.
    """

    reached: str = ""
    missing: Sequence[str] = ()
    impossible: str = ""


class WaitCondition(Protocol):
    """Something to wait for."""

    calls: tuple[Call, ...]

    def look(self, survey: Survey) -> Progress:
        """What one survey says of it; surveys come in order."""
        ...


def parse(text: str, agents: int = 1) -> WaitCondition:
    """Reads `ready`, `drained` or `room=R:STATE`.

    Args:
        agents: how many have to be there to be ready.

    Raises:
        GoalError: it is none of them.
    """
    if text == "ready":
        return Ready(agents)
    if text == "drained":
        return Drained()
    kind, _, rest = text.partition("=")
    number, _, state = rest.partition(":")
    if kind != "room":
        raise WaitConditionError(f"{text}: wait for ready, drained or room=NUMBER:STATE, as in room=7:Success")
    if not number.isdecimal() or int(number) > _LARGEST_ROOM:
        raise WaitConditionError(f"{text}: {number!r} is not a room number, 0 to {_LARGEST_ROOM}")
    if state.lower() not in _STATES:
        raise WaitConditionError(f"{text}: {state!r} is no state of a room: write {', '.join(STATE_LABELS)}")
    return RoomIn(str(int(number)), _STATES[state.lower()])


class Ready:
    """As many agents as there should be are there, and wait for nobody."""

    calls: tuple[Call, ...] = (Call("status"),)

    def __init__(self, agents: int) -> None:
        self._agents = agents

    def look(self, survey: Survey) -> Progress:
        answers = survey.answers("status")
        missing = [f"{fault.agent}: {fault.message}" for fault in survey.faults]
        missing += [f"{agent.name}: {data['waiting_for']}" for agent, data in answers if data["waiting_for"]]
        if len(answers) < self._agents:
            missing.insert(
                0, f"{len(answers)} of {_agents(self._agents)} there" if answers else "no agent is there yet"
            )
        return Progress(missing=missing) if missing else Progress(f"{_agents(len(answers))} ready")


class Drained:
    """Every agent takes no new rooms and has none; who ends in the meantime has none either."""

    calls: tuple[Call, ...] = (Call("status"),)

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look(self, survey: Survey) -> Progress:
        answers = survey.answers("status")
        here = {agent.name for agent, _ in answers}
        silent = [f"{fault.agent}: {fault.message}" for fault in survey.faults if fault.agent not in self._seen]
        gone = self._seen - here
        self._seen |= here
        if not self._seen:
            return Progress(missing=silent or ["no agent is there"])
        open_ = [agent.name for agent, data in answers if not data.get("draining")]
        if open_:
            return Progress(
                impossible=f"{', '.join(open_)} take{'s' * (len(open_) == 1)} new rooms: kvctl drain {' '.join(open_)}"
            )
        missing = [
            f"{agent.name}: {_rooms(active)} active" for agent, data in answers if (active := _active(data["rooms"]))
        ]
        if missing or silent:
            return Progress(missing=[*missing, *silent])
        ended = f", {_agents(len(gone))} ended" if gone else ""
        return Progress(f"{_agents(len(here))} drained{ended}")


class RoomIn:
    """A room is in a state, or past it, on all ranks that know it; of a number used again, the newest."""

    def __init__(self, number: str, state: str) -> None:
        self._number = number
        self._state = state
        self.calls: tuple[Call, ...] = (Call("room", {"room": number}),)

    def look(self, survey: Survey) -> Progress:
        details = [detail for _, data in survey.answers("room") for detail in data]
        survey.set_unknown_rooms_aside()
        rooms = join(details, {agent.name: agent.clock for agent in survey.agents})
        name = f"room {self._number}"
        if not rooms:
            missing = [f"{fault.agent}: {fault.message}" for fault in survey.faults]
            return Progress(missing=missing or [f"{name}: no agent knows it yet"])
        room = rooms[0]
        failed = RoomState.FAILED.label
        if room.state == self._state or (
            failed not in {room.state, self._state} and _order(room.state) > _order(self._state)
        ):
            return Progress(f"{name} is in {room.state}")
        if room.state == failed:
            why = f": {room.failure['rank']}: {room.failure['text']}" if room.failure else ""
            return Progress(impossible=f"{name} failed{why}")
        if self._state == failed and room.state == RoomState.SUCCESS.label:
            return Progress(impossible=f"{name} has succeeded")
        behind = ", ".join(f"{rank['agent']} in {rank['state']}" for rank in room.ranks if rank["state"] != self._state)
        return Progress(missing=[f"{name}: {behind}"])


def _order(state: str) -> int:
    return STATE_LABELS.index(state)


def _active(rooms: Mapping[str, Any]) -> int:
    """Rooms that have not finished; those that have are listed until their engine has asked for the last time."""
    return sum(count for state, count in rooms.items() if state not in {"Success", "Failed"})


def _agents(number: int) -> str:
    return f"{number} agent{'s' * (number != 1)}"


def _rooms(number: int) -> str:
    return f"{number} room{'s' * (number != 1)}"
