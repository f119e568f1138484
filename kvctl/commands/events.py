"""`kvctl events`: the flight recorders of all agents merged by time; with `-w` what happens from now on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import follow, run
from kvctl.commands.settings import Settings
from kvctl.render.events import EVENTS
from kvctl.render.report import Report
from kvctl.render.units import parse_seconds

_MOST = 1000
_EVERY = 65_536  # more than recorders keep unless told to, and still one answer
SEVERITIES = ("debug", "info", "warning", "error")


@click.command(
    cls=KvctlCommand,
    view=EVENTS,
    examples=[
        ("Warnings and errors of the last five minutes", "kvctl events --since 5m --severity warning"),
        ("New events as they happen", "kvctl events -w"),
        ("Events of one room", "kvctl events --filter 'room=7'"),
    ],
)
@click.option("--since", metavar="TIME", help="Only the last 5m, 30s, …")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=_MOST,
    show_default=True,
    help="Events per agent at most, the latest.",
)
@click.option("--severity", type=click.Choice(SEVERITIES), default="debug", help="Only events this severe or more.")
@pass_settings
def events(settings: Settings, since: str | None, limit: int, severity: str) -> None:
    """Events of all agents, merged by time; with -w also new events as they happen.

    An agent that restarts is followed. Events that a recorder dropped before they were read are counted on stderr.
    """
    back_ns = None if since is None else _span(since)
    wanted = SEVERITIES[SEVERITIES.index(severity) :]

    def keep(row: dict[str, Any]) -> bool:
        # A newer agent may know a severity that we do not.
        return row["severity"] in wanted or row["severity"] not in SEVERITIES

    if settings.watch_ns is not None:
        Output(settings).selection(EVENTS)
        follower = Follower(keep, back_ns, limit)
        follow(settings, follower.calls, follower)

    selection = Output(settings).selection(EVENTS)
    chosen = severity != SEVERITIES[0] or back_ns is not None or bool(settings.filters)

    def read(survey: Survey) -> Report:
        everything, notes = _events(survey, back_ns)
        wanted = [[row for row in events if keep(row)] for events in everything]
        passing = [[row for row in events if selection.passes(row)] for events in wanted]
        rows = [row for events in passing for row in events[-limit:]]
        # That no filter passes any is said by the output.
        rows = rows or [row for events in wanted for row in events]
        return Report(EVENTS, rows, len(everything), survey.faults, notes=notes)

    run(settings, EVENTS, (Call("events", {"limit": max(limit, _EVERY) if chosen else limit}),), read)


def _span(text: str) -> int:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error


def _events(survey: Survey, back_ns: int | None) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Events of each agent, oldest first."""
    earliest = 0 if back_ns is None else survey.at_ns - back_ns
    found, notes = [], []
    for agent, data in survey.answers("events"):
        found.append([event for event in data["events"] if event["at_ns"] >= earliest])
        if data["dropped"]:
            notes.append(f"{agent.name}: {data['dropped']} older events are no longer in its recorder")
    return found, notes


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
