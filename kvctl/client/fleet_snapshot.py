"""What a fleet answered at one moment, and how it lies in a recording: a frame for the moment, one for each agent."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer
from kvctl_agent.contract import recording as form
from kvctl_agent.contract.recording import AnswersBody, EndpointBody, FaultBody, MomentBody, RecordingError


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """All that one agent answered.

    Attributes:
        fault: it did not greet; `answer` is None.
        answer: its `data` holds the answers to every command that reads, each as wide as was asked.
        refused: by command.
        rooms: answers to `room`, by room, empty where it did not know it after all; of one that finished earlier in
            the file the answer stands there.
        layers: answers to `layers` of a room, likewise.
    """

    endpoint: Endpoint
    fault: Fault | None = None
    answer: AgentAnswer | None = None
    refused: Mapping[str, Fault] = field(default_factory=dict)
    rooms: Mapping[str, list[Any]] = field(default_factory=dict)
    layers: Mapping[str, list[Any]] = field(default_factory=dict)

    @property
    def life(self) -> tuple[str, str]:
        """Tells one life of an agent from the next one of the same name."""
        return (self.endpoint.name, self.answer.hello["incarnation"] if self.answer else "")


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """A fleet, all at once or nearly so.

    Attributes:
        discovery: who was found; `live` in the order of `seen`.
        left_out: what there was no room or no time for, in words.
    """

    at_ns: int
    discovery: Discovery
    seen: Sequence[AgentSnapshot]
    left_out: Sequence[str] = ()


def encode(moment: FleetSnapshot, number: int) -> Iterator[bytes]:
    """The frames of a moment. Of an agent that has too much to say, the largest goes first and is told of."""
    left_out = list(moment.left_out)
    agents: list[bytes] = []
    for seen in moment.seen:
        body, dropped = _fitting(seen)
        left_out += dropped
        about = {"moment": number, "agent": seen.endpoint.name}
        agents.append(form.encode_frame(form.ANSWERS, about, zlib.compress(body)))
    told = _moment_body(moment)
    told["left_out"] = [utf8(text) for text in left_out]
    about = {
        "moment": number,
        "at_ns": moment.at_ns,
        "agents": len(agents),
        "form": form.MOMENT_VERSION,
    }
    yield form.encode_frame(form.MOMENT, about, zlib.compress(orjson.dumps(told)))
    yield from agents


def decode(at_ns: int, body: bytes, agents: Sequence[bytes]) -> FleetSnapshot:
    """A moment from the bodies of its frames.

    Raises:
        RecordingError: they are not what `encode` writes.
    """
    try:
        return of_bodies(at_ns, _document(body), [_document(agent) for agent in agents])
    except RecordingError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"it is damaged: a moment lacks {error}") from None


def bodies(moment: FleetSnapshot) -> tuple[MomentBody, list[AnswersBody]]:
    """A moment as plain data."""
    return _moment_body(moment), [_seen_body(seen) for seen in moment.seen]


def of_bodies(at_ns: int, told: MomentBody, agents: Sequence[AnswersBody]) -> FleetSnapshot:
    """The moment of which these are the `bodies`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: they are of none.
    """
    seen = [_seen(agent) for agent in agents]
    found = Discovery(
        Path(_text(told["directory"])),
        [each.endpoint for each in seen],
        [_endpoint(endpoint) for endpoint in told["stale"]],
        [_fault(fault) for fault in told["faults"]],
    )
    return FleetSnapshot(at_ns, found, seen, [_text(text) for text in told["left_out"]])


def _fitting(seen: AgentSnapshot) -> tuple[bytes, list[str]]:
    """What is written of one agent, and what had to go."""
    dropped: list[str] = []
    name = seen.endpoint.name
    while len(body := orjson.dumps(_seen_body(seen))) > form.MAX_ANSWERS_BYTES:
        if seen.layers or seen.rooms:
            dropped.append(f"{name}: timelines and layers of {len(seen.rooms)} rooms, which were too large")
            seen = replace(seen, rooms={}, layers={})
            continue
        assert seen.answer is not None  # nothing else is large
        data = seen.answer.data
        largest = max(data, key=lambda command: len(orjson.dumps(data[command])))
        text = f"its answer to {largest} was too large for a recording"
        dropped.append(f"{name}: {text}")
        seen = replace(
            seen,
            answer=replace(seen.answer, data={key: value for key, value in data.items() if key != largest}),
            refused={**seen.refused, largest: Fault(name, FaultCode.NOT_CAPTURED, text)},
        )
    return body, dropped


def _moment_body(moment: FleetSnapshot) -> MomentBody:
    return {
        "directory": utf8(str(moment.discovery.directory)),
        "stale": [_endpoint_body(endpoint) for endpoint in moment.discovery.stale],
        "faults": [_fault_body(fault) for fault in moment.discovery.faults],
        "left_out": [utf8(text) for text in moment.left_out],
    }


def _seen_body(seen: AgentSnapshot) -> AnswersBody:
    answer = seen.answer
    return {
        "endpoint": _endpoint_body(seen.endpoint),
        "fault": _fault_body(seen.fault) if seen.fault else None,
        "hello": answer.hello if answer else None,
        "rtt_ns": answer.rtt_ns if answer else 0,
        "clock": (answer.clock.offset_ns, answer.clock.error_ns) if answer else (0, 0),
        "answers": answer.data if answer else {},
        "refused": {command: _fault_body(fault) for command, fault in seen.refused.items()},
        "rooms": dict(seen.rooms),
        "layers": dict(seen.layers),
    }


def _seen(body: AnswersBody) -> AgentSnapshot:
    endpoint = _endpoint(body["endpoint"])
    hello = body["hello"]
    if hello is None:
        fault = body["fault"]
        if fault is None:
            raise ValueError("its greeting")
        return AgentSnapshot(endpoint, _fault(fault))
    for key, kind in (("name", str), ("role", str), ("incarnation", str), ("now_ns", int)):
        if not isinstance(hello[key], kind):  # type: ignore[literal-required]
            raise TypeError(f"the {key} of an agent")
    offset_ns, error_ns = body["clock"]
    answer = AgentAnswer(endpoint, hello, _whole(body["rtt_ns"]), ClockOffset(_whole(offset_ns), _whole(error_ns)))
    answer.data.update(body["answers"])
    return AgentSnapshot(
        endpoint,
        None,
        answer,
        {_text(command): _fault(fault) for command, fault in body["refused"].items()},
        {_text(room): list(found) for room, found in body["rooms"].items()},
        {_text(room): list(found) for room, found in body["layers"].items()},
    )


def _endpoint_body(endpoint: Endpoint) -> EndpointBody:
    return {
        "name": utf8(endpoint.name),
        "path": utf8(str(endpoint.path)) if endpoint.path is not None else None,
        "remote": endpoint.remote,
    }


def _endpoint(body: EndpointBody) -> Endpoint:
    path = body["path"]
    return Endpoint(_text(body["name"]), None if path is None else Path(_text(path)), remote=_text(body["remote"]))


def _fault_body(fault: Fault) -> FaultBody:
    return {"agent": utf8(fault.agent), "code": fault.code, "message": utf8(fault.message)}


def _fault(body: Mapping[str, Any]) -> Fault:
    return Fault(_text(body["agent"]), _text(body["code"]), _text(body["message"]))


def _document(body: bytes) -> Any:
    document = orjson.loads(form.decompress(body, form.MAX_ANSWERS_BYTES))
    if not isinstance(document, dict):
        raise TypeError("its description")
    return document


def utf8(text: str) -> str:
    """Names of files need not be text; JSON is."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text, and has {value!r:.40}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a number, and has {value!r:.40}")
    return value
