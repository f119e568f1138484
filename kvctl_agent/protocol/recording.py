"""Records the latest inputs of a protocol machine, so that `kvctl replay` can run them again.

A machine does no I/O, so its state at one time and all later (time, event) inputs determine its behaviour. Inputs are
kept as objects until several hundred can be encoded at a time; keeping the objects alive would cost the garbage
collector more than the encoding. They are kept in two generations, each of which begins with a checkpoint of the
machine: the older generation can be dropped, and the rest can still be replayed.

A checkpoint copies the state of the rooms in flight. It is taken while no room is open, if that happens in time;
otherwise when the generation is full, if copying takes less than `BUDGET_NS`. If copying takes longer, the generation
grows into the space of the other one; when that is full too, inputs are missed until a checkpoint succeeds, and the
recording has a gap, which it reports.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvctl_agent.contract.recording import InputBlob
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.page_indices import packed
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import Checkpoint, TooSlow, pack, take
from kvctl_agent.protocol.machine import Machine

BATCH = 64  # inputs encoded at once, with the GIL; until then the engine's garbage collection traverses them
BUDGET_NS = 2_000_000
MAX_BYTES = 32 << 20  # both generations, encoded
AGAIN_AFTER = 4096  # inputs until the next attempt, if a checkpoint took too long without open rooms
PAGE_BYTES = 4 << 20

REFUSED = "!"  # outcome: LocalProtocolError, a call of the engine out of order
RAISED = "X"  # outcome: any other exception, a bug of the machine
UNWRITTEN = ""  # name of an event that could not be encoded
ACTIONS: dict[type, str] = {
    ev.Send: "s",
    ev.Transfer: "t",
    ev.Scatter: "c",
    ev.Check: "k",
    ev.StoreAux: "x",
    ev.StateChanged: "=",
    ev.Released: "r",
    ev.Recalled: "l",
    ev.Overlapped: "o",
    ev.ConnectPeer: "+",
    ev.DropPeer: "-",
    ev.ForgetPeer: "f",
    ev.FindInstance: "?",
    ev.ForgetInstance: "g",
    ev.Answered: "a",
}
"""Letters of the actions in an outcome; a replay compares outcomes to detect that it diverges."""

_F = TypeVar("_F", bound=Callable[..., str])
_M = TypeVar("_M", bound=Machine)
_NAMES: dict[type, str] = {event: event.__name__ for event in ev.Event.__subclasses__()}

encode = msgspec.msgpack.Encoder(enc_hook=packed).encode


@lru_cache(maxsize=1024)  # few sequences of actions make up nearly all outcomes
def _letters(kinds: tuple[type, ...]) -> str:
    return "".join(ACTIONS.get(kind, "~") for kind in kinds)


def outcome(actions: Sequence[ev.Action] | str) -> str:
    """Returns the outcome of an input: one letter per action, or `REFUSED` or `RAISED` unchanged."""
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
    data: bytes | Checkpoint

    def packed(self) -> InputBlob:
        checkpoint = isinstance(self.data, Checkpoint)
        data = pack(self.data) if isinstance(self.data, Checkpoint) else self.data
        return {
            "number": self.number,
            "kind": "checkpoint" if checkpoint else "inputs",
            "first": self.first,
            "count": self.count,
            "data": base64.b64encode(zlib.compress(data, 1)).decode(),
        }


@dataclass(slots=True, eq=False)
class _Generation:
    """A checkpoint and the encoded inputs that follow it."""

    blobs: list[Blob]
    count: int = 0
    nbytes: int = 0


class Pieces(NamedTuple):
    """Consecutive pieces of a recording, as in `InputPage`."""

    blobs: list[InputBlob]
    next: int
    end: int
    dropped: int


class InputLog:
    """Recorder of the latest inputs of one machine, used on the machine's thread; any thread may call `pieces`.

    Args:
        capacity: number of inputs kept in both generations together; 0: none.

    Attributes:
        taken: number of inputs of the machine so far.
        missed: number of inputs that were not recorded.
        fault: why recording has stopped; "" while it runs.
    """

    def __init__(self, capacity: int) -> None:
        self.taken = 0
        self.missed = 0
        self.fault = ""
        self._full = -(-capacity // 2)
        self._machine: Machine | None = None
        self._batch_size = min(BATCH, self._full)
        self._next_number = 0  # of a piece
        self._generations: tuple[_Generation, ...] = ()  # replaced, never changed: other threads read it
        self._batch = _Batch(0, 0)
        self._due = True  # a new generation should begin
        self._max_rooms = 1 << 62  # open rooms up to which a checkpoint is tried
        self._retry_at = 0  # number of the input from which one is tried without open rooms

    def begin(self, machine: _M) -> _M:
        """Starts recording the inputs of a new machine, beginning with a checkpoint; returns the machine."""
        if self._full:
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
        recorded = not (self._due or len(self._batch.inputs) >= self._batch_size) or self._make_room()
        self.taken += 1
        if not recorded:
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
        batch = self._batch  # read first: if it is sealed meanwhile, it is among the generations
        kept = [blob for generation in self._generations for blob in generation.blobs[:]]
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

    def _make_room(self) -> bool:
        """Makes room for one more input; returns False if the input cannot be recorded."""
        machine = self._machine
        if machine is None:
            return False
        if len(self._batch.inputs) >= self._batch_size:
            self._seal()
        if not self._due:
            return True
        generation = self._generations[-1] if self._generations else None
        rooms = machine.open_rooms
        if rooms and self._batch.inputs and generation and generation.count + self._batch_size <= self._full:
            return True  # the space is looked at between batches, as long as a whole one fits
        space = self._space(generation)
        worthwhile = space <= 0.5 and rooms <= self._max_rooms if rooms else self.taken >= self._retry_at
        if worthwhile and self._checkpoint(machine):
            return True
        if generation is None or space <= 0:
            return False
        if space <= 0.5 and len(self._generations) > 1:
            self._generations = (generation,)
        return True

    def _space(self, generation: _Generation | None) -> float:
        """Returns the share of the capacity that is free if only this generation is kept: 0.5 if it fills its half."""
        if generation is None:
            return 0.0
        count = generation.count + len(self._batch.inputs)
        return 1 - max(count / (2 * self._full), generation.nbytes / MAX_BYTES)

    def _seal(self) -> None:
        """Encodes the current batch, adds it to the latest generation and begins the next batch."""
        batch = self._batch
        if batch.inputs:
            count, data = batch.encoded()
            generation = self._generations[-1]
            generation.blobs.append(Blob(batch.number, batch.first, count, data))
            generation.count += count
            generation.nbytes += len(data)
            self._next_number = batch.number + 1
            # Half full: the next generation should begin as soon as no room is open.
            self._due = self._space(generation) <= 0.75
        self._batch = _Batch(self._next_number, self.taken)

    def _checkpoint(self, machine: Machine) -> bool:
        """Begins a new generation with a checkpoint; returns False if copying the state takes too long or fails."""
        rooms = machine.open_rooms
        try:
            taken = take(machine, BUDGET_NS)
        except TooSlow:
            self._max_rooms = rooms // 2
            if not rooms:  # the engine may have announced thousands that no decode rank has opened
                self._retry_at = self.taken + AGAIN_AFTER
            return False
        except Exception as error:  # a bug here may end the recording, but not the agent
            self.fault = f"{type(error).__name__}: {error}"
            self._machine = None
            return False
        self._max_rooms = max(self._max_rooms, 2 * rooms)
        self._due = False
        if self._generations:
            self._seal()
            self._due = False
        blob = Blob(self._next_number, self.taken, 0, taken)
        self._next_number += 1
        self._generations = (*self._generations[-1:], _Generation([blob]))
        self._batch = _Batch(self._next_number, self.taken)
        return True
