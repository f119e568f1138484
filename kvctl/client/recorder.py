"""Records a fleet into one file: snapshots of what the read-only commands show.

The number of rooms whose timelines are recorded is limited; failed and active rooms come first. Each snapshot of a
series has only the events and finished rooms that the earlier snapshots lack. The file appears under its name when it
is complete; on failure no file is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvctl.client import recording_file as form
from kvctl.client.atomic_file import atomic_file
from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import SILENT, Fault
from kvctl.client.fleet import FINISHED, Fleet, Source, Survey, room_rows
from kvctl.client.health_reads import BRIEF
from kvctl.client.recordings import (
    Answer,
    RecordedAgent,
    RecordedSnapshot,
    agent_names,
    encode,
    load,
    text_endpoint,
    text_fault,
    utf8,
)
from kvctl.errors import CliError
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.commands import COMMANDS, Level

MAX_SNAPSHOT_BYTES = 256 << 20
"""Maximum size of all snapshots of a series."""

_CLOCK_ROUNDS = 3
_ROWS = 1000
_EVENTS = 4096  # default size of the agents' flight recorders
_LIMITS = {"rooms": _ROWS, "history": _ROWS, "slow": _ROWS, "failed": _ROWS, "events": _EVENTS}
_ROOMS_IN_TOTAL = 4000
_ROOMS_PER_AGENT = 200
_ROOMS_AT_ONCE = 12  # two requests each; an agent's socket queues 64 requests
_NAMED = 5  # maximum agents named in one remark


@dataclass(slots=True)
class Saved:
    """Row in the output of `kvctl record`: what the file has of one agent process.

    Attributes:
        lost: number of events that its flight recorder dropped between two snapshots.
    """

    agent: str
    role: str
    incarnation: str
    events: int = 0
    lost: int = 0
    rooms: int = 0


@dataclass(slots=True)
class Saving:
    """Result of making a recording.

    Attributes:
        left_out: descriptions of data that the snapshots lack.
        interrupted: whether Ctrl-C ended it early; the file is valid.
    """

    survey: Survey
    processes: dict[tuple[Endpoint, str], Saved] = field(default_factory=dict)
    moments: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def saved(self) -> list[Saved]:
        return list(self.processes.values())

    @property
    def faults(self) -> list[Fault]:
        return self.survey.faults


@dataclass(frozen=True, slots=True)
class Series:
    """Schedule of the snapshots in a recording.

    Attributes:
        for_ns: time from the first snapshot to the last; 0 for a single snapshot.
        every_ns: time from one snapshot to the next; if the fleet takes longer to answer, the next follows at once.
        progress: called after each snapshot with the number of snapshots, the size of the file in bytes, and the
            remaining time in ns.
    """

    for_ns: int
    every_ns: int
    progress: Callable[[int, int, int], None]


Redact = Callable[[RecordedSnapshot], RecordedSnapshot]


def unchanged(snapshot: RecordedSnapshot) -> RecordedSnapshot:
    """Returns the snapshot."""
    return snapshot


def save_recording(
    source: Source, path: Path, series: Series, redact: Redact = unchanged, old: Path | None = None
) -> Saving:
    """Records a fleet into `path`, or copies the recording `old`.

    If no agent answers, no file is written and an existing file stays. Ctrl-C ends the series of snapshots.

    Args:
        redact: applied to each snapshot before it is written.

    Raises:
        CliError: the file cannot be written; no partial file is left.
    """
    saving = Saving(source.survey())
    if saving.survey.agents:
        try:
            with atomic_file(path) as file:
                writer = _Writer(file)
                try:
                    if isinstance(source, Fleet):
                        _take_series(source, saving, series, writer, redact)
                    elif old is not None:
                        for snapshot in load(old):
                            _add(writer, saving, snapshot, redact)
                except KeyboardInterrupt:
                    if not saving.moments:
                        raise
                    saving.interrupted = True
                writer.end()
        except OSError as error:
            raise CliError(f"cannot write {path}: {error.strerror or error}") from error
    return saving


def write_snapshots(file: IO[bytes], snapshots: Iterable[RecordedSnapshot]) -> None:
    """Writes snapshots into an empty file."""
    writer = _Writer(file)
    for number, snapshot in enumerate(snapshots):
        writer.add(encode(snapshot, number))
    writer.end()


class _Writer:
    """Writes and counts frames; `end` removes a frame that an interrupt has left incomplete."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frames = 0
        self.nbytes = file.write(form.file_header())
        self.add([form.encode_frame(form.HEAD, {"made_at_ns": time.time_ns(), "version": VERSION})])

    def add(self, frames: Iterable[bytes]) -> None:
        """Writes frames that are valid only together."""
        whole = list(frames)
        data = b"".join(whole)
        self._file.write(data)
        self._frames += len(whole)
        self.nbytes += len(data)

    def end(self) -> None:
        self._file.seek(self.nbytes)
        self._file.truncate()
        self._file.write(form.encode_frame(form.DONE, {"frames": self._frames}))


def _add(writer: _Writer, saving: Saving, snapshot: RecordedSnapshot, redact: Redact) -> None:
    writer.add(encode(redact(snapshot), len(saving.moments)))
    _count(saving.processes, snapshot)
    saving.moments.append(snapshot.at_ns)
    saving.left_out = list(snapshot.left_out)  # later snapshots add what the first ones lack


