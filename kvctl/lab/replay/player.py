"""Runs inputs through the machine that they were recorded from, under a watch, up to the first breach."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvctl.lab.replay.formatting import done, rooms_of, said
from kvctl.lab.replay.inputs import Input, Paths, Start
from kvctl.lab.replay.invariants import INVARIANTS, Broken
from kvctl.lab.replay.watch import InvariantChecker
from kvctl_agent.errors import LocalProtocolError, RecordingError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.recording import RAISED, REFUSED, outcome

_STORY = 8  # inputs of the room that are told before a breach
_REMEMBERED = 4096  # inputs among which those are looked for
_PROGRESS_EVERY = 4096


class Breach(NamedTuple):
    """An invariant that does not hold, and where; the input is the last one that was run."""

    invariant: str
    text: str
    item: Input
    room: int | None
    story: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.invariant} ({INVARIANTS[self.invariant]}): {self.text}", *self.story]
        return "\n  ".join(lines)


class Played(NamedTuple):
    """What came of a run.

    Attributes:
        diverged: the first input that led to something else than when it was recorded, with both.
    """

    inputs: int
    rooms: int
    breach: Breach | None
    diverged: tuple[Input, str] | None


def play(
    start: Start, inputs: Iterable[Input], *, feasible: bool = False, progress: Callable[[int], None] | None = None
) -> Played:
    """Run inputs, up to the first breach.

    Args:
        feasible: leave out what our own engine and workers could not have said, since what they answer was left out.
        progress: called now and then with how many were run.

    Raises:
        RecordingError: what it starts from is no machine.
    """
    paths = Paths()
    machine, watch = _begin(start, paths)
    recent: deque[tuple[Input, Sequence[ev.Action] | str]] = deque(maxlen=_REMEMBERED)
    diverged: tuple[Input, str] | None = None
    count = 0
    for count, item in enumerate(inputs, 1):
        if progress is not None and count % _PROGRESS_EVERY == 0:
            progress(count)
        if feasible and not watch.possible(item.event):
            continue
        paths.expect(item.asked)
        led_to: Sequence[ev.Action] | str
        try:
            actions = led_to = machine.handle(item.event, item.now_ns)
            recent.append((item, actions))
            watch.see(item.event, item.now_ns, actions)
        except LocalProtocolError:
            led_to = REFUSED
            recent.append((item, led_to))
        except Broken as broken:
            story = _story(recent, broken.room)
            return Played(count, watch.rooms, Breach(broken.invariant, str(broken), item, broken.room, story), diverged)
        except Exception as error:
            recent.append((item, RAISED))
            rooms = rooms_of(item.event)
            room = min(rooms) if rooms else None
            text = f"{type(error).__name__}: {error} (in {_place(error)})"
            breach = Breach("exception", text, item, room, _story(recent, room))
            return Played(count, watch.rooms, breach, diverged)
        if diverged is None and item.outcome and (now := outcome(led_to)) != item.outcome:
            diverged = item, now
    return Played(count, watch.rooms, None, diverged)


def _begin(start: Start, paths: Paths) -> tuple[Machine, InvariantChecker]:
    """A checkpoint may be well-formed and yet hold anything in any place."""
    try:
        machine = start.machine(paths)
        return machine, InvariantChecker(machine)
    except RecordingError:
        raise
    except Exception as error:
        raise RecordingError(f"its checkpoint is of no machine: {type(error).__name__}: {error}") from error


def _place(error: Exception) -> str:
    """The function that raised it, which tells one exception from another of its kind."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_name if trace is not None else "?"


def _story(recent: Iterable[tuple[Input, Sequence[ev.Action] | str]], room: int | None) -> tuple[str, ...]:
    """The last inputs that are about the room, or simply the last ones."""
    told = list(recent)
    mine = [
        (item, led_to)
        for item, led_to in told[:-1]
        if room is None or room in rooms_of(item.event, () if isinstance(led_to, str) else led_to)
    ]
    lines: list[str] = []
    last_ns = told[-1][0].now_ns
    for item, led_to in [*mine[-_STORY:], told[-1]]:
        lines.append(f"#{item.number} {(item.now_ns - last_ns) / 1e6:+.3f} ms  {said(item.event)}")
        lines += (
            [f"    {led_to}"] if isinstance(led_to, str) else [f"    → {done(action)}" for action in led_to[:_STORY]]
        )
    return tuple(lines)
