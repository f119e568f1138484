"""Runs recorded inputs through the state machine again and checks the invariants after each one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

from kvctl.lab.replay.decode_invariants import DecodeInvariants
from kvctl.lab.replay.formatting import action_text, input_text, rooms_of
from kvctl.lab.replay.invariants import INVARIANTS, Violation
from kvctl.lab.replay.prefill_invariants import PrefillInvariants
from kvctl.lab.replay.recordings import Input, Start
from kvctl_agent.contract.choices import SLICE, STAGED
from kvctl_agent.errors import LocalProtocolError, RecordingError, RecordingVersionError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import build
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.decode.rooms import DecodeState
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.messages import PeerInfo
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.recording import RAISED, REFUSED, outcome
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.null import NullTelemetry

_HISTORY_INPUTS = 8  # number of inputs shown before a violation
_REMEMBERED = 4096  # number of latest inputs in which they are searched
_PROGRESS_EVERY = 4096

_Outcome = Sequence[ev.Action] | str
_Recent = tuple[Input, _Outcome]


class ReplayTimeout(BaseException):
    """Raised when a replay exceeds its time limit.

    Not an Exception, because `play` would report that as a bug of the machine.

    Attributes:
        position: the input that was being handled, as text; "" before the first input.
    """

    position = ""


class Breach(NamedTuple):
    """The first violation of an invariant in a replay.

    Attributes:
        invariant: a key of `INVARIANTS`.
        text: what happened.
        item: the input that led to the violation; the last input that was run.
        room: number of the room that the violation concerns, or None.
        story: the latest inputs of that room as lines of text, each followed by the resulting actions.
    """

    invariant: str
    text: str
    item: Input
    room: int | None
    story: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.invariant} ({INVARIANTS[self.invariant]}): {self.text}", *self.story]
        return "\n  ".join(lines)


class Played(NamedTuple):
    """Result of replaying a sequence of inputs.

    Attributes:
        inputs: number of inputs that were run.
        rooms: number of rooms that these inputs opened.
        breach: the violation that ended the run; None if there was none.
        diverged: the first input whose outcome differs from the recorded outcome, and its outcome in this run.
    """

    inputs: int
    rooms: int
    breach: Breach | None
    diverged: tuple[Input, str] | None


def play(
    start: Start, inputs: Iterable[Input], *, feasible: bool = False, progress: Callable[[int], None] | None = None
) -> Played:
    """Runs inputs through a state machine up to the first violation of an invariant.

    An exception of the machine is a violation; an exception of the checks is raised.

    Args:
        start: state of the machine before the first input.
        inputs: the inputs in the recorded order.
        feasible: whether to skip reports of the engine or a worker about actions that did not happen in this run.
        progress: called every few thousand inputs with the number of inputs so far.

    Raises:
        RecordingError: the checkpoint does not describe a state machine.
    """
    paths = _RecordedPaths()
    machine, checker = _machine(start, paths)
    recent: deque[_Recent] = deque(maxlen=_REMEMBERED)
    diverged: tuple[Input, str] | None = None
    count = 0
    for count, item in enumerate(inputs, 1):
        if progress is not None and count % _PROGRESS_EVERY == 0:
            progress(count)
        if feasible and not checker.feasible(item.event):
            continue
        paths.following = list(reversed(item.paths))
        led_to: _Outcome
        try:
            try:
                led_to = machine.handle(item.event, item.now_ns)
            except LocalProtocolError:
                led_to = REFUSED
            except Exception as error:
                recent.append((item, RAISED))
                text = f"{type(error).__name__}: {error} (in {_function(error)})"
                raise Violation("exception", text, min(rooms_of(item.event), default=None)) from error
            recent.append((item, led_to))
            if not isinstance(led_to, str):
                checker.check(item.event, item.now_ns, led_to)
        except Violation as error:
            breach = Breach(error.invariant, str(error), item, error.room, _story(recent, error.room))
            return Played(count, checker.rooms_checked, breach, diverged)
        except ReplayTimeout as error:
            error.position = f"input {item.number}: {input_text(item.event)}"
            raise
        if diverged is None and item.outcome and (now := outcome(led_to)) != item.outcome:
            diverged = item, now
    return Played(count, checker.rooms_checked, None, diverged)


class _RecordedPaths:
    """Path chooser that repeats the recorded choices; if none is left, it chooses a path that every part can take."""

    def __init__(self) -> None:
        self.following: list[str] = []  # choices still to return; the next choice is last

    def choose(self, peer: PeerInfo, part_slice: TransferSlice, layers: int, pages: ev.Pages) -> str:
        if self.following:
            return self.following.pop()
        return STAGED if peer.ring_bytes else SLICE

    def fallback(self, peer: PeerInfo, part_slice: TransferSlice, layers: int, pages: ev.Pages) -> str:
        return self.following.pop() if self.following else SLICE


def _machine(start: Start, paths: _RecordedPaths) -> tuple[Machine, DecodeInvariants | PrefillInvariants]:
    """Builds the machine in its recorded state, and the checker of its invariants.

    Raises:
        RecordingError: the checkpoint does not describe a state machine.
    """
    try:
        local, timing, state = build(start.checkpoint)
        telemetry = cast(Telemetry, NullTelemetry(start.clock_offset_ns))
        if isinstance(state, DecodeState):
            decode = DecodeMachine(local, timing, telemetry, state)
            return decode, DecodeInvariants(decode)
        prefill = PrefillMachine(local, timing, telemetry, paths.choose, paths.fallback, state=state)
        return prefill, PrefillInvariants(prefill)
    except RecordingVersionError as error:
        text = f"{start.checkpoint.local.name} was recorded by another build: {error}"
        raise RecordingVersionError(f"{text}: replay it with the build that recorded it") from None
    except RecordingError:
        raise
    except Exception as error:
        raise RecordingError(f"its checkpoint is of no machine: {type(error).__name__}: {error}") from error


def _function(error: Exception) -> str:
    """Returns the name of the function that raised `error`, which distinguishes exceptions of the same type."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_name if trace is not None else "?"


def _story(recent: Iterable[_Recent], room: int | None) -> tuple[str, ...]:
    """Formats the latest inputs of a room and the resulting actions; of all rooms if `room` is None."""
    *earlier, last = recent
    chosen = [
        (item, led_to)
        for item, led_to in earlier
        if room is None or room in rooms_of(item.event, () if isinstance(led_to, str) else led_to)
    ]
    lines: list[str] = []
    for item, led_to in [*chosen[-_HISTORY_INPUTS:], last]:
        lines.append(f"#{item.number} {(item.now_ns - last[0].now_ns) / 1e6:+.3f} ms  {input_text(item.event)}")
        actions = [led_to] if isinstance(led_to, str) else [f"→ {action_text(each)}" for each in led_to]
        lines += [f"    {text}" for text in actions[:_HISTORY_INPUTS]]
    return tuple(lines)
