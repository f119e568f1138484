"""The last inputs of a machine, so that what it did can be run again: `kvctl replay`.

A machine does no I/O, so its state at one moment and every (time, event) since are all there is to know. Inputs are
appended as they are and encoded some hundreds at a time, which costs less than keeping the objects alive would cost
the garbage collector. They are kept in two generations, each of which begins with a checkpoint of the machine, so that
the oldest inputs can go and what is left can still be run.

A checkpoint copies what the rooms in flight hold. It is taken when no room is, if such a moment comes in time; else
when the generation is full, if it can be had within `BUDGET_NS`. If it cannot, the generation grows into the other
one's place, and then recording stops until a checkpoint can be had: the recording has a gap, and says so.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvctl_agent.contract.recording import InputBlob
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import Checkpoint, TooSlow, pack, take
from kvctl_agent.protocol.machine import Machine

BATCH = 512
BUDGET_NS = 2_000_000
MAX_BYTES = 32 << 20  # of both generations, encoded
AGAIN_AFTER = 8 * BATCH  # inputs, after a checkpoint that took too long although no room was open
PAGE_BYTES = 4 << 20

REFUSED = "!"  # the engine broke the order of calls
RAISED = "X"  # the machine has a bug
UNWRITTEN = ""  # in place of an event's name
ACTIONS: dict[type, str] = {
    ev.Send: "s",
    ev.Transfer: "t",
    ev.Scatter: "c",
    ev.Check: "k",
    ev.StateChanged: "=",
    ev.Released: "r",
    ev.Overlapped: "o",
    ev.ConnectPeer: "+",
    ev.DropPeer: "-",
    ev.ForgetPeer: "f",
    ev.FindInstance: "?",
    ev.Answered: "a",
}
"""What an input led to, in letters: a replay that does otherwise is told from one that does the same."""

_F = TypeVar("_F", bound=Callable[..., str])
_M = TypeVar("_M", bound=Machine)
_NAMES: dict[type, str] = {event: event.__name__ for event in ev.Event.__subclasses__()}

encode = msgspec.msgpack.Encoder(enc_hook=lambda pages: pages.astype("<i4", copy=False).tobytes()).encode


def outcome(actions: Sequence[ev.Action] | str) -> str:
    """What an input led to."""
    return actions if isinstance(actions, str) else "".join([ACTIONS.get(type(action), "~") for action in actions])


@dataclass(slots=True, eq=False)
class _Batch:
    """Inputs that are not encoded yet, what each led to, and what was asked of the path chooser meanwhile."""

    number: int
    first: int
    inputs: list[tuple[int, ev.Event]] = field(default_factory=list)
    outcomes: list[Sequence[ev.Action] | str] = field(default_factory=list)
    asked: list[tuple[int, str]] = field(default_factory=list)  # (place of the input, path)

    def encoded(self) -> tuple[int, bytes]:
        """How many inputs, and those; from any thread, so it copies first."""
        asked, outcomes, inputs = self.asked[:], self.outcomes[:], self.inputs[:]
        told = [outcome(actions) for actions in outcomes[: len(inputs)]]
        told += [""] * (len(inputs) - len(told))  # the one that is being handled
        rows = [(now_ns, _NAMES[type(event)], event, told[place]) for place, (now_ns, event) in enumerate(inputs)]
        try:
            return len(rows), encode((asked, rows))
        except (TypeError, ValueError, OverflowError):
            return len(rows), encode((asked, list(map(_sound, rows))))


def _sound(row: tuple[int, str, ev.Event, str]) -> tuple[int, str, ev.Event | None, str]:
    """The row, or a gap in its place: what an engine gave us may hold what cannot be written."""
    try:
        encode(row)
    except (TypeError, ValueError, OverflowError):
        return row[0], UNWRITTEN, None, row[3]
    return row


class Blob(NamedTuple):
    """One piece of a recording, as `InputBlob` says; a checkpoint is packed when somebody wants it."""

    number: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    data: bytes | Checkpoint

    def told(self) -> InputBlob:
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
    """A checkpoint and what followed it."""

    blobs: list[Blob]
    count: int = 0
    nbytes: int = 0


class Pieces(NamedTuple):
    """Some pieces of a recording, in order; see `InputPage`."""

    blobs: list[InputBlob]
    next: int
    end: int
    dropped: int


class InputLog:
    """Inputs of one machine: the thread that owns it calls `begin`, `take` and `told`, any thread may call `pieces`.

    Args:
        capacity: inputs kept, in both generations together; 0: none.
    """

    def __init__(self, capacity: int) -> None:
        self.taken = 0
        self.missed = 0
        self.fault = ""  # why nothing is recorded any more
        self._full = -(-capacity // 2)
        self._machine: Machine | None = None
        self._batch_size = min(BATCH, self._full)
        self._numbers = 0  # pieces made
        self._generations: tuple[_Generation, ...] = ()  # replaced as a whole, for those who read
        self._batch = _Batch(0, 0)
        self._due = True  # a new generation would be welcome
        self._crowd = 1 << 62  # open rooms with which a checkpoint is worth a try
        self._again = 0  # number of the input from which on one is, without open rooms

    def begin(self, machine: _M) -> _M:
        """From now on the inputs of this machine are taken; a new one, which is copied at once."""
        if self._full:
            self._machine = machine
            self._checkpoint(machine)
        return machine

    def asked(self, choose: _F) -> _F:
        """A path chooser whose answers are recorded: they depend on what was measured, not on the inputs."""

        def chosen(*of: Any) -> str:
            path = choose(*of)
            batch = self._batch
            if len(batch.outcomes) < len(batch.inputs):  # else what is being handled is not recorded
                batch.asked.append((len(batch.inputs) - 1, path))
            return path

        return chosen  # type: ignore[return-value]

    def take(self, event: ev.Event, now_ns: int) -> None:
        """One input, before the machine gets it: one that it never comes back from is in the recording."""
        if (self._due or len(self._batch.inputs) >= self._batch_size) and not self._turn():
            self.taken += 1
            self.missed += 1
            return
        self.taken += 1
        self._batch.inputs.append((now_ns, event))

    def told(self, actions: Sequence[ev.Action] | str) -> None:
        """What came of the input that was taken last."""
        batch = self._batch
        if len(batch.outcomes) < len(batch.inputs):
            batch.outcomes.append(actions)

    def pieces(self, since: int | None, until: int | None, page_bytes: int = PAGE_BYTES) -> Pieces:
        """Pieces from number `since` (the oldest) up to `until` (now), as many as go into `page_bytes`."""
        batch = self._batch  # before the rest: one that is sealed meanwhile is then among the others
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
            found.append(blob.told())
            size += len(found[-1]["data"])
            if size >= page_bytes:
                break
        following = found[-1]["number"] + 1 if found else end
        return Pieces(found, following, end, max(0, min(oldest, end) - wanted))

    # ---- the owner's side -------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Make room for one more input; False when it is to be missed."""
        machine = self._machine
        if machine is None:
            return False
        if len(self._batch.inputs) >= self._batch_size:
            self._seal()
        if not self._due:
            return True
        generation = self._generations[-1] if self._generations else None
        room = self._room(generation)
        rooms = machine.open_rooms
        welcome = room <= 0.5 and rooms <= self._crowd if rooms else self.taken >= self._again
        if welcome and self._checkpoint(machine):
            return True
        if generation is None or room <= 0:
            return False
        if room <= 0.5 and len(self._generations) > 1:
            self._generations = (generation,)
        return True

    def _room(self, generation: _Generation | None) -> float:
        """The share of all the place there is that is left when only this generation is kept: 0.5 when it is full."""
        if generation is None:
            return 0.0
        count = generation.count + len(self._batch.inputs)
        return 1 - max(count / (2 * self._full), generation.nbytes / MAX_BYTES)

    def _seal(self) -> None:
        """Encode the batch and begin the next one."""
        batch = self._batch
        if batch.inputs:
            count, data = batch.encoded()
            generation = self._generations[-1]
            generation.blobs.append(Blob(batch.number, batch.first, count, data))
            generation.count += count
            generation.nbytes += len(data)
            self._numbers = batch.number + 1
            # Half full: the next moment without rooms is a good one for the next generation.
            self._due = self._room(generation) <= 0.75
        self._batch = _Batch(self._numbers, self.taken)

    def _checkpoint(self, machine: Machine) -> bool:
        """Begin a new generation; False when the machine holds too much to be copied now."""
        rooms = machine.open_rooms
        try:
            taken = take(machine, BUDGET_NS)
        except TooSlow:
            self._crowd = rooms // 2
            if not rooms:  # there may be thousands that our engine has announced and nobody has opened
                self._again = self.taken + AGAIN_AFTER
            return False
        except Exception as error:  # a bug in here must not cost the agent anything but its recording
            self.fault = f"{type(error).__name__}: {error}"
            self._machine = None
            return False
        self._crowd = max(self._crowd, 2 * rooms)
        self._due = False
        if self._generations:
            self._seal()
            self._due = False
        blob = Blob(self._numbers, self.taken, 0, taken)
        self._numbers += 1
        self._generations = (*self._generations[-1:], _Generation([blob]))
        self._batch = _Batch(self._numbers, self.taken)
        return True
