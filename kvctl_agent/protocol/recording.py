"""Records the latest inputs of a protocol machine, so that `kvctl replay` can run them again.

A machine does no I/O, so its state at one time and all later (time, event) inputs determine its behaviour. Inputs are
kept as objects until several dozen can be encoded at a time; keeping the objects alive would cost the garbage collector
more than the encoding. The log begins with a checkpoint of the machine, and takes another one when it is a quarter full
and no room is open, or half full. Then what precedes a checkpoint can be dropped, and the rest can still be replayed.

A checkpoint copies the state of the rooms in flight. If copying takes longer than `BUDGET_NS`, it is tried again with
fewer open rooms, or much later. When the log is full before a second checkpoint is made, inputs are missed until then,
and the recording has a gap, which it reports.
"""

from __future__ import annotations

import base64
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvctl_agent.contract.recording import InputBlob
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.page_indices import packed
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import Copy, TooSlow
from kvctl_agent.protocol.machine import Machine

BATCH = 64  # inputs encoded at once, with the GIL; until then the engine's garbage collection traverses them
BUDGET_NS = 2_000_000
MAX_BYTES = 32 << 20  # of encoded inputs
AGAIN_AFTER = 4096  # inputs until the next attempt, if a checkpoint took too long, unless fewer rooms are open
PAGE_BYTES = 4 << 20

REFUSED = "!"  # outcome: LocalProtocolError, a call of the engine out of order
RAISED = "X"  # outcome: any other exception, a bug of the machine
UNWRITTEN = ""  # name of an event that could not be encoded
_LETTERS = {action: chr(ord("a") + number) for number, action in enumerate(ev.Action.__subclasses__())}

_F = TypeVar("_F", bound=Callable[..., str])
_M = TypeVar("_M", bound=Machine)
_NAMES: dict[type, str] = {event: event.__name__ for event in ev.Event.__subclasses__()}

encode = msgspec.msgpack.Encoder(enc_hook=packed).encode


@lru_cache(maxsize=1024)  # few sequences of actions make up nearly all outcomes
def _letters(kinds: tuple[type, ...]) -> str:
    return "".join(map(_LETTERS.__getitem__, kinds))


def outcome(actions: Sequence[ev.Action] | str) -> str:
    """Returns the outcome of an input: one letter per action, or `REFUSED` or `RAISED` unchanged.

    A replay compares outcomes to detect that it diverges.
    """
    return actions if isinstance(actions, str) else _letters(tuple(map(type, actions)))


@dataclass(slots=True, eq=False)
class _Batch:
    """Inputs that are not encoded yet, with their outcomes and the path chooser's answers while they were handled."""

    number: int
    first: int
    inputs: list[tuple[int, ev.Event]] = field(default_factory=list)
    outcomes: list[Sequence[ev.Action] | str] = field(default_factory=list)
    paths: list[tuple[int, str]] = field(default_factory=list)  # (index of the input, path)

    def encoded(self) -> tuple[int, bytes]:
        """Returns the number of inputs and their encoding; may run on any thread, so it copies the lists first."""
        paths, outcomes, inputs = self.paths[:], self.outcomes[:], self.inputs[:]
        outcomes += [""] * (len(inputs) - len(outcomes))  # the input being handled has no outcome yet
        rows = [
            (now_ns, _NAMES[type(event)], event, outcome(actions))
            for (now_ns, event), actions in zip(inputs, outcomes, strict=False)
        ]
        try:
            return len(rows), encode((paths, rows))
        except (TypeError, ValueError, OverflowError):
            return len(rows), encode((paths, list(map(_encodable, rows))))


def _encodable(row: tuple[int, str, ev.Event, str]) -> tuple[int, str, ev.Event | None, str]:
    """Returns the row, without its event if that cannot be encoded: the engine may pass any value."""
    try:
        encode(row)
    except (TypeError, ValueError, OverflowError):
        return row[0], UNWRITTEN, None, row[3]
    return row


class Blob(NamedTuple):
    """One piece of a recording, as in `InputBlob`: encoded inputs, or a checkpoint that is packed on request."""

    number: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    data: bytes | Copy

    def packed(self) -> InputBlob:
        data, kind = self.data, "inputs"
        if not isinstance(data, bytes):
            data, kind = data.pack(), "checkpoint"
        encoded = base64.b64encode(zlib.compress(data, 1)).decode()
        return {"number": self.number, "kind": kind, "first": self.first, "count": self.count, "data": encoded}


class Pieces(NamedTuple):
    """Consecutive pieces of a recording, as in `InputPage`."""

    blobs: list[InputBlob]
    next: int
    end: int
    dropped: int


