"""`kvctl status`: what the whole fleet does, on one screen or as one line per moment."""

from __future__ import annotations

import time
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.reading import follow, run
from kvctl.commands.settings import Settings
from kvctl.views.fleet import FleetSummary, Rates, rates, summarise
from kvctl.views.report import Report
from kvctl.views.status import MOMENTS, STATUS, moment, screen

_CALLS = (Call("status"),)


@click.command(cls=KvctlCommand)
@pass_settings
def status(settings: Settings) -> None:
    """One screen: health, ranks by role, rooms by state, ring use, GB/s (wall clock), latency p50/p99.

    With -w one line per reading, as vmstat does; rates are differences between two readings, so the first line has
    none.
    """
    if settings.watch_ns is None:
        run(settings, STATUS, _CALLS, _read)
    Output(settings).selection(MOMENTS)
    follow(settings, lambda: _CALLS, _Line())


def _read(survey: Survey) -> Report:
    rows: list[dict[str, Any]] = [data for _, data in survey.answers("status")]
    silent = len(survey.faults)
    return Report(STATUS, rows, len(rows), survey.faults, blocks=lambda kept, width: screen(kept, silent))


class _Line:
    """Remembers the reading before, to tell what happened since."""

    def __init__(self) -> None:
        self._before: tuple[FleetSummary, int] | None = None

    def __call__(self, output: Output, survey: Survey) -> None:
        now_ns, tick_ns = time.time_ns(), time.monotonic_ns()
        summary = summarise(data for _, data in survey.answers("status"))
        change = Rates() if self._before is None else rates(self._before[0], summary, tick_ns - self._before[1])
        self._before = (summary, tick_ns)
        output.stream(MOMENTS, [moment(summary, change, now_ns)])
