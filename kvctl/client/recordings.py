"""Saves what agents recorded of their machines' inputs: all agents into one file, page by page.

The file appears under its name only when it is complete; whatever goes wrong leaves nothing behind.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import Fleet, Survey
from kvctl.errors import CliError
from kvctl_agent.contract import recording as form
from kvctl_agent.contract.version import VERSION

_COMMAND = "inputs"


@dataclass(slots=True)
class Saved:
    """What was saved of one agent, as `kvctl record` shows it."""

    agent: str
    role: str
    incarnation: str
    inputs: int = 0
    missed: int = 0
    dropped: int = 0  # pieces that had gone before they could be fetched
    nbytes: int = 0  # in the file
    fault: str = ""  # why nothing is recorded any more


@dataclass(slots=True)
class Saving:
    """Outcome of saving a recording: a row for each agent that is in it, and whom the fleet had besides."""

    survey: Survey
    saved: list[Saved] = field(default_factory=list)

    @property
    def faults(self) -> list[Fault]:
        return self.survey.faults


def save_recording(fleet: Fleet, path: Path) -> Saving:
    """Fetches the inputs of every agent that can be reached and writes them to `path`.

    An agent that fails midway is left with what it had told, which replays up to there. Where nobody tells anything
    there is no file, and an old one stays.

    Raises:
        CliError: the file cannot be written; nothing is left of it.
    """
    survey = fleet.survey()
    saving = Saving(survey)
    if survey.agents:
        try:
            with contextlib.suppress(_NothingTold), _whole_file(path) as file:
                _save(fleet, saving, _Writer(file))
        except OSError as error:
            raise CliError(f"cannot write {path}: {error.strerror or error}") from error
    return saving


class _NothingTold(Exception):
    """No agent had anything for the file."""


class _Writer:
    """Writes frames and counts them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frames = 0
        file.write(form.opening())
        self.add(form.HEAD, {"made_at_ns": time.time_ns(), "version": VERSION})

    def add(self, kind: bytes, about: dict[str, Any], body: bytes = b"") -> int:
        """Returns the frame's bytes."""
        self._frames += 1
        return self._file.write(form.frame(kind, about, body))

    def end(self) -> None:
        self._file.write(form.frame(form.DONE, {"frames": self._frames}))


@dataclass(slots=True)
class _Progress:
    """How far one agent's pages have come."""

    endpoint: Endpoint
    number: int
    saved: Saved | None = None
    since: int | None = None
    until: int | None = None


def _save(fleet: Fleet, saving: Saving, writer: _Writer) -> None:
    waiting = [_Progress(agent.endpoint, number) for number, agent in enumerate(saving.survey.agents)]
    while waiting:
        requests = [(each.endpoint, Call(_COMMAND, {"since": each.since, "until": each.until})) for each in waiting]
        unfinished: list[_Progress] = []
        for each, reply in zip(waiting, fleet.ask(requests), strict=True):
            fault = reply.fault or _take(each, reply, saving, writer)
            if fault is not None:
                saving.faults.append(fault)
            elif each.since != each.until:
                unfinished.append(each)
        waiting = unfinished
    if not saving.saved:
        raise _NothingTold
    writer.end()


def _take(each: _Progress, reply: Reply, saving: Saving, writer: _Writer) -> Fault | None:
    """One page into the file."""
    try:
        page, header = reply.data, reply.data["header"]
        if each.saved is None:
            each.saved = Saved(header["name"], header["role"], header["incarnation"])
            saving.saved.append(each.saved)
            writer.add(form.AGENT, {"agent": each.number, "header": header, "dropped": page["dropped"]})
        saved = each.saved
        saved.missed, saved.fault = header["missed"], header["fault"]
        saved.dropped += page["dropped"]
        for blob in page["blobs"]:
            data = base64.b64decode(blob["data"], validate=True)
            about = {name: blob[name] for name in ("number", "kind", "first", "count")}
            saved.nbytes += writer.add(form.BLOB, {"agent": each.number, **about}, data)
            saved.inputs += blob["count"]
        if not isinstance(page["next"], int) or (each.since is not None and page["next"] <= each.since):
            raise ValueError("its pages do not come to an end")
        each.since, each.until = page["next"], page["end"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        text = f"answered {_COMMAND} with what this kvctl does not understand: {error}"
        return Fault(each.endpoint.name, FaultCode.PROTOCOL, text)
    return None


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when all is written and on the disk, or goes."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
