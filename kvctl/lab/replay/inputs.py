"""Inputs as they are recorded, and the machine that they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvctl.lab.replay.null_telemetry import null_telemetry
from kvctl_agent.contract.choices import SLICE, STAGED
from kvctl_agent.errors import RecordingError
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import Checkpoint, State, build, take
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.decode.rooms import DecodeState
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.messages import PeerInfo
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.prefill.rooms import PrefillState
from kvctl_agent.protocol.recording import UNWRITTEN

_Row = tuple[int, str, msgspec.Raw, str]
_AnyEvent = msgspec.msgpack.Decoder[Any]


class Input(NamedTuple):
    """One input: its number in the agent's life, when it came, and which paths were chosen while it was handled."""

    number: int
    now_ns: int
    event: ev.Event
    asked: tuple[str, ...] = ()
    outcome: str = ""  # what it led to when it was recorded, see `protocol.recording`; empty: not known


class Start(NamedTuple):
    """What inputs are for: a machine in some state, and what its clock was off the wall clock."""

    checkpoint: Checkpoint
    clock_offset_ns: int = 0

    @classmethod
    def fresh(cls, local: LocalInfo, timing: Timing, clock_offset_ns: int = 0, *, early_send: bool = True) -> Start:
        """A machine as an agent begins with."""
        state: State = DecodeState(local, timing)
        if local.role == "prefill":
            state = PrefillState(local, timing, early_send=early_send)
        return cls(take(_machine(local, timing, state, clock_offset_ns, Paths()), 1 << 62), clock_offset_ns)

    def machine(self, paths: Paths) -> Machine:
        """A new machine in that state, which asks `paths` for paths."""
        local, timing, state = build(self.checkpoint)
        return _machine(local, timing, state, self.clock_offset_ns, paths)


class Paths:
    """Chooses as was chosen; where nothing was recorded, a path that every part can take."""

    def __init__(self) -> None:
        self._next: list[str] = []

    def expect(self, asked: Sequence[str]) -> None:
        """What is answered from now on, in this order."""
        self._next = list(reversed(asked))

    def choose(self, who: PeerInfo, share: TransferSlice, layers: int, pages: ev.Pages) -> str:
        if self._next:
            return self._next.pop()
        return STAGED if who.ring_bytes else SLICE

    def fallback(self, who: PeerInfo, share: TransferSlice, layers: int, pages: ev.Pages) -> str:
        return self._next.pop() if self._next else SLICE


def _machine(local: LocalInfo, timing: Timing, state: State, clock_offset_ns: int, paths: Paths) -> Machine:
    if isinstance(state, DecodeState):
        return DecodeMachine(local, timing, null_telemetry("decode", clock_offset_ns), state)
    quiet = null_telemetry("prefill", clock_offset_ns)
    return PrefillMachine(local, timing, quiet, paths.choose, paths.fallback, state=state)


def decoded(first: int, data: bytes) -> Iterator[Input]:
    """The inputs of one piece, numbered from `first`; ends before one that could not be written.

    Raises:
        RecordingError: they are not inputs.
    """
    try:
        asked, rows = _piece.decode(data)
        paths: dict[int, list[str]] = {}
        for place, path in asked:
            paths.setdefault(place, []).append(path)
        for place, (now_ns, name, raw, outcome) in enumerate(rows):
            if name == UNWRITTEN:
                return
            yield Input(first + place, now_ns, _decoder(name).decode(raw), tuple(paths.get(place, ())), outcome)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise RecordingError(f"it is damaged: not inputs: {error}") from None


_piece = msgspec.msgpack.Decoder(tuple[list[tuple[int, str]], list[_Row]])
_EVENTS: dict[str, type[ev.Event]] = {event.__name__: event for event in ev.Event.__subclasses__()}
_decoders: dict[str, _AnyEvent] = {}


def _decoder(name: str) -> _AnyEvent:
    found = _decoders.get(name)
    if found is None:
        if name not in _EVENTS:
            raise RecordingError(f"it holds events that this build does not know: {name:.40}")
        found = _decoders[name] = msgspec.msgpack.Decoder(_EVENTS[name], dec_hook=_pages)
    return found


def _pages(kind: Any, told: Any) -> Any:
    """Page arrays are the one type that MessagePack does not know."""
    if not isinstance(told, bytes) or len(told) % 4:
        raise ValueError("page numbers are not bytes of int32")
    return np.frombuffer(told, "<i4")
