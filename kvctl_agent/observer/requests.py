"""Parses and validates admin requests; does no I/O.

Arguments are checked against the declared commands, so that a handler never receives a wrong type, an unknown argument
or a room number beyond 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from kvctl_agent.contract.admin import MAGIC, MAX_REQUEST_BYTES, MAX_REQUEST_ID_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS_BY_NAME, Arg, Command
from kvctl_agent.contract.states import MAX_ROOM
from kvctl_agent.contract.values import near
from kvctl_agent.errors import RequestRefused

MAX_INT = 2**63 - 1
_SHOWN = 60  # characters of a client's text in an error message


class Request(NamedTuple):
    """A validated request; `args` has the declared arguments that the client passed, with room numbers as int."""

    command: Command
    args: dict[str, Any]


def request_id(frames: Sequence[bytes]) -> bytes:
    """Returns the request id, which the reply repeats; empty if the request has no valid id."""
    if len(frames) >= 2 and len(frames[1]) <= MAX_REQUEST_ID_BYTES:
        return frames[1]
    return b""


def parse_frames(frames: Sequence[bytes]) -> bytes:
    """Returns the JSON body of a request.

    Args:
        frames: frames of the request, without the client's identity.

    Raises:
        RequestRefused: the frames are not `[MAGIC, request id, body]`, or the request id or the body is too large.
    """
    if not frames or frames[0] != MAGIC:
        first = bytes(frames[0][:8]) if frames else b""
        raise _refusal(
            f"this is kvctl's admin socket: the first frame must be {MAGIC!r}, not {first!r}", ErrorCode.PROTOCOL
        )
    if len(frames) != 3:
        raise _refusal(f"a request has 3 frames (magic, request id, JSON), this one has {len(frames)}")
    if len(frames[1]) > MAX_REQUEST_ID_BYTES:
        raise _refusal(f"the request id has {len(frames[1])} bytes, at most {MAX_REQUEST_ID_BYTES} are allowed")
    if len(frames[2]) > MAX_REQUEST_BYTES:
        raise _refusal(
            f"the request has {len(frames[2])} bytes, at most {MAX_REQUEST_BYTES} are allowed", ErrorCode.TOO_LARGE
        )
    return frames[2]


def parse_body(body: bytes, commands: Mapping[str, Command] = COMMANDS_BY_NAME) -> Request:
    """Parses the body of a request into the command and its checked arguments.

    Raises:
        RequestRefused: the body is not a JSON object with `cmd` and `args`, the command is unknown, or an argument is
            invalid.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _refusal(f"the request is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _refusal('the request must be an object {"cmd": ..., "args": {...}}')
    for name in document:
        if name not in {"cmd", "args"}:
            raise _refusal(f"unknown field {_shown(name)} in the request: it takes cmd and args")
    name = document.get("cmd")
    if not isinstance(name, str):
        raise _refusal("the request names no command: cmd must be a string")
    command = commands.get(name)
    if command is None:
        raise _refusal(f"unknown command {_shown(name)}{near(name[:_SHOWN], commands)}", ErrorCode.UNKNOWN_COMMAND)
    arguments = document.get("args")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _refusal(f"args of {command.name} must be an object", ErrorCode.BAD_ARGUMENT)
    return Request(command, _arguments(command, arguments))


def _arguments(command: Command, arguments: Mapping[str, object]) -> dict[str, Any]:
    declared = {arg.name: arg for arg in command.args}
    for name in arguments:
        if name not in declared:
            takes = f"(it takes {', '.join(declared) or 'no arguments'}){near(name[:_SHOWN], declared)}"
            raise _refusal(f"{command.name} has no argument {_shown(name)} {takes}", ErrorCode.BAD_ARGUMENT)
    checked = {}
    for arg in command.args:
        value = arguments.get(arg.name)
        if value is not None:
            checked[arg.name] = _value(command, arg, value)
        elif arg.required:
            raise _refusal(f"{command.name} needs the argument {arg.name}: {arg.help}", ErrorCode.BAD_ARGUMENT)
    return checked


def _value(command: Command, arg: Arg, value: object) -> Any:
    match arg.type:
        case "int":
            # In Python a bool is an int; as an argument it is a mistake.
            if type(value) is int and 0 <= value <= MAX_INT:
                return value
            expected = f"an integer from 0 to {MAX_INT}"
        case "bool":
            if isinstance(value, bool):
                return value
            expected = "true or false"
        case "room":
            # Check the length first: converting a megabyte of digits takes minutes.
            if isinstance(value, str) and len(value) <= 20 and value.isascii() and value.isdigit():
                room = int(value)
                if room <= MAX_ROOM:
                    return room
            expected = f"a room number, as a decimal string from 0 to {MAX_ROOM}"
        case "str-list":
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return value
            expected = "a list of strings"
        case "str":
            if isinstance(value, str):
                if not arg.choices or value in arg.choices:
                    return value
                expected = f"one of {', '.join(arg.choices)}{near(value[:_SHOWN], arg.choices)}"
            else:
                expected = "a string"
    raise _refusal(
        f"argument {arg.name} of {command.name} cannot be {_shown(value)}: expected {expected}", ErrorCode.BAD_ARGUMENT
    )


def _refusal(text: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> RequestRefused:
    return RequestRefused(code, text)


def _shown(value: object) -> str:
    """Formats a client's value for an error message: short, and safe to print on a terminal."""
    text = ascii(value[: _SHOWN + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
