"""What `kvctl replay` asks of `python -m kvctl.lab.replay`, and the answer; JSON over stdin and stdout."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ReplayRequest(TypedDict):
    """`agents` are names; empty: all. `write_test` is where the test of the first breach goes; empty: nowhere."""

    path: str
    agents: list[str]
    shrink: bool
    shrink_s: float  # at most so long
    write_test: str


class Breach(TypedDict):
    """The first invariant that was broken."""

    invariant: str
    text: str
    number: int  # of the input
    at_ns: int  # wall clock
    room: str | None
    story: list[str]  # the last inputs that concern it, and what each led to


class Shrunk(TypedDict):
    """A shorter trace that breaks the same invariant."""

    inputs: int
    story: list[str]
    early: bool  # time was up before nothing more could be left out
    fresh: bool  # it begins with a new machine and needs no checkpoint


class AgentVerdict(TypedDict):
    """What came of one agent's inputs."""

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
    breach: Breach | None
    shrunk: Shrunk | None
    test: str  # path of the test that was written; empty


class ReplayError(TypedDict):
    """Why nothing was replayed: `unreadable`, `version`, `unknown-agent`, `unwritable`, `unavailable`."""

    code: str
    message: str


class ReplayReply(TypedDict):
    """`agents` or `error`."""

    agents: NotRequired[list[AgentVerdict]]
    error: NotRequired[ReplayError]
