"""A control channel that loses, delays, doubles, reorders, cuts off and garbles frames, on the way out and in; or loses
messages of one type.

It stands inside the loop's own thread: frames that are held back leave and arrive when the loop looks next after their
time, which `due_ns` tells it. A frame between two agents that both have a fault meets it twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from itertools import count
from random import Random
from typing import Any, NamedTuple

import msgspec

from kvctl.lab.faults.injector import FaultInjector
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.events import Received, Unsendable
from kvctl_agent.runtime.control_channel import ControlChannel, PeerAddress

# Longer than a turn of the loop and than a quick answer, so that something passes; far below any deadline.
_HELD_BACK_NS = 30_000_000
_MOST_GARBAGE_BYTES = 512


class _Held(NamedTuple):
    due_ns: int
    number: int  # of equal moments the first comes first
    address: PeerAddress
    frame: bytes
    messages: int


class FaultyControlChannel(ControlChannel):
    """Links under `faults`; all else is what `ControlChannel` is given."""

    def __init__(self, faults: FaultInjector, *links: Any) -> None:
        super().__init__(*links)
        self._faults = faults
        self._now_ns = self._telemetry.clock.now_ns
        self._numbers = count()
        self._leaving: list[_Held] = []
        self._arriving: list[_Held] = []

    def flush(self, *, everything: bool = False) -> list[Unsendable]:
        dropped = super().flush(everything=everything)
        while self._leaving and (everything or self._leaving[0].due_ns <= self._now_ns()):
            held = heapq.heappop(self._leaving)
            super()._put(held.address, held.frame, held.messages)
        self._update_due()
        return dropped

    def receive(self, ready: Container[object]) -> list[Received]:
        received: list[Received] = []
        while self._arriving and self._arriving[0].due_ns <= self._now_ns():
            held = heapq.heappop(self._arriving)
            received += super()._read(held.address, [held.frame])
        received += super().receive(ready)
        self._update_due()
        return received

    def _update_due(self) -> None:
        due = [heap[0].due_ns for heap in (self._leaving, self._arriving) if heap]
        if self._patient:
            due.append(self._patient_due_ns)
        self.due_ns = min(due, default=None)

    def _put(self, address: PeerAddress, frame: bytes, messages: int) -> None:
        for sent, wait_ns in self._fate(frame):
            if wait_ns:
                self._hold(self._leaving, wait_ns, address, sent, messages)
            else:
                super()._put(address, sent, messages)

    def _read(self, source: PeerAddress, frames: list[bytes]) -> list[Received]:
        if len(frames) != 1:
            return super()._read(source, frames)
        received: list[Received] = []
        for heard, wait_ns in self._fate(frames[0]):
            if wait_ns:
                self._hold(self._arriving, wait_ns, source, heard, 0)
            else:
                received += super()._read(source, [heard])
        return received

    def _hold(self, heap: list[_Held], wait_ns: int, address: PeerAddress, frame: bytes, messages: int) -> None:
        heapq.heappush(heap, _Held(self._now_ns() + wait_ns, next(self._numbers), address, frame, messages))

    def _fate(self, frame: bytes) -> list[tuple[bytes, int]]:
        """What becomes of a frame: what gets through, each after so many nanoseconds."""
        faults = self._faults
        if faults.should_fire("control-loss"):
            return []
        if lost := faults.messages("message-loss"):
            frame, count = _without(frame, lost)
            for _ in range(count):
                faults.count("message-loss")
        if dice := faults.should_fire("control-truncate"):
            frame = frame[: dice.randrange(len(frame) or 1)]
        if dice := faults.should_fire("control-garbage"):
            frame = _garbage(dice, frame)
        wait_ns = faults.ns("control-delay")
        if wait_ns:
            faults.count("control-delay")
        first_ns = wait_ns
        if dice := faults.should_fire("control-reorder"):
            first_ns += dice.randint(1, _HELD_BACK_NS)
        through = [(frame, first_ns)]
        if dice := faults.should_fire("control-dup"):
            through.append((frame, wait_ns + dice.randrange(_HELD_BACK_NS)))
        return through


def _without(frame: bytes, types: Sequence[str]) -> tuple[bytes, int]:
    """The frame without messages of these types, and how many it has lost."""
    try:
        incarnation, messages, _ = codec.decode(frame)
    except RemoteProtocolError:
        return frame, 0
    kept: list[msg.Message] = [message for message in messages if message.__struct_config__.tag not in types]
    lost = len(messages) - len(kept)
    if "watermark" in types:
        for at, message in enumerate(kept):
            if isinstance(message, msg.Heartbeat | msg.StagingGrants) and message.watermark:
                kept[at] = msgspec.structs.replace(message, watermark=[])
                lost += 1
    return (codec.encode(incarnation, kept), lost) if lost else (frame, 0)


def _garbage(dice: Random, frame: bytes) -> bytes:
    """Random bytes, half of the time behind a true header: what no check of the header refuses.

    Nothing of a true message stays: a wrong page number in a well-formed one is not what a broken line does.
    """
    header = frame[: codec.HEADER_BYTES] if dice.random() < 0.5 else b""
    return header + dice.randbytes(dice.randrange(_MOST_GARBAGE_BYTES))
