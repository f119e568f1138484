"""Implements `kvctl replay`: replays the agents of a recording, and reports on each."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypedDict

from kvctl.client.recordings import opened
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.replay.player import ReplayTimeout, play
from kvctl.lab.replay.recordings import AgentRecording, InputSegment, load
from kvctl.lab.replay.shrink import shrink

TIME_LIMIT_S = 3600.0
"""Time limit of a whole replay; without it, a machine that does not return from an input would hang the replay."""

Progress = Callable[[str], None]


class BreachReport(TypedDict):
    """The first violation of an invariant in an agent's inputs, for display."""

    invariant: str
    text: str
    number: int  # number of the input
    at_ns: int  # wall clock
    room: str | None
    story: list[str]  # the latest inputs of the room, and the actions of each


class ShrunkReport(TypedDict):
    """A shortened sequence of inputs that violates the same invariant, for display."""

    inputs: int
    story: list[str]
    early: bool  # whether the time limit ended the search before every input had been tried
    fresh: bool  # whether it starts with a new machine instead of the checkpoint


class AgentVerdict(TypedDict):
    """Result of replaying one agent's inputs, as `kvctl replay -o json` prints it."""

    agent: str
    role: str
    incarnation: str
    inputs: int
    rooms: int
    pieces: int  # number of segments without a gap
    missed: int  # number of inputs that the agent did not record
    dropped: int  # number of pieces that the agent had discarded
    first_at_ns: int | None
    last_at_ns: int | None
    notes: list[str]
    breach: BreachReport | None
    shrunk: ShrunkReport | None


def replay(path: Path, names: Sequence[str], shrink_s: float | None, progress: Progress) -> list[AgentVerdict]:
    """Replays the named agents of a recording, or all agents if `names` is empty.

    Args:
        path: the recording, or a bundle with one.
        names: names of agents.
        shrink_s: time limit for shortening the inputs of a violation; None to leave them as they are.
        progress: called with a line of text every few thousand inputs.

    Raises:
        CliError: the recording cannot be read, was made by another build (exit 6) or lacks an agent (exit 2); the
            replay exceeded `TIME_LIMIT_S` (exit 4).
    """
    latest = "reading the recording"

    def report(text: str) -> None:
        nonlocal latest
        latest = text
        progress(text)

    with opened(path) as file:
        try:
            with _time_limit():
                agents = load(file)
                known = {agent.name for agent in agents}
                if unknown := [name for name in names if name not in known]:
                    text = f"{path} has no agent {unknown[0]}; it has {', '.join(sorted(known))}"
                    raise CliError(text, ExitCode.USAGE)
                return judge([agent for agent in agents if not names or agent.name in names], shrink_s, report)
        except ReplayTimeout as error:
            position = f", {error.position}" if error.position else ""
            text = f"{path}: the replay did not end within {TIME_LIMIT_S:.0f} s ({latest}{position}): choose an --agent"
            raise CliError(text, ExitCode.TIMEOUT) from None
        except OSError as error:
            raise CliError(f"{path}: {error.strerror}") from None


def judge(agents: Sequence[AgentRecording], shrink_s: float | None, progress: Progress) -> list[AgentVerdict]:
    """Replays the agents and returns a verdict for each; the other arguments are those of `replay`.

    Raises:
        RecordingError: the recording is damaged, or was made by another build.
    """
    verdicts: list[AgentVerdict] = []
    for agent in agents:
        agent.check_versions()
        verdicts.append(_replay_agent(agent, shrink_s, progress))
    return verdicts


def _replay_agent(agent: AgentRecording, shrink_s: float | None, progress: Progress) -> AgentVerdict:
    header = agent.header
    segments = agent.segments()
    total = sum(segment.count for segment in segments)
    verdict: AgentVerdict = {
        "agent": agent.name,
        "role": header["role"],
        "incarnation": header["incarnation"],
        "inputs": 0,
        "rooms": 0,
        "pieces": len(segments),
        "missed": header["missed"],
        "dropped": agent.dropped,
        "first_at_ns": None,
        "last_at_ns": None,
        "notes": _notes(agent, segments),
        "breach": None,
        "shrunk": None,
    }
    offset_ns = header["clock_offset_ns"]

    def report(before: int, count: int) -> None:
        progress(f"{agent.name}: {before + count} of {total} inputs")

    for number, segment in enumerate(segments, 1):
        items = list(segment.inputs())
        if not items:
            continue
        verdict["first_at_ns"] = verdict["first_at_ns"] or items[0].now_ns + offset_ns
        verdict["last_at_ns"] = items[-1].now_ns + offset_ns
        start = segment.start
        if left_out := start.checkpoint.left_out:
            verdict["notes"].append(f"its checkpoint lacks {left_out} rooms that had ended long before")
        report(verdict["inputs"], 0)
        played = play(start, items, progress=partial(report, verdict["inputs"]))
        verdict["inputs"] += played.inputs
        verdict["rooms"] += played.rooms
        if played.diverged is not None:
            item, now = played.diverged
            verdict["notes"].append(
                f"input {item.number} led to {item.outcome!r} when it was recorded and leads to {now!r} now: "
                "another build, or a machine that does not depend on its inputs alone"
            )
        if (breach := played.breach) is None:
            continue
        verdict["breach"] = {
            "invariant": breach.invariant,
            "text": breach.text,
            "number": breach.item.number,
            "at_ns": breach.item.now_ns + offset_ns,
            "room": None if breach.room is None else str(breach.room),
            "story": list(breach.story),
        }
        if shrink_s is not None:
            progress(f"{agent.name}: making the trace shorter")
            shrunk = shrink(start, items[: played.inputs], breach, shrink_s)
            verdict["shrunk"] = {
                "inputs": len(shrunk.inputs),
                "story": list(shrunk.breach.story),
                "early": shrunk.early,
                "fresh": shrunk.fresh,
            }
        if number < len(segments):
            verdict["notes"].append("inputs after the breach were not run")
        break
    return verdict


def _notes(agent: AgentRecording, segments: Sequence[InputSegment]) -> list[str]:
    """Returns sentences about what the recording of an agent lacks."""
    header = agent.header
    notes: list[str] = []
    if not segments:
        notes.append("nothing was recorded (record_inputs)" if not agent.pieces else "no checkpoint was recorded")
    elif segments[0].first:
        notes.append(f"the recording begins at input {segments[0].first}: earlier inputs are no longer kept")
    if header["fault"]:
        notes.append(f"recording ended with a fault, {header['missed']} inputs were missed: {header['fault']}")
    elif header["missed"]:
        notes.append(f"{header['missed']} inputs were missed: too many rooms were open for a checkpoint")
    return notes


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises ReplayTimeout in the block after `TIME_LIMIT_S`, even while one input is handled.

    Has no effect on a thread other than the main thread, because the limit uses SIGALRM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise ReplayTimeout

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
