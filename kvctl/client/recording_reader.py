"""Moments of a fleet as a recording stores them: one frame for the moment, one for the answers of each agent.

Both frames are JSON of the classes below, compressed with zlib. A recording or debug bundle may come from anywhere:
sizes are bounded before anything is unpacked, types are checked, and no byte of it is written to disk. Moments are
decoded when they are looked at.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import IO, Any, get_args, get_origin, get_type_hints

import orjson

from kvctl.client import bundle_reader
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract import recording as form
from kvctl_agent.contract.recording import RecordingError, RecordingVersionError

_hints = cache(get_type_hints)
_MAX_MOMENTS_BYTES = 512 << 20  # compressed; inputs of state machines beside them are not counted
_DECODED_MOMENTS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one agent to one command: `data`, or the fault in its place.

    Attributes:
        room: argument of the commands `room` and `layers`. Other arguments are not stored: every command is asked for
            all that it can answer.
    """

    command: str
    room: str | None
    data: Any
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class RecordedAgent:
    """Answers of one agent at one moment; of an agent that did not greet, only the fault of its `hello`."""

    endpoint: Endpoint
    rtt_ns: int
    clock: ClockOffset
    answers: list[Answer]

    def find(self, command: str, room: str | None = None) -> Answer | None:
        """The answer to that command about that room."""
        return next((each for each in self.answers if (each.command, each.room) == (command, room)), None)

    @property
    def hello(self) -> Answer:
        """Raises KeyError where the agent was not asked."""
        if (answer := self.find("hello")) is None:
            raise KeyError("hello")
        return answer


@dataclass(frozen=True, slots=True)
class Moment:
    """Answers of a fleet at about the same time.

    Attributes:
        directory: where sockets were looked for.
        stale: sockets of processes that are gone.
        faults: of agents that were asked for and not found.
        left_out: what is missing for lack of space or time, in words.
    """

    at_ns: int
    directory: Path
    stale: list[Endpoint]
    faults: list[Fault]
    agents: list[RecordedAgent]
    left_out: list[str]

    @property
    def silent(self) -> list[Fault]:
        """Why agents did not greet."""
        return [agent.hello.fault for agent in self.agents if agent.hello.fault is not None]

    def document(self) -> Any:
        """The moment, JSON-ready."""
        return orjson.loads(_json(self))


def text_endpoint(endpoint: Endpoint) -> Endpoint:
    """The same endpoint with names that JSON can hold: file names need not be text."""
    path = None if endpoint.path is None else Path(utf8(str(endpoint.path)))
    return Endpoint(utf8(endpoint.name), path, remote=endpoint.remote)


def text_fault(fault: Fault) -> Fault:
    """The same fault in text that JSON can hold."""
    return Fault(utf8(fault.agent), str(fault.code), utf8(fault.message))


