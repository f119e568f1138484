"""Goes on with what happens next in all flight recorders: each event once, across restarts, and what was lost said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.output import Output
from kvctl.render.events import EVENTS

Keep = Callable[[dict[str, Any]], bool]
_Life = tuple[str, str]  # agent, incarnation


class Follower:
    """Remembers each agent's place in its recorder.

    All agents get the same request, so it starts at the least advanced place, and what was printed is left out. One
    that is behind the request, because it was restarted or silent, is asked from its own place the next time.

    Args:
        keep: whether an event is wanted.
        back_ns: how far back the first reading goes; None: as far as the recorders.
        limit: events per agent and reading.
    """

    def __init__(self, keep: Keep, back_ns: int | None, limit: int) -> None:
        self._keep = keep
        self._back_ns = back_ns
        self._limit = limit
        self._next: dict[_Life, int] = {}
        self._answered: set[_Life] = set()

    def calls(self) -> list[Call]:
        """What to ask all agents now."""
        since = min((self._next[life] for life in self._answered), default=None)
        return [Call("events", {"limit": self._limit, "since": since})]

    def __call__(self, output: Output, survey: Survey) -> None:
        """Prints what is new in the answers to `calls`."""
        (call,) = self.calls()
        asked: int | None = call.args.get("since")
        earliest = survey.at_ns - self._back_ns if asked is None and self._back_ns is not None else 0
        fresh: list[dict[str, Any]] = []
        answered: set[_Life] = set()
        for agent, data in survey.answers("events"):
            life = (agent.name, agent.hello["incarnation"])
            answered.add(life)
            if life not in self._next:
                self._welcome(output, life)
            place = self._next[life]
            if asked is not None and asked > place:
                continue
            lost = 0 if asked is None else asked + data["dropped"] - place
            if data["dropped"] and lost > 0:
                output.note(f"{agent.name}: {lost} events were lost between two readings: read more often, -w 0.5")
            fresh += [row for row in data["events"] if row["sequence"] >= place and row["at_ns"] >= earliest]
            self._next[life] = data["next"]
        self._answered = answered or self._answered
        output.stream(EVENTS, [row for row in fresh if self._keep(row)])

    def _welcome(self, output: Output, life: _Life) -> None:
        name, _ = life
        before = [other for other in self._next if other[0] == name]
        for other in before:
            del self._next[other]
            self._answered.discard(other)
        if before:
            output.note(f"{name}: started anew")
        self._next[life] = 0
