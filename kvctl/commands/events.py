"""`kvctl events`: the flight recorders of all agents merged by time; with `-w` what happens from now on."""

from __future__ import annotations

from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.reading import follow, run
from kvctl.commands.settings import Settings
from kvctl.views.events import EVENTS
from kvctl.views.report import Report
from kvctl.views.units import parse_seconds

_MOST = 1000


@click.command(cls=KvctlCommand, view=EVENTS)
@click.option("--since", metavar="TIME", help="Only the last 5m, 30s, …")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=_MOST, show_default=True, help="Events per agent at most."
)
@pass_settings
def events(settings: Settings, since: str | None, limit: int) -> None:
    """The flight recorders of all agents, merged by time; -w goes on with what happens next."""
    back_ns = None if since is None else _span(since)
    if settings.watch_ns is not None:
        Output(settings).selection(EVENTS)
        follower = _Follower(back_ns, limit)
        follow(settings, follower.calls, follower)

    def read(survey: Survey) -> Report:
        rows, notes = _rows(survey, back_ns)
        return Report(EVENTS, rows, len(survey.answers("events")), survey.faults, notes=notes)

    run(settings, EVENTS, (Call("events", {"limit": limit}),), read)


def _span(text: str) -> int:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error


def _rows(survey: Survey, back_ns: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    earliest = 0 if back_ns is None else survey.at_ns - back_ns
    rows, notes = [], []
    for agent, data in survey.answers("events"):
        rows += [event for event in data["events"] if event["at_ns"] >= earliest]
        if data["dropped"]:
            notes.append(f"{agent.name}: {data['dropped']} older events are no longer in its recorder")
    return rows, notes


class _Follower:
    """Remembers each agent's place in its recorder.

    All agents get the same request, so it starts at the least advanced place, and what was printed is left out.
    """

    def __init__(self, back_ns: int | None, limit: int) -> None:
        self._back_ns = back_ns
        self._limit = limit
        self._next: dict[tuple[str, str], int] = {}
        self._first = True

    def calls(self) -> list[Call]:
        return [Call("events", {"limit": self._limit, "since": min(self._next.values(), default=None)})]

    def __call__(self, output: Output, survey: Survey) -> None:
        rows, _ = _rows(survey, self._back_ns if self._first else None)
        places: dict[tuple[str, str], int] = {}
        fresh: list[dict[str, Any]] = []
        for agent, data in survey.answers("events"):
            key = (agent.name, agent.hello["incarnation"])
            seen = self._next.get(key, 0)
            fresh += [row for row in rows if row["agent"] == agent.name and row["sequence"] >= seen]
            places[key] = data["next"]
        self._next = places
        self._first = False
        output.stream(EVENTS, fresh, survey.at_ns)
