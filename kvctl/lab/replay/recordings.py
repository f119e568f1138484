"""Reads the state-machine inputs in a recording, by agent and in segments of inputs without a gap."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import IO, Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

from kvctl_agent.contract import recording as form
from kvctl_agent.contract.recording import InputHeader
from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.layout.plan_inputs import PLAN_VERSION
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import Checkpoint, unpack
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.recording import UNWRITTEN

_EVENTS: dict[str, type[ev.Event]] = {event.__name__: event for event in ev.Event.__subclasses__()}
_rows = msgspec.msgpack.Decoder(tuple[list[tuple[int, str]], list[tuple[int, str, msgspec.Raw, str]]])


class Input(NamedTuple):
    """One recorded input of a state machine.

    Attributes:
        number: position of the input among all inputs of the agent's incarnation.
        now_ns: monotonic time at which the machine handled it.
        paths: paths that the path chooser returned while the input was handled.
        outcome: the resulting actions when it was recorded, as `protocol.recording.outcome` encodes them; "" if
            unknown.
    """

    number: int
    now_ns: int
    event: ev.Event
    paths: tuple[str, ...] = ()
    outcome: str = ""


class Start(NamedTuple):
    """State of a machine before the first input of a segment.

    Attributes:
        checkpoint: the recorded state.
        clock_offset_ns: wall clock minus the machine's monotonic clock.
    """

    checkpoint: Checkpoint
    clock_offset_ns: int = 0


class Piece(NamedTuple):
    """One compressed blob of an agent's recording: a checkpoint or a sequence of inputs.

    Attributes:
        number: position among the agent's blobs.
        kind: "checkpoint" or "inputs".
        first: number of the first input; of a checkpoint, number of the input after it.
        count: number of inputs; 0 for a checkpoint.
        body: the compressed bytes.
    """

    number: int
    kind: str
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    body: bytes


class InputSegment:
    """A checkpoint, and the inputs that follow it without a gap."""

    def __init__(self, header: InputHeader, checkpoint: Piece) -> None:
        self._header = header
        self._checkpoint = checkpoint
        self.pieces: list[Piece] = []

    @property
    def first(self) -> int:
        """Number of the first input in the segment."""
        return self._checkpoint.first

    @property
    def start(self) -> Start:
        """State of the machine before the first input, decoded from the checkpoint.

        Raises:
            RecordingError: the checkpoint is damaged.
            RecordingVersionError: the checkpoint was recorded by another build.
        """
        try:
            checkpoint = unpack(form.decompress(self._checkpoint.body))
        except RecordingVersionError as error:
            raise _other_build(self._header, str(error)) from None
        return Start(checkpoint, self._header["clock_offset_ns"])

    @property
    def count(self) -> int:
        """Number of inputs in the segment."""
        return sum(piece.count for piece in self.pieces)

    def inputs(self) -> Iterator[Input]:
        """Decodes the inputs of the segment, up to the first input that the agent could not encode.

        Raises:
            RecordingError: an input is damaged or unknown to this build.
        """
        for piece in self.pieces:
            last = piece.first - 1
            for item in decode_inputs(piece.first, form.decompress(piece.body)):
                yield item
                last = item.number
            if last != piece.first + piece.count - 1:
                return


class AgentRecording:
    """The inputs of one agent in a recording.

    Attributes:
        header: name, role, versions and clock offset of the agent.
        dropped: number of pieces that the agent had discarded before they were fetched.
        pieces: the checkpoints and inputs.
    """

    def __init__(self, header: InputHeader, dropped: int) -> None:
        self.header = header
        self.dropped = dropped
        self.pieces: list[Piece] = []

    @property
    def name(self) -> str:
        return self.header["name"]

    def check_versions(self) -> None:
        """Raises RecordingVersionError if the state machines of this build differ from the recorded ones."""
        header = self.header
        for name, recorded, current in (
            ("control protocol", header["protocol_version"], PROTOCOL_VERSION),
            ("plan", header["plan_version"], PLAN_VERSION),
        ):
            if recorded != current:
                raise _other_build(header, f"its {name} has version {recorded}, not {current}")

    def segments(self) -> list[InputSegment]:
        """Returns the segments in order; a checkpoint within inputs that have no gap does not begin a new segment."""
        found: list[InputSegment] = []
        next_number = next_input = -1
        for piece in sorted(self.pieces):
            continues = piece.number == next_number and piece.first == next_input
            if piece.kind == "checkpoint" and not continues:
                found.append(InputSegment(self.header, piece))
                continues = True
            if not continues:
                next_number = -1  # the checkpoint before these inputs is missing
                continue
            if piece.kind == "inputs":
                found[-1].pieces.append(piece)
            next_number, next_input = piece.number + 1, piece.first + piece.count
        return found


def load(file: IO[bytes]) -> list[AgentRecording]:
    """Reads all agents of a recording, sorted by name and incarnation.

    Raises:
        RecordingError: the file is damaged.
        RecordingVersionError: the file has another format version.
    """
    agents: dict[int, AgentRecording] = {}
    try:
        for kind, about, body in form.read_frames(file):
            if kind == form.AGENT:
                agents[about.get("agent", -1)] = AgentRecording(_header(about), int(about.get("dropped", 0)))
            elif kind == form.BLOB and about.get("agent") in agents:
                piece = Piece(int(about["number"]), str(about["kind"]), int(about["first"]), int(about["count"]), body)
                agents[about["agent"]].pieces.append(piece)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"it is damaged: a frame lacks {error}") from None
    return sorted(agents.values(), key=lambda agent: (agent.name, agent.header["incarnation"]))


def decode_inputs(first: int, data: bytes) -> Iterator[Input]:
    """Decodes the inputs of one piece, numbered from `first`; ends before an input that the agent could not encode.

    Raises:
        RecordingError: an input is damaged or unknown to this build.
    """
    try:
        chosen, rows = _rows.decode(data)
        paths: dict[int, list[str]] = {}
        for place, path in chosen:
            paths.setdefault(place, []).append(path)
        for place, (now_ns, name, raw, outcome) in enumerate(rows):
            if name == UNWRITTEN:
                return
            yield Input(first + place, now_ns, _decoder(name).decode(raw), tuple(paths.get(place, ())), outcome)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"it is damaged: not inputs: {error}") from None


def _other_build(header: InputHeader, difference: str) -> RecordingVersionError:
    text = f"{header['name']} was recorded by another build, kvctl {header['version']}: {difference}"
    return RecordingVersionError(f"{text}: replay it with the build that recorded it")


@cache
def _decoder(name: str) -> msgspec.msgpack.Decoder[Any]:
    if name not in _EVENTS:
        raise RecordingError(f"it holds events that this build does not know: {name:.40}")
    return msgspec.msgpack.Decoder(_EVENTS[name], dec_hook=_page_array)


def _page_array(kind: Any, encoded: Any) -> Any:
    """Decodes a page array, the only type in events that MessagePack lacks, from bytes of int32.

    Raises:
        ValueError: `encoded` is not such bytes.
    """
    if not isinstance(encoded, bytes) or len(encoded) % 4:
        raise ValueError("page numbers are not bytes of int32")
    return np.frombuffer(encoded, "<i4")


def _header(about: dict[str, Any]) -> InputHeader:
    header: Any = about.get("header")
    for name, kind in get_type_hints(InputHeader).items():
        if not isinstance(header, dict) or type(header.get(name)) is not kind:
            raise RecordingError(f"it is damaged: the header of an agent lacks {name}")
    found: InputHeader = header
    return found
