"""What the screen asks, and what comes back: the seam between the feed, which waits for agents, and all the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.health.mutes import Judged


@dataclass(frozen=True, slots=True)
class Question:
    """What a view wants to know: `subject` tells two questions of one view apart, as of two rooms."""

    view: str
    calls: tuple[Call, ...]
    clock_rounds: int = 1
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a recording a reading was taken; `index` counts from 0."""

    index: int
    count: int
    playing: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of the fleet to one question.

    Attributes:
        at_ns: wall clock; of a recording, the moment that was recorded.
        survey: None where nobody could be asked at all: `problem` says why.
        judged: what the health codes found, where the survey is that of the health calls; else None.
    """

    question: Question
    at_ns: int
    survey: Survey | None
    problem: str = ""
    judged: Judged | None = None
    place: Place | None = None


Deliver = Callable[[Reading], None]


class Feed(Protocol):
    """Where readings come from; after each it waits for `taken`."""

    @property
    def recorded(self) -> bool:
        """Readings come from a file, not from agents that live."""
        ...

    def start(self, deliver: Deliver) -> None: ...

    def want(self, question: Question) -> None:
        """Another view is on screen: its question is asked at once, even while paused."""
        ...

    def taken(self) -> None: ...

    def pause(self, paused: bool) -> None: ...

    def seek(self, step: int) -> None:
        """Turns a recording by so many moments, and holds it there."""
        ...

    def act(self, orders: Sequence[tuple[str, Call]], done: Callable[[str], None]) -> None:
        """Asks agents, by name, to do something; `done` hears what came of it, on any thread."""
        ...

    def stop(self) -> None: ...