def _take_series(fleet: Fleet, saving: Saving, series: Series, writer: _Writer, redact: Redact) -> None:
    recorder = SnapshotRecorder(fleet)
    ends: int | None = None
    while True:
        began = time.monotonic_ns()
        _add(writer, saving, recorder.take(), redact)
        ends = ends or time.monotonic_ns() + series.for_ns  # the first snapshot, which may be slow, does not count
        left_ns = ends - time.monotonic_ns()
        series.progress(len(saving.moments), writer.nbytes, max(0, left_ns))
        if left_ns <= 0:
            return
        if writer.nbytes > MAX_SNAPSHOT_BYTES:
            saving.left_out.append(f"the last {left_ns / 1e9:.0f} s: a recording takes {MAX_SNAPSHOT_BYTES >> 20} MiB")
            return
        time.sleep(max(0, min(left_ns, began + series.every_ns - time.monotonic_ns())) / 1e9)


def _count(saved: dict[tuple[Endpoint, str], Saved], snapshot: RecordedSnapshot) -> None:
    """Adds what a snapshot has of each agent process to its row."""
    names = agent_names(snapshot)
    for agent in snapshot.agents:
        if agent.endpoint not in names:
            continue
        hello = agent.hello.data
        new = Saved(names[agent.endpoint][1], hello["role"], hello["incarnation"])
        row = saved.setdefault((agent.endpoint, new.incarnation), new)
        events = _data(agent.answers).get("events", {"events": [], "dropped": 0})
        row.events += len(events["events"])
        row.lost += events["dropped"]
        row.rooms += len(_timelines(agent.answers))


@dataclass(slots=True)
class _Process:
    """What the file already has of one agent process.

    Attributes:
        next: number of the first event that is not in the file; None if no event is.
        finished: (room, nonce) of finished rooms whose timelines are in the file.
    """

    next: int | None = None
    finished: set[tuple[str, str]] = field(default_factory=set)


class SnapshotRecorder:
    """Takes the snapshots of one fleet for one file, without repeating data of earlier snapshots."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._processes: dict[tuple[Endpoint, str], _Process] = {}

    def take(self) -> RecordedSnapshot:
        """Takes one snapshot; a command that an agent does not answer is stored as a fault."""
        survey = self._fleet.survey(clock_rounds=_CLOCK_ROUNDS)
        at_ns = time.time_ns()
        found = survey.discovery
        keys = {agent.endpoint: (agent.endpoint, agent.hello["incarnation"]) for agent in survey.agents}
        self._processes = {key: self._processes.get(key, _Process()) for key in keys.values()}
        processes = {endpoint: self._processes[key] for endpoint, key in keys.items()}
        answers = {
            endpoint: [Answer("hello", None, None, text_fault(survey.unusable[endpoint]))]
            for endpoint in found.live
            if endpoint in survey.unusable
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
        return RecordedSnapshot(
            at_ns, Path(utf8(str(found.directory))), stale, faults, agents, [utf8(text) for text in left_out]
        )

    def _add_rooms(self, answers: dict[Endpoint, list[Answer]], wanted: dict[Endpoint, list[str]]) -> list[str]:
        """Fetches the timelines and layers of the `wanted` rooms and adds them to `answers`.

        Returns:
            Descriptions of what was omitted.
        """
        left_out: list[str] = []
        most = min(_ROOMS_PER_AGENT, max(1, _ROOMS_IN_TOTAL // max(1, len(answers))))
        if too_many := sum(max(0, len(rooms) - most) for rooms in wanted.values()):
            known = sum(map(len, wanted.values()))
            left_out.append(f"timelines of {too_many} of {known} rooms; failed and active ones come first")
        waiting = {endpoint: rooms[:most] for endpoint, rooms in wanted.items() if rooms}
        failed: list[str] = []
        while waiting:
            requests = [
                (endpoint, Call("room", {"room": room}))
                for endpoint, rooms in waiting.items()
                for room in rooms[:_ROOMS_AT_ONCE]
            ]
            waiting = {each: rest for each, rooms in waiting.items() if (rest := rooms[_ROOMS_AT_ONCE:])}
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
    """Yields a call of each read-only command that has no required arguments, for the data that the file lacks.

    `health` repeats what the answers to other commands contain.
    """
    for command in COMMANDS:
        if (
            command.name != BRIEF.command
            and command.level <= Level.READ
            and not any(arg.required for arg in command.args)
        ):
            since = {"since": process.next} if command.name == "events" else {}
            yield Call(command.name, {"limit": _LIMITS.get(command.name), **since})


def _stored(reply: Reply) -> Answer:
    fault = None if reply.fault is None else text_fault(reply.fault)
    return Answer(reply.call.command, reply.call.args.get("room"), reply.data, fault)


def _data(answers: Sequence[Answer]) -> dict[str, Any]:
    return {each.command: each.data for each in answers if each.room is None and each.fault is None}


def _wanted(answers: Sequence[Answer], process: _Process) -> list[str]:
    """Returns the rooms whose timelines the file lacks: failed rooms first, then active rooms, then others."""
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
    process.finished = (process.finished | _timelines(answers)) & known


def _timelines(answers: Sequence[Answer]) -> set[tuple[str, str]]:
    """Returns number and nonce of the finished rooms whose timelines are among the answers."""
    return {
        (answer.room, detail["nonce"])
        for answer in answers
        if answer.command == "room" and answer.room is not None and answer.fault is None
        for detail in answer.data
        if detail["finished_at_ns"] is not None
    }
