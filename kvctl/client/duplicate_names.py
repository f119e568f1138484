"""Tells agents of one name apart: two hosts may each have a `decode-0`, and one command may ask both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvctl.client.fleet import AgentAnswer

_DIGITS = 6
"""Of the incarnation, the last ones: the first are the time of the start, which twins nearly share."""


def tell_apart(agents: Sequence[AgentAnswer]) -> None:
    """Renames agents whose name another one has, too, to `decode-0#487f51`, by the end of the incarnation.

    Rows of their own answers follow, and what the peers of all agents are called where the incarnation says which.
    """
    names = Counter(agent.name for agent in agents)
    renamed: dict[tuple[str, str], str] = {}
    for agent in agents:
        name, incarnation = agent.name, agent.hello["incarnation"]
        if names[name] > 1:
            new = renamed[name, incarnation] = f"{name}#{incarnation[-_DIGITS:]}"
            agent.hello = {**agent.hello, "name": new}
            for row in _rows(agent.data.values()):
                for key in ("agent", "name"):
                    if row.get(key) == name:
                        row[key] = new
    for agent in agents if renamed else ():
        for row in _rows([agent.data.get("peers")]):
            if renaming := renamed.get((str(row.get("peer")), str(row.get("incarnation")))):
                row["peer"] = renaming


def _rows(answers: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The answers that are objects, and the objects in their lists."""
    for answer in answers:
        if isinstance(answer, dict):
            yield answer
        for value in answer.values() if isinstance(answer, dict) else [answer]:
            if isinstance(value, list):
                yield from (row for row in value if isinstance(row, dict))
