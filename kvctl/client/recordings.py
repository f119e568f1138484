"""Reads recordings, and answers queries from them as a live fleet would.

A recording is a series of snapshots of the fleet. A snapshot is stored as one frame with its own fields, followed by
one frame with the answers of each agent: JSON of the classes below, compressed with zlib. Recordings are untrusted
input: sizes are checked before anything is decompressed, types when a snapshot is decoded, and nothing is written to
disk.
"""

from __future__ import annotations

import fnmatch
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import IO, Any, get_args, get_origin, get_type_hints

import orjson

from kvctl.client import recording_file as form
from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint, public
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import FINISHED, Survey, gather, room_rows
from kvctl.client.names import matches_name, told_apart
from kvctl.client.recording_file import RecordingError, RecordingVersionError
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.values import near

_MAX_MOMENTS_BYTES = 512 << 20  # compressed
_DECODED_MOMENTS = 3
_LISTS = frozenset({"rooms", *FINISHED})

_hints = cache(get_type_hints)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of one agent to one command: `data`, or a `fault` instead.

    Attributes:
        room: argument of the commands `room` and `layers`, else None. Other arguments are not stored, because the
            recorder requests all data of a command.
    """

    command: str
    room: str | None
    data: Any
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class RecordedAgent:
    """Answers of one agent in one snapshot; an agent that did not answer `hello` has only the fault of that."""

    endpoint: Endpoint
    rtt_ns: int
    clock: ClockOffset
    answers: list[Answer]

    def find(self, command: str, room: str | None = None) -> Answer | None:
        """Returns the answer to `command` about `room`; None if it is not stored."""
        return next((each for each in self.answers if (each.command, each.room) == (command, room)), None)

    @property
    def hello(self) -> Answer:
        """The answer to `hello`; raises KeyError if it is not stored."""
        if (answer := self.find("hello")) is None:
            raise KeyError("hello")
        return answer


@dataclass(frozen=True, slots=True)
class RecordedSnapshot:
    """Snapshot of a fleet: answers of its agents at about the same time.

    Attributes:
        faults: agents that the user named and that were not found.
        left_out: descriptions of data omitted for lack of space or time.
    """

    at_ns: int
    directory: Path
    stale: list[Endpoint]
    faults: list[Fault]
    agents: list[RecordedAgent]
    left_out: list[str]

    @property
    def silent(self) -> list[Fault]:
        """Faults of the agents that did not answer `hello`."""
        return [agent.hello.fault for agent in self.agents if agent.hello.fault is not None]

    def document(self) -> Any:
        """Returns the snapshot as JSON values."""
        return orjson.loads(_json(self))


def text_endpoint(endpoint: Endpoint) -> Endpoint:
    """Returns the endpoint with texts that JSON can encode; file names may contain any bytes."""
    path = None if endpoint.path is None else Path(utf8(str(endpoint.path)))
    return Endpoint(utf8(endpoint.name), path, remote=public(endpoint.remote), host_name=utf8(endpoint.host_name))


def text_fault(fault: Fault) -> Fault:
    """Returns the fault with texts that JSON can encode."""
    return Fault(utf8(fault.agent), str(fault.code), utf8(fault.message))


def utf8(text: str) -> str:
    """Returns the text with lone surrogates, which JSON cannot encode, replaced by escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def encode(snapshot: RecordedSnapshot, number: int) -> Iterator[bytes]:
    """Encodes a snapshot as frames; data that is too large for a frame is omitted and described in `left_out`.

    `number` is the position of the snapshot in its recording.
    """
    left_out = list(snapshot.left_out)
    agents: list[bytes] = []
    for agent in snapshot.agents:
        body, removed = _fitting(agent)
        left_out += removed
        about = {"moment": number, "agent": agent.endpoint.name}
        agents.append(form.encode_frame(form.ANSWERS, about, zlib.compress(body)))
    head = replace(snapshot, agents=[], left_out=left_out)
    about = {"moment": number, "at_ns": snapshot.at_ns, "agents": len(agents), "form": form.MOMENT_VERSION}
    yield form.encode_frame(form.MOMENT, about, zlib.compress(_json(head)))
    yield from agents


def decode(at_ns: int, bodies: Sequence[bytes]) -> RecordedSnapshot:
    """Decodes a snapshot of time `at_ns` from the bodies of its frames, of which those after the first are agents.

    Raises:
        RecordingError: the bodies are damaged.
    """
    try:
        head, *agents = (orjson.loads(form.decompress(body)) for body in bodies)
        return of_document({**head, "at_ns": at_ns, "agents": agents})
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"it is damaged: a snapshot lacks {error}") from None


