"""Replays the agents of a recording and says what came of each, as `kvctl replay` prints it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

from kvctl.lab.replay.player import Breach, play
from kvctl.lab.replay.recordings import AgentRecording, InputSegment
from kvctl.lab.replay.regression import write_test
from kvctl.lab.replay.shrink import Shorter, shrink

Progress = Callable[[str], None]


class BreachReport(TypedDict):
    """The first invariant that was broken."""

    invariant: str
    text: str
    number: int  # of the input
    at_ns: int  # wall clock
    room: str | None
    story: list[str]  # the last inputs that concern it, and what each led to


class ShrunkReport(TypedDict):
    """A shorter trace that breaks the same invariant."""

    inputs: int
    story: list[str]
    early: bool  # time was up before nothing more could be left out
    fresh: bool  # it begins with a new machine and needs no checkpoint


class AgentVerdict(TypedDict):
    """The result of one agent's replay, as `kvctl replay -o json` prints it."""

    agent: str
    role: str
    incarnation: str
    inputs: int
    rooms: int
    pieces: int  # stretches without a gap
    missed: int  # inputs that the agent did not record
    dropped: int  # inputs that were no longer kept
    first_at_ns: int | None
    last_at_ns: int | None
    notes: list[str]
    breach: BreachReport | None
    shrunk: ShrunkReport | None
    test: str  # path of the test that was written; empty


def judge(
    agents: Sequence[AgentRecording], shrink_s: float | None, test: Path | None, progress: Progress
) -> list[AgentVerdict]:
    """A verdict for each agent.

    Args:
        shrink_s: time limit for shortening the trace of a breach; None: do not shorten it.
        test: file for a test that repeats the first breach; None: write none.

    Raises:
        RecordingError: a recording is damaged.
        OSError: the test cannot be written.
    """
    verdicts: list[AgentVerdict] = []
    for agent in agents:
        agent.check()
        verdict = _one(agent, shrink_s, test, progress)
        if verdict["test"]:
            test = None
        verdicts.append(verdict)
    return verdicts


def _one(agent: AgentRecording, shrink_s: float | None, test: Path | None, progress: Progress) -> AgentVerdict:
    header = agent.header
    stretches = agent.stretches()
    whole = sum(stretch.count for stretch in stretches)
    verdict: AgentVerdict = {
        "agent": agent.name,
        "role": header["role"],
        "incarnation": header["incarnation"],
        "inputs": 0,
        "rooms": 0,
        "pieces": len(stretches),
        "missed": header["missed"],
        "dropped": agent.dropped,
        "first_at_ns": None,
        "last_at_ns": None,
        "notes": _notes(agent, stretches),
        "breach": None,
        "shrunk": None,
        "test": "",
    }
    offset_ns = header["clock_offset_ns"]
    for number, stretch in enumerate(stretches, 1):
        items = list(stretch.inputs())
        if not items:
            continue
        verdict["first_at_ns"] = verdict["first_at_ns"] or items[0].now_ns + offset_ns
        verdict["last_at_ns"] = items[-1].now_ns + offset_ns
        start = stretch.start
        if left_out := start.checkpoint.left_out:
            verdict["notes"].append(f"its checkpoint lacks {left_out} rooms that had ended long before")
        played = play(start, items, progress=partial(_tell, progress, agent.name, verdict["inputs"], whole))
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
        verdict["breach"] = _told(breach, offset_ns)
        short: Shorter | None = None
        if shrink_s is not None:
            progress(f"{agent.name}: making the trace shorter")
            short = shrink(start, items[: played.inputs], breach, shrink_s)
            verdict["shrunk"] = _shrunk(short)
        if test is not None:
            trace = short or Shorter(start, items[: played.inputs], breach, early=False, fresh=False)
            verdict["test"] = str(write_test(test, header, trace))
        if number < len(stretches):
            verdict["notes"].append("what follows the breach was not run")
        break
    return verdict


def _tell(progress: Progress, name: str, before: int, whole: int, count: int) -> None:
    progress(f"{name}: {before + count} of {whole} inputs")


def _notes(agent: AgentRecording, stretches: Sequence[InputSegment]) -> list[str]:
    """What a reader must know of the recording itself."""
    header = agent.header
    notes: list[str] = []
    if not stretches:
        notes.append("nothing was recorded (record_inputs)" if not agent.pieces else "no checkpoint was recorded")
    elif stretches[0].first:
        notes.append(f"the recording begins at input {stretches[0].first}: what came before is no longer kept")
    if header.get("fault"):
        notes.append(f"recording ended with a fault, {header['missed']} inputs were missed: {header['fault']}")
    elif header["missed"]:
        notes.append(f"{header['missed']} inputs were missed: too many rooms were open for a checkpoint")
    return notes


def _told(breach: Breach, offset_ns: int) -> BreachReport:
    return {
        "invariant": breach.invariant,
        "text": breach.text,
        "number": breach.item.number,
        "at_ns": breach.item.now_ns + offset_ns,
        "room": None if breach.room is None else str(breach.room),
        "story": list(breach.story),
    }


def _shrunk(short: Shorter) -> ShrunkReport:
    return {
        "inputs": len(short.inputs),
        "story": list(short.breach.story),
        "early": short.early,
        "fresh": short.fresh,
    }
