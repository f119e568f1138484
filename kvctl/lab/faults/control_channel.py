"""Control channel that loses, delays, duplicates, reorders, truncates and garbles frames, or loses some message types.

Faults apply to outgoing and incoming frames on the control loop's thread, so a frame between two faulty agents is
affected twice. `due_ns` includes the times of delayed frames, so that the loop wakes up to send or deliver them.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Sequence
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

# Longer than an iteration of the loop and a quick answer, so that later frames can overtake; far below any deadline.
_MAX_DELAY_NS = 30_000_000
_MAX_GARBAGE_BYTES = 512


class _DelayedFrame(NamedTuple):
    due_ns: int
    number: int  # keeps the order of frames due at the same time
    address: PeerAddress
    frame: bytes
    messages: int


class FaultyControlChannel(ControlChannel):
    """A `ControlChannel` with fault injection."""

    def __init__(self, faults: FaultInjector, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._faults = faults
        self._now_ns = self._telemetry.clock.now_ns
        self._numbers = count()
        self._leaving: list[_DelayedFrame] = []
        self._arriving: list[_DelayedFrame] = []

    def flush(self, *, everything: bool = False) -> list[Unsendable]:
        dropped = super().flush(everything=everything)
        while self._leaving and (everything or self._leaving[0].due_ns <= self._now_ns()):
            held = heapq.heappop(self._leaving)
            super()._put(held.address, held.frame, held.messages)
        return dropped

    def receive(self, ready: Container[object]) -> Iterator[Received]:
        while self._arriving and self._arriving[0].due_ns <= self._now_ns():
            held = heapq.heappop(self._arriving)
            yield from super()._read(held.address, [held.frame])
        yield from super().receive(ready)

    @property
    def due_ns(self) -> int | None:
        due = [heap[0].due_ns for heap in (self._leaving, self._arriving) if heap]
        if self._patient_due_ns is not None:
            due.append(self._patient_due_ns)
        return min(due, default=None)

    def _put(self, address: PeerAddress, frame: bytes, messages: int) -> None:
        for sent, wait_ns in self._apply_faults(frame):
            if wait_ns:
                self._hold(self._leaving, wait_ns, address, sent, messages)
            else:
                super()._put(address, sent, messages)

    def _read(self, source: PeerAddress, frames: list[bytes]) -> list[Received]:
        if len(frames) != 1:
            return super()._read(source, frames)
        received: list[Received] = []
        for frame, wait_ns in self._apply_faults(frames[0]):
            if wait_ns:
                self._hold(self._arriving, wait_ns, source, frame, 0)
            else:
                received += super()._read(source, [frame])
        return received

    def _hold(self, heap: list[_DelayedFrame], wait_ns: int, address: PeerAddress, frame: bytes, messages: int) -> None:
        heapq.heappush(heap, _DelayedFrame(self._now_ns() + wait_ns, next(self._numbers), address, frame, messages))

    def _apply_faults(self, frame: bytes) -> list[tuple[bytes, int]]:
        """Applies the faults in force to a frame; returns (frame, delay in ns) of each frame to deliver instead."""
        faults = self._faults
        if faults.should_fire("control-loss"):
            return []
        if lost := faults.messages("message-loss"):
            frame, count = _without(frame, lost)
            for _ in range(count):
                faults.count("message-loss")
        if random := faults.should_fire("control-truncate"):
            frame = frame[: random.randrange(len(frame) or 1)]
        if random := faults.should_fire("control-garbage"):
            frame = _garbage(random, frame)
        wait_ns = faults.ns("control-delay")
        if wait_ns:
            faults.count("control-delay")
        first_ns = wait_ns
        if random := faults.should_fire("control-reorder"):
            first_ns += random.randint(1, _MAX_DELAY_NS)
        delivered = [(frame, first_ns)]
        if random := faults.should_fire("control-dup"):
            delivered.append((frame, wait_ns + random.randrange(_MAX_DELAY_NS)))
        return delivered


def _without(frame: bytes, types: Sequence[str]) -> tuple[bytes, int]:
    """Returns a frame without messages of these types, and the number of removed messages.

    The type "watermark" also removes the watermarks inside heartbeats and staging grants.
    """
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


def _garbage(random: Random, frame: bytes) -> bytes:
    """Returns a frame of random bytes; in half of the cases with the original header, which passes the header check.

    No other bytes of the frame are kept: a broken connection does not produce a well-formed message with, for example,
    a wrong page number.
    """
    header = frame[: codec.HEADER_BYTES] if random.random() < 0.5 else b""
    return header + random.randbytes(random.randrange(_MAX_GARBAGE_BYTES))
