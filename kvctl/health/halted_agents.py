"""Why an agent does no work: states of its process, as its observer reports them, and its engine's last call.

An observer also answers for a worker that is stopped, hangs or has ended, with what that worker wrote to shared memory.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvctl.health.answers import Row, counts, inner, number, text, texts
from kvctl.render.units import duration

STARVED_NS = 1_500_000_000
"""Time without a turn of the control loop, which makes one at least every 100 ms, after which it counts as starved."""
SILENT_NS = 5_000_000_000
"""Time without a call of the engine, with rooms open, after which that is a warning: longer than most forwards."""


class Halted(StrEnum):
    """Why an agent does no work, as `kvctl agents` shows it."""

    ENDED = "ended"
    STOPPED = "stopped"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class Halt:
    """State of an agent that does no work.

    Attributes:
        since_ns: how long it has lasted; None if unknown.
        text: predicate of a sentence whose subject is the agent.
        remedy: begins with a command.
    """

    kind: Halted
    since_ns: int | None
    text: str
    remedy: str


def halt(answer: Row, name: str) -> Halt | None:
    """Returns why an agent does no work, from its answer to `hello` or `status`; None if it works or if it is unknown.

    Args:
        answer: the answer; those of older agents lack the fields, since these agents answer by themselves.
        name: name of the agent, for commands.
    """
    ended_ns, turn_ns = age_ns(answer, "ended_age_ns"), age_ns(answer, "turn_age_ns")
    pid, state = int(number(answer, "pid") or 0), text(answer, "process_state")
    if ended_ns is not None:
        return Halt(Halted.ENDED, ended_ns, ended_text(answer), _after_the_end(shlex.quote(name)))
    starved = turn_ns is not None and turn_ns >= STARVED_NS
    if state == "stopped":
        since_ns = turn_ns if starved else None
        return Halt(Halted.STOPPED, since_ns, f"is stopped (process {pid})", f"`kill -CONT {pid}` lets it go on")
    if turn_ns is None or not starved:
        return None
    begin = f"has not run its control loop for {duration(turn_ns)}: its process {pid}"
    if state == "uninterruptible":
        where = f"{begin} waits in the kernel and cannot be interrupted (a driver, a disk)"
        remedy = f"`cat /proc/{pid}/stack` shows where, and dmesg what has happened"
        return Halt(Halted.STARVED, turn_ns, where, remedy)
    does = {"running": "runs", "sleeping": "waits"}.get(state, "hangs")
    cause = f"{begin} {does} in a call that keeps the Python interpreter (GIL), or gets no core"
    remedy = f"`py-spy dump --native --pid {pid}` shows the call"
    return Halt(Halted.STARVED, turn_ns, cause, remedy)


def ended_text(answer: Row) -> str:
    """Describes the end of a process: `ended 3 min ago (killed)`."""
    why = text(answer, "ended_why")
    return f"ended {duration(age_ns(answer, 'ended_age_ns') or 0)} ago{f' ({why})' if why else ''}"


def _after_the_end(name: str) -> str:
    return (
        f"`kvctl events -e {name}` shows its last events, kvctl rooms -e {name} its rooms; its own log, or dmesg where "
        "memory ran out, shows why it ended; start it again"
    )


def engine_silence_ns(status: Row) -> int | None:
    """Returns the time since the engine's latest call began, if rooms are open for which it should call again.

    Rooms that have ended and that the engine has not asked for since count, too. None if it has never called, or if it
    is in a call that waits.
    """
    if not any(counts(status, "rooms").values()):
        return None
    if status.get("engine_in_call") is True and "wait" in text(status, "engine_call"):
        return None
    return age_ns(status, "engine_call_age_ns")


def calls_at_every_turn(status: Row) -> bool:
    """Returns whether the engine calls again and again as long as rooms are open, so that silence is a fault.

    SGLang's event loop turns also while it has nothing to do. vLLM makes steps only for requests, of which a prefill
    engine has none while decode ranks still take what it has computed; what other engines do is unknown.
    """
    engine = text(inner(status, "integration"), "engine")
    return engine == "sglang" or (engine == "vllm" and text(status, "role") == "decode")


def last_call(status: Row) -> str:
    """Describes the engine's latest call, as a predicate: `last called poll 12 s ago`; "" if it is unknown."""
    call_ns, call = age_ns(status, "engine_call_age_ns"), text(status, "engine_call")
    if call_ns is None or not call:
        return ""
    if status.get("engine_in_call") is True:
        return f"has been in {call} for {duration(call_ns)}"
    return f"last called {call} {duration(call_ns)} ago"


def engine_stack(status: Row) -> Sequence[str]:
    """Returns the frames of the engine's thread, the innermost last; () if they were not sampled."""
    return texts(status, "engine_stack")


def age_ns(row: Row, key: str) -> int | None:
    """Returns an age in nanoseconds, at least 0; None if the field is unknown."""
    value = number(row, key)
    return None if value is None else max(0, int(value))
