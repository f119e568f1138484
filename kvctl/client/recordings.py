"""Saves a fleet into one file: moments to look at, and what agents recorded of their machines' inputs, page by page.

The file appears under its name only when it is complete; whatever goes wrong leaves nothing behind.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import Fleet, Survey
from kvctl.client.recording_reader import Moment, encode
from kvctl.client.snapshot_recorder import SnapshotRecorder
from kvctl.errors import CliError
from kvctl_agent.contract import VERSION
from kvctl_agent.contract import recording as form

_COMMAND = "inputs"
MOST_MOMENTS_BYTES = 256 << 20


@dataclass(slots=True)
class Saved:
    """What was saved of one agent, as `kvctl record` shows it."""

    agent: str
    role: str
    incarnation: str
    inputs: int = 0
    missed: int = 0
    dropped: int = 0  # pieces that had gone before they could be fetched
    nbytes: int = 0  # of its inputs in the file
    fault: str = ""  # why nothing is recorded any more
    refused: bool = False  # it did not tell its inputs, or not all


@dataclass(slots=True)
class Saving:
    """Outcome of saving a recording.

    Attributes:
        saved: a row for each agent that is in it.
        left_out: what the moments lack, in words.
        interrupted: Ctrl-C ended it early; what it has is whole.
    """

    survey: Survey
    saved: list[Saved] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def faults(self) -> list[Fault]:
        return self.survey.faults


@dataclass(frozen=True, slots=True)
class Series:
    """How long to go on taking moments.

    Attributes:
        for_ns: from the first to the last one; 0 takes one.
        every_ns: from one to the next; a fleet that takes longer to answer is asked again at once.
        told: called after each with the number of moments, the bytes of the file and the ns that are left.
    """

    for_ns: int
    every_ns: int
    told: Callable[[int, int, int], None]


def save_recording(fleet: Fleet, path: Path, series: Series) -> Saving:
    """Writes moments of the fleet and the inputs of every agent that can be reached to `path`.

    An agent that fails midway is left with what it had told, which replays up to there. Where nobody answers there is
    no file, and an old one stays. Ctrl-C ends the series, a second one the fetching of inputs, too.

    Raises:
        CliError: the file cannot be written; nothing is left of it.
    """
    saving = Saving(fleet.survey())
    if saving.survey.agents:
        try:
            with whole_file(path) as file:
                write_recording(file, fleet, saving, series)
        except OSError as error:
            raise CliError(f"cannot write {path}: {error.strerror or error}") from error
    return saving


def write_recording(file: IO[bytes], fleet: Fleet, saving: Saving, series: Series) -> None:
    """A whole recording of the agents that `saving` names, into an empty file."""
    saving.saved = [
        Saved(agent.name, agent.hello["role"], agent.hello["incarnation"]) for agent in saving.survey.agents
    ]
    writer = _Writer(file)
    try:
        _take_series(fleet, saving, series, writer)
    except KeyboardInterrupt:
        saving.interrupted = True
    writer.forget_half()
    try:
        _fetch_inputs(fleet, saving, writer)
    except KeyboardInterrupt:
        if not saving.moments:
            raise
        saving.interrupted = True
    writer.end()


def write_moments(file: IO[bytes], moments: Iterable[Moment]) -> bool:
    """A recording of moments only, into an empty file; False where Ctrl-C has cut it short, which leaves it whole."""
    writer = _Writer(file)
    try:
        for number, moment in enumerate(moments):
            writer.add(encode(moment, number))
    except KeyboardInterrupt:
        return False
    finally:
        writer.end()
    return True


class _Writer:
    """Writes frames, counts them, and takes back what an interrupt has left half written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frames = 0
        self.nbytes = file.write(form.file_header())
        self.add([form.encode_frame(form.HEAD, {"made_at_ns": time.time_ns(), "version": VERSION})])

    def add(self, frames: Iterable[bytes]) -> int:
        """Adds frames of which each needs the others; returns their bytes."""
        whole = list(frames)
        data = b"".join(whole)
        self._file.write(data)
        self._frames += len(whole)
        self.nbytes += len(data)
        return len(data)

    def forget_half(self) -> None:
        """Cuts off what `add` has not finished."""
        self._file.seek(self.nbytes)
        self._file.truncate()

    def end(self) -> None:
        self.forget_half()
        self._file.write(form.encode_frame(form.DONE, {"frames": self._frames}))


def _take_series(fleet: Fleet, saving: Saving, series: Series, writer: _Writer) -> None:
    taker = SnapshotRecorder(fleet)
    ends: int | None = None
    while True:
        began = time.monotonic_ns()
        moment = taker.take()
        writer.add(encode(moment, len(saving.moments)))
        saving.moments.append(moment.at_ns)
        saving.left_out = list(moment.left_out)  # a series makes up for what its first moments lack
        ends = ends or time.monotonic_ns() + series.for_ns  # a slow first moment is none of the series' time
        left_ns = ends - time.monotonic_ns()
        series.told(len(saving.moments), writer.nbytes, max(0, left_ns))
        if left_ns <= 0:
            return
        if writer.nbytes > MOST_MOMENTS_BYTES:
            saving.left_out.append(f"the last {left_ns / 1e9:.0f} s: a recording takes {MOST_MOMENTS_BYTES >> 20} MiB")
            return
        time.sleep(max(0, min(left_ns, began + series.every_ns - time.monotonic_ns())) / 1e9)


@dataclass(slots=True)
class _Progress:
    """How far one agent's pages have come."""

    endpoint: Endpoint
    number: int
    saved: Saved
    since: int | None = None
    until: int | None = None


def _fetch_inputs(fleet: Fleet, saving: Saving, writer: _Writer) -> None:
    agents = zip(saving.survey.agents, saving.saved, strict=True)
    waiting = [_Progress(agent.endpoint, number, saved) for number, (agent, saved) in enumerate(agents)]
    while waiting:
        requests = [(each.endpoint, Call(_COMMAND, {"since": each.since, "until": each.until})) for each in waiting]
        unfinished: list[_Progress] = []
        for each, reply in zip(waiting, fleet.ask(requests), strict=True):
            fault = reply.fault or _take_page(each, reply, writer)
            if fault is not None:
                each.saved.refused = True
                saving.faults.append(fault)
            elif each.since != each.until:
                unfinished.append(each)
        waiting = unfinished


def _take_page(each: _Progress, reply: Reply, writer: _Writer) -> Fault | None:
    """One page into the file."""
    try:
        page, header, saved = reply.data, reply.data["header"], each.saved
        if each.since is None:
            about = {"agent": each.number, "header": header, "dropped": page["dropped"]}
            writer.add([form.encode_frame(form.AGENT, about)])
        saved.missed, saved.fault = header["missed"], header["fault"]
        saved.dropped += page["dropped"]
        for blob in page["blobs"]:
            data = base64.b64decode(blob["data"], validate=True)
            about = {"agent": each.number, **{name: blob[name] for name in ("number", "kind", "first", "count")}}
            saved.nbytes += writer.add([form.encode_frame(form.BLOB, about, data)])
            saved.inputs += blob["count"]
        if not isinstance(page["next"], int) or (each.since is not None and page["next"] <= each.since):
            raise ValueError("its pages do not come to an end")
        each.since, each.until = page["next"], page["end"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        text = f"answered {_COMMAND} with what this kvctl does not understand: {error}"
        return Fault(each.endpoint.name, FaultCode.PROTOCOL, text)
    return None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file of ours alone that takes its name when all is written and on the disk, or goes.

    Raises:
        OSError: it cannot be written, or its name is taken by what is no file.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "something of that name is there, and it is no plain file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