class InputLog:
    """Recorder of the latest inputs of one machine, used on the machine's thread; any thread may call `pieces`.

    Args:
        capacity: number of inputs kept; 0: none.

    Attributes:
        taken: number of inputs of the machine so far.
        missed: number of inputs that were not recorded.
        fault: why recording has stopped; "" while it runs.
    """

    def __init__(self, capacity: int) -> None:
        self.taken = 0
        self.missed = 0
        self.fault = ""
        self._capacity = capacity
        self._machine: Machine | None = None
        self._batch_size = min(BATCH, -(-capacity // 2))
        self._batch = _Batch(0, 0)
        self._blobs: deque[Blob] = deque()
        self._kept = self._nbytes = 0  # inputs in the blobs, and the size of their encoding
        self._checkpoint_at = 0  # number of the input after the latest checkpoint
        self._bytes_since = 0  # size of the encoded inputs after it
        self._due = False  # a checkpoint should be made as soon as no room is open
        self._full = True  # no input is recorded before the next checkpoint
        self._max_rooms = 1 << 62  # open rooms up to which a checkpoint is tried
        self._retry_at = 0  # number of the input from which one is tried with any number of rooms

    def begin(self, machine: _M) -> _M:
        """Starts recording the inputs of a new machine, beginning with a checkpoint; returns the machine."""
        if self._capacity:
            self._machine = machine
            self._checkpoint(machine)
        return machine

    def recording_paths(self, choose: _F) -> _F:
        """Wraps a path chooser to record its answers, which depend on measurements and not on the inputs alone."""

        def choose_and_record(*args: Any) -> str:
            path = choose(*args)
            batch = self._batch
            if len(batch.outcomes) < len(batch.inputs):  # the input being handled is recorded
                batch.paths.append((len(batch.inputs) - 1, path))
            return path

        return choose_and_record  # type: ignore[return-value]

    def handle(self, machine: Machine, event: ev.Event, now_ns: int) -> list[ev.Action]:
        """Passes one input to the machine and records both the input and its outcome."""
        # Before the machine handles the input, so that an input that hangs it is kept.
        if self._full or len(self._batch.inputs) >= self._batch_size or (self._due and not machine.open_rooms):
            self._full = not self._make_space()
        self.taken += 1
        if self._full:
            self.missed += 1
            return machine.handle(event, now_ns)
        batch = self._batch
        batch.inputs.append((now_ns, event))
        result: Sequence[ev.Action] | str = RAISED
        try:
            result = actions = machine.handle(event, now_ns)
        except LocalProtocolError:
            result = REFUSED
            raise
        finally:
            batch.outcomes.append(result)
        return actions

    def pieces(self, since: int | None, until: int | None, page_bytes: int = PAGE_BYTES) -> Pieces:
        """Returns the pieces from number `since` (None: the oldest) to below `until` (None: now), up to a size limit.

        Args:
            page_bytes: size after which no more pieces are added.
        """
        batch = self._batch  # read first: if it is sealed meanwhile, it is among the blobs
        kept = list(self._blobs)
        end = max(batch.number, kept[-1].number + 1 if kept else 0)
        if end == batch.number and batch.inputs:
            count, data = batch.encoded()
            kept.append(Blob(end, batch.first, count, data))
            end += 1
        oldest = kept[0].number if kept else end
        wanted = oldest if since is None else since
        end = end if until is None else min(until, end)
        found: list[InputBlob] = []
        size = 0
        for blob in kept:
            if not wanted <= blob.number < end:
                continue
            found.append(blob.packed())
            size += len(found[-1]["data"])
            if size >= page_bytes:
                break
        following = found[-1]["number"] + 1 if found else end
        return Pieces(found, following, end, max(0, min(oldest, end) - wanted))

    # ---- the machine's thread ---------------------------------------------------------------------------------

    def _make_space(self) -> bool:
        """Makes space for the next batch, and a checkpoint if it is time; returns False if there is no space."""
        machine = self._machine
        if machine is None:
            return False
        if len(self._batch.inputs) >= self._batch_size:
            self._seal()
        rooms, count = machine.open_rooms, self.taken - self._checkpoint_at
        self._due = 4 * count >= self._capacity or 4 * self._bytes_since >= MAX_BYTES
        half = 2 * count >= self._capacity or 2 * self._bytes_since >= MAX_BYTES
        wanted = half or self._full or (self._due and not rooms)
        if wanted and (rooms <= self._max_rooms or self.taken >= self._retry_at):
            self._checkpoint(machine)
            if self._machine is None:
                return False
        while not self._has_space():
            if not self._drop_oldest():
                return False
        return not self._full

    def _has_space(self) -> bool:
        in_batch = max(len(self._batch.inputs), self._batch_size)
        return self._kept + in_batch <= self._capacity and self._nbytes < MAX_BYTES

    def _drop_oldest(self) -> bool:
        """Drops what precedes the second checkpoint; returns False if there is none."""
        later = [place for place, blob in enumerate(self._blobs) if not isinstance(blob.data, bytes)][1:]
        for _ in range(later[0] if later else 0):
            self._discount(self._blobs.popleft())
        return bool(later)

    def _add(self, first: int, count: int, data: bytes | Copy) -> None:
        self._blobs.append(Blob(self._batch.number, first, count, data))
        self._kept += count
        if isinstance(data, bytes):
            self._nbytes += len(data)
            self._bytes_since += len(data)
        self._batch = _Batch(self._batch.number + 1, self.taken)

    def _discount(self, blob: Blob) -> None:
        self._kept -= blob.count
        self._nbytes -= len(blob.data) if isinstance(blob.data, bytes) else 0

    def _seal(self) -> None:
        """Encodes the current batch and begins the next one."""
        if self._batch.inputs:
            self._add(self._batch.first, *self._batch.encoded())

    def _checkpoint(self, machine: Machine) -> None:
        """Adds a checkpoint, unless copying the state takes too long or fails."""
        rooms = machine.open_rooms
        try:
            copy = Copy(machine, BUDGET_NS)
        except TooSlow:
            # The engine may have announced thousands of rooms that no decode rank has opened.
            self._max_rooms, self._retry_at = (rooms - 1) // 2, self.taken + AGAIN_AFTER
            return
        except Exception as error:  # a bug here may end the recording, but not the agent
            self.fault = f"{type(error).__name__}: {error}"
            self._machine = None
            return
        self._max_rooms = max(self._max_rooms, 2 * rooms)
        self._due = self._full = False
        self._seal()
        self._add(self.taken, 0, copy)
        self._checkpoint_at, self._bytes_since = self.taken, 0