def of_document(document: Any) -> RecordedSnapshot:
    """Creates a snapshot from JSON values; the inverse of `RecordedSnapshot.document`.

    Raises:
        KeyError, TypeError: the document lacks a field or has a field of another type.
    """
    snapshot: RecordedSnapshot = _structured(RecordedSnapshot, document)
    for agent in snapshot.agents:
        if agent.hello.fault is None:
            for name, kind in (("name", str), ("role", str), ("incarnation", str), ("now_ns", int)):
                _structured(kind, agent.hello.data[name])
    return snapshot


def _structured(kind: Any, value: Any) -> Any:
    """Converts a JSON value to type `kind`: a dataclass, a list, an optional, a path or a scalar.

    Raises:
        KeyError, TypeError: a field is missing, or a value has another type.
    """
    arguments = get_args(kind)
    if kind is Any or (value is None and NoneType in arguments):
        return value
    if arguments:
        if get_origin(kind) is list:
            return [_structured(arguments[0], each) for each in _structured(list, value)]
        return _structured(arguments[0], value)
    if isinstance(kind, type) and is_dataclass(kind):
        # Recordings of earlier versions lack fields that have been added since, with a default.
        added = {each.name for each in fields(kind) if each.default is not MISSING} - set(_structured(dict, value))
        return kind(
            **{name: _structured(hint, value[name]) for name, hint in _hints(kind).items() if name not in added}
        )
    if kind is Path:
        return Path(_structured(str, value))
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__}, and has {value!r:.40}")
    return value


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=str)  # str is for paths


def _fitting(agent: RecordedAgent) -> tuple[bytes, list[str]]:
    """Encodes an agent's answers for one frame, and omits answers until the rest fits.

    Answers about rooms are omitted first, then the largest answers.

    Returns:
        The encoded answers, and descriptions of the omitted ones.
    """
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
    """Sequence of the snapshots in a file, decoded on access; `at_ns` has the wall-clock time of each."""

    def __init__(self, path: Path, packed: list[_Packed]) -> None:
        self._path = path
        self._packed = packed
        self.at_ns = [each.at_ns for each in packed]
        self._decoded = lru_cache(_DECODED_MOMENTS)(self._decode)

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[RecordedSnapshot]:
        return map(self._decoded, range(len(self)))

    def __getitem__(self, index: int) -> RecordedSnapshot:
        """Returns the snapshot with this index, decoded; raises CliError if it is damaged."""
        return self._decoded(index)

    def _decode(self, index: int) -> RecordedSnapshot:
        with file_errors(self._path):
            return decode(self._packed[index].at_ns, self._packed[index].bodies)


def load(path: Path) -> SnapshotReader:
    """Opens a recording.

    Raises:
        CliError: the file is damaged or has no snapshot (exit 1), may not be read (exit 5), or has another version
            (exit 6).
    """
    with file_errors(path), path.open("rb") as file:
        packed = _snapshots(file)
    if not packed:
        raise CliError(f"{path}: it has no snapshot of a fleet: record one with kvctl record")
    return SnapshotReader(path, packed)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Converts errors of reading `path` within the block into CliErrors with the matching exit codes."""
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
def content_errors(path: Path) -> Iterator[None]:
    """Converts errors within the block into CliErrors.

    They are caused by answers of another structure: recorded by another version, or edited by hand.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        text = f"{path}: this kvctl cannot read its contents: {type(error).__name__} {error}"
        raise CliError(text, ExitCode.PROTOCOL) from error


def _snapshots(file: IO[bytes]) -> list[_Packed]:
    found: list[_Packed] = []
    nbytes = 0
    for kind, about, body in form.read_frames(file):
        if kind not in {form.MOMENT, form.ANSWERS}:
            continue
        nbytes += len(body)
        if nbytes > _MAX_MOMENTS_BYTES:
            raise RecordingError(f"its snapshots have more than {_MAX_MOMENTS_BYTES >> 20} MiB, more than kvctl writes")
        if about.get("moment") != len(found) - (kind == form.ANSWERS):
            raise RecordingError("it is damaged: its snapshots are not consecutive")
        if kind == form.MOMENT:
            version, at_ns, expected = about.get("form"), about.get("at_ns"), about.get("agents")
            if version != form.MOMENT_VERSION:
                raise RecordingVersionError(
                    f"its snapshots have version {version!r:.20}, this kvctl reads version {form.MOMENT_VERSION}: "
                    "read it with the kvctl that made it"
                )
            if type(at_ns) is not int or type(expected) is not int or not 0 <= at_ns < 1 << 63:
                raise RecordingError("it is damaged: a snapshot has no valid time")
            found.append(_Packed(at_ns, expected))
        found[-1].bodies.append(body)
    if any(len(each.bodies) != each.expected + 1 for each in found):
        raise RecordingError("it is damaged: agents are missing in a snapshot")
    return found


