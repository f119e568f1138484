"""`kvctl status`: prints health, rooms, rings, rate and latency on one screen, or as one line per interval."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.commands.health_query import agent_rows
from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.queries import follow, run
from kvctl.commands.settings import Settings
from kvctl.health.engine import HealthWatch
from kvctl.health.finding import Severity
from kvctl.render.findings import in_short
from kvctl.render.groups import FOLD_ABOVE, By, table
from kvctl.render.report import Grid, Report
from kvctl.render.status import STATUS, STATUS_LINES, FleetSummary, Rates, rates, screen, status_line, summarise
from kvctl.render.view import Row

_STATUS_ONLY = (Call("status"),)
_AGENT = "agent"
_HEALTH_EVERY_NS = 5_000_000_000


@command(
    view=STATUS,
    examples=[
        ("The fleet on one screen", "kvctl status"),
        ("One line per second, like vmstat", "kvctl status -w 1"),
        ("One line per host, the odd ones first", "kvctl status --by host"),
        ("Decode ranks only, for a script", "kvctl status -l role=decode -o json"),
        ("A recorded fleet", "kvctl status --from fleet.kvrec"),
    ],
)
@click.option(
    "--by",
    type=click.Choice([*(by.value for by in By), _AGENT]),
    help="Rows of the table: hosts, instances or roles, the odd ones first and with their odd agents; or agents. "
    f"[default: agent up to {FOLD_ABOVE} agents; above, the odd instances, and the others folded]",
)
def status(settings: Settings, by: str | None) -> None:
    """Show health, ranks by role, rooms by state, ring use, GB/s while rooms are open, and latency p50/p99.

    With many agents, the table lists the instances and hosts that are odd, with those of their agents that are odd, and
    folds all others. Odd is what does not answer, drains, waits, has findings, has another version or other settings
    than most ranks of its role, or transfers at less than a third of their median rate. TSV, CSV, JSON and YAML contain
    every agent.

    Health is determined from one reading; kvctl health and kvctl doctor compare two readings, a second apart, and find
    more. With -w, prints one line per reading, like vmstat; rates are computed from two readings, so the first line has
    none.
    """
    if settings.watch_ns is None:
        health = HealthWatch()
        run(settings, STATUS, HEALTH_CALLS, lambda survey: _read(survey, health, by))
    Output(settings).selection(STATUS_LINES)
    stream = _Stream(settings)
    follow(settings, stream.calls, stream)


def _read(survey: Survey, health: HealthWatch, by: str | None) -> Report:
    look = health(survey)
    found = agent_rows(survey, look)
    return Report(
        STATUS,
        found.rows,
        found.answered,
        found.faults,
        blocks=lambda kept, width: screen(
            kept, len(found.faults), in_short(look.findings, not survey.faults), _table(kept, by)
        ),
        notes=found.notes,
    )


def _table(rows: Sequence[Row], by: str | None) -> Grid | None:
    """Returns the table of groups; None to list all agents."""
    if by == _AGENT or (by is None and len(rows) <= FOLD_ABOVE):
        return None
    return table(rows, None if by is None else By(by))


class _Stream:
    """Prints one line per reading, with the rates since the previous one.

    Health needs several answers of each agent and changes slowly. It is therefore read at most every five seconds, so
    that `-w 0.1` costs a fleet next to nothing. With `--from`, it is read every time.
    """

    def __init__(self, settings: Settings) -> None:
        self._health = HealthWatch()
        self._previous: tuple[FleetSummary, int] | None = None
        self._health_every_ns = 0 if settings.from_file else _HEALTH_EVERY_NS
        self._health_read_ns: int | None = None
        self._reads_health = True
        self._problems: int | None = 0

    def calls(self) -> tuple[Call, ...]:
        """Returns the queries of the next reading."""
        now = time.monotonic_ns()
        self._reads_health = self._health_read_ns is None or now - self._health_read_ns >= self._health_every_ns
        if self._reads_health:
            self._health_read_ns = now
        return HEALTH_CALLS if self._reads_health else _STATUS_ONLY

    def __call__(self, output: Output, survey: Survey) -> None:
        summary = summarise(data for _, data in survey.answers("status"))
        change = Rates()
        if self._previous is not None:
            before, at_ns = self._previous
            change = rates(before, summary, survey.tick_ns - at_ns)
        self._previous = (summary, survey.tick_ns)
        if self._reads_health:
            found = sum(each.severity > Severity.INFO for each in self._health(survey).findings)
            self._problems = None if survey.faults and not found else found
        output.stream(STATUS_LINES, [status_line(summary, change, survey.at_ns, self._problems)])