def utf8(text: str) -> str:
    """`text` with lone surrogates, which JSON cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def encode(moment: Moment, number: int) -> Iterator[bytes]:
    """Frames of the moment with that number; what is too large for a frame is left out and named in the moment."""
    left_out = list(moment.left_out)
    agents: list[bytes] = []
    for agent in moment.agents:
        body, removed = _fitting(agent)
        left_out += removed
        about = {"moment": number, "agent": agent.endpoint.name}
        agents.append(form.encode_frame(form.ANSWERS, about, zlib.compress(body)))
    head = replace(moment, agents=[], left_out=left_out)
    about = {"moment": number, "at_ns": moment.at_ns, "agents": len(agents), "form": form.MOMENT_VERSION}
    yield form.encode_frame(form.MOMENT, about, zlib.compress(_json(head)))
    yield from agents


def decode(at_ns: int, bodies: Sequence[bytes]) -> Moment:
    """The moment with these frame bodies, its own first.

    Raises:
        RecordingError: the bodies are damaged.
    """
    try:
        head, *agents = (orjson.loads(form.decompress(body, form.MAX_ANSWERS_BYTES)) for body in bodies)
        return of_document({**head, "at_ns": at_ns, "agents": agents})
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"it is damaged: a moment lacks {error}") from None


def of_document(document: Any) -> Moment:
    """The moment that has this `Moment.document`.

    Raises:
        KeyError, TypeError: it has not the form of one.
    """
    moment: Moment = _structured(Moment, document)
    for agent in moment.agents:
        if agent.hello.fault is None:
            for name, kind in (("name", str), ("role", str), ("incarnation", str), ("now_ns", int)):
                _structured(kind, agent.hello.data[name])
    return moment


def _structured(kind: Any, value: Any) -> Any:
    """JSON as an instance of `kind`: a dataclass, a list, an optional, a path or a scalar."""
    arguments = get_args(kind)
    if kind is Any or (value is None and NoneType in arguments):
        return value
    if arguments:
        if get_origin(kind) is list:
            return [_structured(arguments[0], each) for each in _structured(list, value)]
        return _structured(arguments[0], value)
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{name: _structured(hint, value[name]) for name, hint in _hints(kind).items()})
    if kind is Path:
        return Path(_structured(str, value))
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__}, and has {value!r:.40}")
    return value


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=str)  # a path is a text


def _fitting(agent: RecordedAgent) -> tuple[bytes, list[str]]:
    """JSON of what fits a frame, and what was removed: answers about rooms first, then the largest."""
    removed: list[str] = []
    name = agent.endpoint.name
    while len(body := _json(agent)) > form.MAX_ANSWERS_BYTES:
        rooms = {each.room for each in agent.answers if each.room is not None}
        if rooms:
            removed.append(f"{name}: timelines and layers of {len(rooms)} rooms, which were too large")
            answers = [each for each in agent.answers if each.room is None]
        else:
            largest = max(agent.answers, key=lambda each: len(_json(each.data)))
            text = f"its answer to {largest.command} was too large for a recording"
            removed.append(f"{name}: {text}")
            instead = Answer(largest.command, None, None, Fault(name, FaultCode.NOT_CAPTURED, text))
            answers = [instead if each is largest else each for each in agent.answers]
        agent = replace(agent, answers=answers)
    return body, removed


@dataclass(slots=True)
class _Packed:
    at_ns: int
    expected: int
    bodies: list[bytes] = field(default_factory=list)


class SnapshotReader:
    """The moments of a file in their order; `at_ns` has the time of each."""

    def __init__(self, path: Path, packed: list[_Packed]) -> None:
        self._path = path
        self._packed = packed
        self.at_ns = [each.at_ns for each in packed]
        self._decoded = lru_cache(_DECODED_MOMENTS)(self._decode)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> Moment:
        """Raises CliError where the moment is damaged."""
        return self._decoded(index)

    def _decode(self, index: int) -> Moment:
        with readable(self._path):
            return decode(self._packed[index].at_ns, self._packed[index].bodies)


def load(path: Path) -> SnapshotReader:
    """The moments of a recording, or of the one in a bundle.

    Raises:
        CliError: it cannot be read (exit 1), not by us (5), is of another version (6), or holds no moment (1).
    """
    with readable(path), path.open("rb") as file:
        packed = _moments(io.BytesIO(bundle_reader.recording(file)) if bundle_reader.is_bundle(file) else file)
    if not packed:
        raise CliError(
            f"{path}: it holds machine inputs only and no moment of a fleet: kvctl replay reads it; "
            "kvctl record of this version saves both"
        )
    return SnapshotReader(path, packed)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what is wrong with a file into one line and its exit code."""
    try:
        yield
    except RecordingVersionError as error:
        raise CliError(f"{path}: {error}", ExitCode.PROTOCOL) from None
    except RecordingError as error:
        raise CliError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CliError(f"{path}: there is no such file", ExitCode.USAGE) from None
    except PermissionError:
        raise CliError(f"{path}: you may not read it", ExitCode.NOT_PERMITTED) from None
    except OSError as error:
        raise CliError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turns answers of an unknown form, from another version or made by hand, into one line and its exit code."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        text = f"{path}: it does not hold what this kvctl reads: {type(error).__name__} {error}"
        raise CliError(text, ExitCode.PROTOCOL) from error


def _moments(file: IO[bytes]) -> list[_Packed]:
    found: list[_Packed] = []
    nbytes = 0
    for kind, about, body in form.read_frames(file):
        if kind not in {form.MOMENT, form.ANSWERS}:
            continue
        nbytes += len(body)
        if nbytes > _MAX_MOMENTS_BYTES:
            raise RecordingError(f"its moments have more than {_MAX_MOMENTS_BYTES >> 20} MiB, more than kvctl writes")
        if about.get("moment") != len(found) - (kind == form.ANSWERS):
            raise RecordingError("it is damaged: its moments do not follow each other")
        if kind == form.MOMENT:
            version, at_ns, expected = about.get("form"), about.get("at_ns"), about.get("agents")
            if version != form.MOMENT_VERSION:
                raise RecordingVersionError(
                    f"its moments are of version {version!r:.20}, this kvctl reads version {form.MOMENT_VERSION}: "
                    "read it with the kvctl that made it"
                )
            if type(at_ns) is not int or type(expected) is not int or not 0 <= at_ns < 1 << 63:
                raise RecordingError("it is damaged: a moment does not say when it was")
            found.append(_Packed(at_ns, expected))
        found[-1].bodies.append(body)
    if any(len(each.bodies) != each.expected + 1 for each in found):
        raise RecordingError("it is damaged: agents are missing in a moment")
    return found