_DEFAULT_ROWS = 1000  # default limit of the agents


class RecordingSource:
    """Answers queries from the current snapshot of a file; a `Source` like a live `Fleet`.

    Args:
        endpoints: names, globs or addresses of agents; empty means all agents in the file.
        at: index of the snapshot to begin with; negative indices count from the end, to the first at most.

    Attributes:
        moments: wall-clock time of each snapshot, ns.
        moment: index of the current snapshot.

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
        self._in_histories = 0  # number of snapshots added to the histories
        self.moments: Sequence[int] = self._file.at_ns
        self.moment = 0
        self.seek(at if at >= 0 else max(0, len(self.moments) + at))

    def __enter__(self) -> RecordingSource:
        return self

    def __exit__(self, *_: object) -> None: ...

    def seek(self, index: int) -> None:
        """Makes the snapshot with this index the current one; raises IndexError if the file has no such snapshot."""
        if not 0 <= index < len(self.moments):
            raise IndexError(f"{self._path} has {len(self.moments)} snapshots, none with index {index}")
        self.moment = index

    def advance(self) -> bool:
        """Makes the next snapshot the current one; returns False and changes nothing if there is none."""
        if self.moment + 1 == len(self.moments):
            return False
        self.moment += 1
        return True

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """Returns the answers in the current snapshot, with the clock offsets measured when it was recorded."""
        snapshot = self._file[self.moment]
        with content_errors(self._path):
            survey = gather(self._select(snapshot), calls, self._labels, self._ask, {})
            survey.at_ns = survey.tick_ns = snapshot.at_ns
            survey.remarks.append(self._when())
            for agent in survey.agents:
                if any(not rank["timeline"] and not rank["timeline_dropped"] for rank in agent.data.get("room", ())):
                    survey.remarks.append(f"{agent.name}: the timeline of this room was left out of {self._path.name}")
        return survey

    def _select(self, snapshot: RecordedSnapshot) -> Discovery:
        """Returns the requested agents of a snapshot in the order of the request, and faults for missing agents."""
        live = [agent.endpoint for agent in snapshot.agents]
        if not self._endpoints:
            return Discovery(snapshot.directory, live, list(snapshot.stale), list(snapshot.faults))
        found = Discovery(snapshot.directory)
        names = agent_names(snapshot)
        for wanted in self._endpoints:
            named = [each for each in live if _named(each, wanted) or matches_name(wanted, *names.get(each, ()))]
            stale = [each for each in snapshot.stale if _named(each, wanted)]
            found.live += [each for each in named if each not in found.live]
            found.stale += [each for each in stale if each not in found.stale]
            if faults := [fault for fault in snapshot.faults if fault.agent == wanted]:
                found.faults += faults
            elif stale:
                text = "the agent had ended and left its socket"
                found.faults += [Fault(each.name, FaultCode.UNREACHABLE, text) for each in stale]
            elif not named:
                known = [names[each][-1] if each in names else each.name for each in live]
                hint = near(wanted, known) or (f"; it has {', '.join(known)}" if known else "")
                text = f"{self._path} has no agent {wanted}{hint}"
                found.faults.append(Fault(wanted, FaultCode.UNREACHABLE, text))
        return found

    def _ask(self, requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        agents = {agent.endpoint: agent for agent in self._file[self.moment].agents}
        return [self._reply(agents[endpoint], call) for endpoint, call in requests]

    def _reply(self, agent: RecordedAgent, call: Call) -> Reply:
        answer = self._answer(agent, call)
        sent_at_ns = received_at_ns = 0
        if call.command == "hello" and answer.fault is None:  # yields the clock offset of the snapshot
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
            return self._history(agent).finished_room(agent, room)
        if stored is None:
            return _missing(agent, call, f"{command} was not asked when this was recorded")
        if stored.fault is not None or not (command == "events" or command in _LISTS):
            return stored
        if command == "events":
            return Answer(command, None, self._history(agent).events_page(stored.data["next"], call.args))
        return Answer(command, None, _narrow(stored.data, call.args))

    def _history(self, agent: RecordedAgent) -> _History:
        """Returns the history of an agent process, which has at least the snapshots up to the current one."""
        while self._in_histories <= self.moment:
            for each in self._file[self._in_histories].agents:
                if each.hello.fault is None:
                    self._histories.setdefault(_process(each), _History()).add(each)
            self._in_histories += 1
        return self._histories[_process(agent)]

    def _when(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.moments[self.moment] / 1e9))
        count = len(self.moments)
        place = f", snapshot {self.moment + 1} of {count}; -w shows them all" if count > 1 else ""
        return f"{self._path.name} as of {at}{place}"


class _History:
    """Old events and finished rooms of one agent process, which later snapshots do not repeat.

    A history may contain data of snapshots later than the current one; queries exclude that data.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._rooms: dict[tuple[str, str], Any] = {}  # by number and nonce

    def add(self, agent: RecordedAgent) -> None:
        """Adds the events and finished rooms in an agent's answers; call once per snapshot, in order."""
        for answer in agent.answers:
            if answer.fault is not None:
                continue
            if answer.command == "events":
                self._events += answer.data["events"]
            elif answer.command == "room" and answer.room is not None:
                finished = [one for one in answer.data if one["finished_at_ns"] is not None]
                self._rooms.update(((answer.room, one["nonce"]), one) for one in finished)

    def events_page(self, following: int, args: Mapping[str, Any]) -> Any:
        """Returns the answer to `events` that the agent would have given before event number `following`.

        `args` has the arguments `since` and `limit`.
        """
        rows = [row for row in self._events if row["sequence"] < following]
        since, limit = args.get("since"), args.get("limit", _DEFAULT_ROWS)
        if since is None:
            return {"events": rows[-limit:] if limit else [], "next": following, "dropped": 0}
        if since >= following:
            return {"events": [], "next": following, "dropped": 0}
        oldest = rows[0]["sequence"] if rows else following
        chosen = [row for row in rows if row["sequence"] >= since][:limit]
        following = chosen[-1]["sequence"] + 1 if chosen else max(since, oldest)
        return {"events": chosen, "next": following, "dropped": following - since - len(chosen)}

    def finished_room(self, agent: RecordedAgent, room: str) -> Answer:
        """Returns the answer to `room` for a finished room whose details are in an earlier snapshot."""
        data = {answer.command: answer.data for answer in agent.answers if answer.fault is None}
        rows = [row for each in ("rooms", *FINISHED) for row in room_rows(data, each) if row["room"] == room]
        rows = list({row["nonce"]: row for row in rows}.values())
        if not rows:
            text = f"{agent.endpoint.name} knows no room {room}, active or recent"
            return _missing(agent, Call("room", {"room": room}), text, ErrorCode.UNKNOWN_ROOM)
        # The row of a room is available even if its timeline was omitted.
        bare = {"timeline": [], "timeline_dropped": 0}
        known = {
            row["nonce"]: self._rooms.get((room, row["nonce"])) for row in rows if row["finished_at_ns"] is not None
        }
        return Answer("room", room, [known.get(row["nonce"]) or {**row, **bare} for row in rows])


