"""What an agent of a recorded moment answers: the arguments of each command applied to what was kept, as it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from kvctl.client.calls import Call
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import FINISHED, room_rows
from kvctl.client.fleet_snapshot import AgentSnapshot
from kvctl_agent.contract.admin import ErrorCode

_ROWS = 1000


class Absent(Exception):
    """There is no such answer; `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class AgentHistory:
    """What a moment of a series does not repeat, of one life of an agent: old events, and rooms that have finished.

    It may know more than the moment that asks; what that moment could not know yet is not given to it.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.rooms: dict[tuple[str, str], Any] = {}  # by number and nonce
        self.layers: dict[str, list[Any]] = {}

    def add(self, seen: AgentSnapshot) -> None:
        """Of the next moment."""
        assert seen.answer is not None
        self.events += seen.answer.data.get("events", {}).get("events", ())
        for room, details in seen.rooms.items():
            finished = {(room, one["nonce"]): one for one in details if one["finished_at_ns"] is not None}
            self.rooms.update(finished)
            if len(finished) == len(details) and room in seen.layers:
                self.layers[room] = list(seen.layers[room])


Remember = Callable[[], AgentHistory]


def answer(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    """What `seen` answers to `call`; `past` includes what it says itself.

    Raises:
        Absent: it refused, or the file does not hold it.
    """
    assert seen.answer is not None
    if call.command == "hello":
        return seen.answer.hello
    special = _SPECIAL.get((call.command, "room" in call.args))
    return _whole(seen, call.command) if special is None else special(seen, past, call)


def _whole(seen: AgentSnapshot, command: str) -> Any:
    assert seen.answer is not None
    if command in seen.answer.data:
        return seen.answer.data[command]
    fault = seen.refused.get(command)
    if fault is None:
        text = f"{command} was not asked when this was recorded"
        fault = Fault(seen.endpoint.name, FaultCode.NOT_CAPTURED, text)
    raise Absent(fault)


def _rooms(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    state = call.args.get("state")
    rows = [row for row in _whole(seen, "rooms") if state in {None, row["state"]}]
    return rows[: call.args.get("limit", _ROWS)]


def _first(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    return _whole(seen, call.command)[: call.args.get("limit", _ROWS)]


def _failed(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    whole = _whole(seen, "failed")
    return {**whole, "rooms": whole["rooms"][: call.args.get("limit", _ROWS)]}


def _events(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    """As the recorder numbers them."""
    following = _whole(seen, "events")["next"]
    rows = [row for row in past().events if row["sequence"] < following]
    since, limit = call.args.get("since"), call.args.get("limit", _ROWS)
    if since is None:
        return {"events": rows[-limit:] if limit else [], "next": following, "dropped": 0}
    oldest = rows[0]["sequence"] if rows else following
    chosen = [row for row in rows if row["sequence"] >= since][:limit]
    dropped = max(0, oldest - since) if since < following else 0
    if since < following:
        following = chosen[-1]["sequence"] + 1 if chosen else max(since, oldest)
    return {"events": chosen, "next": following, "dropped": dropped}


def _room(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    number = call.args["room"]
    if number in seen.rooms:
        return seen.rooms[number] or _unknown(seen, number)
    found = []
    for row in _known(seen, number):
        told = past().rooms.get((number, row["nonce"])) if row["finished_at_ns"] is not None else None
        # Of a room whose timeline was left out there is still its row.
        found.append(told or {**row, "timeline": [], "timeline_dropped": 0})
    return found


def _room_layers(seen: AgentSnapshot, past: Remember, call: Call) -> Any:
    room = call.args["room"]
    if "layers" in seen.refused:
        raise Absent(seen.refused["layers"])
    if room in seen.layers:
        return seen.layers[room] or _unknown(seen, room)
    if all(row["finished_at_ns"] is not None for row in _known(seen, room)) and room in past().layers:
        return past().layers[room]
    text = f"the layers of room {room} were left out when this was recorded"
    raise Absent(Fault(seen.endpoint.name, FaultCode.NOT_CAPTURED, text))


def _known(seen: AgentSnapshot, room: str) -> list[Any]:
    """Rows of the room, each of its lives once.

    Raises:
        Absent: there are none.
    """
    assert seen.answer is not None
    rows = [
        row for command in ("rooms", *FINISHED) for row in room_rows(seen.answer.data, command) if row["room"] == room
    ]
    return list({row["nonce"]: row for row in rows}.values()) or _unknown(seen, room)


def _unknown(seen: AgentSnapshot, room: str) -> NoReturn:
    text = f"{seen.endpoint.name} knows no room {room}, active or lately"
    raise Absent(Fault(seen.endpoint.name, ErrorCode.UNKNOWN_ROOM, text))


_SPECIAL: dict[tuple[str, bool], Callable[[AgentSnapshot, Remember, Call], Any]] = {
    ("rooms", False): _rooms,
    ("history", False): _first,
    ("slow", False): _first,
    ("failed", False): _failed,
    ("events", False): _events,
    ("room", True): _room,
    ("layers", True): _room_layers,
}
