"""Reads a recording: which agents are in it, and their inputs in stretches that have no gap."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvctl.lab.replay.inputs import Input, Start, decoded
from kvctl_agent.contract import recording as form
from kvctl_agent.contract.recording import InputHeader
from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.layout.plan_inputs import PLAN_VERSION
from kvctl_agent.protocol.checkpoint import pack, unpack
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.recording import encode

_HEADER: dict[str, type] = {
    "name": str,
    "role": str,
    "incarnation": str,
    "version": str,
    "protocol_version": int,
    "plan_version": int,
    "clock_offset_ns": int,
    "missed": int,
}


class Piece(NamedTuple):
    """One blob of an agent, not yet read."""

    number: int
    kind: str
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    body: bytes


class AgentRecording:
    """One agent's part of a recording."""

    def __init__(self, header: InputHeader, dropped: int) -> None:
        self.header = header
        self.dropped = dropped  # pieces that were gone when they were fetched
        self.pieces: list[Piece] = []

    @property
    def name(self) -> str:
        return self.header["name"]

    def check(self) -> None:
        """Raises RecordingVersionError where this build's machines are not those that were recorded."""
        header = self.header
        for what, theirs, ours in (
            ("control protocol", header["protocol_version"], PROTOCOL_VERSION),
            ("plan", header["plan_version"], PLAN_VERSION),
        ):
            if theirs != ours:
                raise RecordingVersionError(
                    f"{self.name} (kvctl {header['version']}) was recorded with {what} version {theirs}, "
                    f"this build has version {ours}: replay it with the build that recorded it"
                )

    def stretches(self) -> list[InputSegment]:
        """Inputs that follow each other without a gap, each stretch from its checkpoint.

        A checkpoint in the midst of a stretch is passed over: it is for when what precedes it is gone.
        """
        found: list[InputSegment] = []
        number = following = -1  # of the piece and of the input that would go on
        for piece in sorted(self.pieces):
            whole = piece.number == number and piece.first == following
            if piece.kind == "checkpoint" and not whole:
                found.append(InputSegment(self.header["clock_offset_ns"], piece))
                whole = True
            if not whole:
                number = -1  # its checkpoint is gone
                continue
            if piece.kind == "inputs":
                found[-1].pieces.append(piece)
            number, following = piece.number + 1, piece.first + piece.count
        return found


class InputSegment:
    """A checkpoint, and the inputs since."""

    def __init__(self, clock_offset_ns: int, checkpoint: Piece) -> None:
        self._clock_offset_ns = clock_offset_ns
        self._checkpoint = checkpoint
        self.pieces: list[Piece] = []

    @property
    def first(self) -> int:
        """Number of its first input."""
        return self._checkpoint.first

    @property
    def start(self) -> Start:
        """Where it begins."""
        return Start(unpack(form.decompress(self._checkpoint.body)), self._clock_offset_ns)

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.pieces)

    def inputs(self) -> Iterator[Input]:
        """All inputs up to the first that could not be written."""
        for piece in self.pieces:
            last = piece.first - 1
            for item in decoded(piece.first, form.decompress(piece.body)):
                yield item
                last = item.number
            if last != piece.first + piece.count - 1:
                return


def load(path: Path) -> list[AgentRecording]:
    """All agents of a recording, by name and time.

    Raises:
        RecordingError: it cannot be read.
        RecordingVersionError: it is of another version.
    """
    agents: dict[int, AgentRecording] = {}
    try:
        with path.open("rb") as file:
            for kind, about, body in form.read_frames(file):
                if kind == form.AGENT:
                    agents[about.get("agent", -1)] = AgentRecording(_header(about), int(about.get("dropped", 0)))
                elif kind == form.BLOB and about.get("agent") in agents:
                    piece = Piece(
                        int(about["number"]), str(about["kind"]), int(about["first"]), int(about["count"]), body
                    )
                    agents[about["agent"]].pieces.append(piece)
    except OSError as error:
        raise RecordingError(error.strerror or str(error)) from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"it is damaged: a frame lacks {error}") from None
    return sorted(agents.values(), key=lambda agent: (agent.name, agent.header["incarnation"]))


def save(path: Path, header: InputHeader, start: Start, inputs: Sequence[Input]) -> None:
    """Write a recording of one agent, which begins at `start`.

    Raises:
        OSError: it cannot be written.
    """
    first = inputs[0].number if inputs else 0
    rows = [(item.now_ns, type(item.event).__name__, item.event, item.outcome) for item in inputs]
    asked = [(place, path) for place, item in enumerate(inputs) for path in item.asked]
    blobs = [
        ({"agent": 0, "number": 0, "kind": "checkpoint", "first": first, "count": 0}, pack(start.checkpoint)),
        ({"agent": 0, "number": 1, "kind": "inputs", "first": first, "count": len(rows)}, encode((asked, rows))),
    ]
    with path.open("wb") as file:
        file.write(form.file_header())
        file.write(form.encode_frame(form.AGENT, {"agent": 0, "header": header, "dropped": 0}))
        for about, data in blobs:
            file.write(form.encode_frame(form.BLOB, about, zlib.compress(data)))
        file.write(form.encode_frame(form.DONE, {"frames": 1 + len(blobs)}))


def _header(about: dict[str, Any]) -> InputHeader:
    header: Any = about.get("header")
    for name, kind in _HEADER.items():
        if not isinstance(header, dict) or type(header.get(name)) is not kind:
            raise RecordingError(f"it is damaged: an agent does not say its {name}")
    found: InputHeader = header
    return found