def _narrow(data: Any, args: Mapping[str, Any]) -> Any:
    """Filters an answer that lists rooms by the arguments `state` and `limit`, as the agent does."""
    rows = data["rooms"] if isinstance(data, Mapping) else data
    rows = [row for row in rows if args.get("state") in {None, row["state"]}][: args.get("limit", _DEFAULT_ROWS)]
    return {**data, "rooms": rows} if isinstance(data, Mapping) else rows


def _missing(agent: RecordedAgent, call: Call, text: str, code: str = FaultCode.NOT_CAPTURED) -> Answer:
    return Answer(call.command, call.args.get("room"), None, Fault(agent.endpoint.name, code, text))


def _process(agent: RecordedAgent) -> tuple[Endpoint, str]:
    """Returns the endpoint and incarnation, which identify an agent process."""
    return agent.endpoint, agent.hello.data["incarnation"]


def agent_names(snapshot: RecordedSnapshot) -> dict[Endpoint, tuple[str, str]]:
    """Returns the names of each agent that answered: the one that it gave itself, and the one that no other has."""
    answers = [(agent.endpoint, agent.hello.data) for agent in snapshot.agents if agent.hello.fault is None]
    known = told_apart([(hello["name"], hello.get("host") or "", hello["incarnation"]) for _, hello in answers])
    return {endpoint: (hello["name"], new) for (endpoint, hello), new in zip(answers, known, strict=True)}


def _named(endpoint: Endpoint, wanted: str) -> bool:
    if "/" in wanted:
        return wanted in {endpoint.address, str(endpoint.path)}
    return fnmatch.fnmatchcase(endpoint.name, wanted)
