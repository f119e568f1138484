"""`kvctl status`: what the whole fleet does, on one screen or as one line per moment."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.health_query import HealthQuery
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import follow, run
from kvctl.commands.settings import Settings
from kvctl.health.finding import Finding, Severity
from kvctl.health.snapshot import HEALTH_CALLS
from kvctl.render.findings import in_short
from kvctl.render.report import Report
from kvctl.render.status import MOMENTS, STATUS, FleetSummary, Rates, moment, rates, screen, summarise

_BRIEFLY = (Call("status"),)
_HEALTH_EVERY_NS = 2_000_000_000


@click.command(
    cls=KvctlCommand,
    view=STATUS,
    examples=[
        ("The fleet on one screen", "kvctl status"),
        ("One line per second, as vmstat prints", "kvctl status -w 1"),
        ("Decode ranks only, for a script", "kvctl status -l role=decode -o json"),
        ("A recorded fleet", "kvctl status --from fleet.kvrec"),
    ],
)
@pass_settings
def status(settings: Settings) -> None:
    """One screen: health, ranks by role, rooms by state, ring use, GB/s while rooms are open, latency p50/p99.

    Health comes from one reading; kvctl health and kvctl doctor compare two, a second apart, and so see more. With -w
    one line per reading, as vmstat does; rates are differences between two readings, so the first line has none.
    """
    if settings.watch_ns is None:
        run(settings, STATUS, HEALTH_CALLS, _Screen(settings))
    Output(settings).selection(MOMENTS)
    line = _Line(settings)
    follow(settings, line.calls, line)


class _Screen:
    """Reads one survey."""

    def __init__(self, settings: Settings) -> None:
        self._looking = HealthQuery(settings)

    def __call__(self, survey: Survey) -> Report:
        look = self._looking(survey)
        raised, quiet = look.judged.raised, len(look.judged.muted)
        rows: list[dict[str, Any]] = [
            {**data, "health": _codes_of(agent.name, raised)} for agent, data in survey.answers("status")
        ]
        answered = {agent.name for agent, _ in survey.answers("status")}
        # An agent that refuses what only health reads has answered all the same.
        faults = [fault for fault in survey.faults if fault.agent not in answered]
        notes = [
            f"{fault.agent}: health is not told in full: {fault.message}"
            for fault in survey.faults
            if fault.agent in answered
        ]
        silent = [{"name": fault.agent, "health": [fault.code]} for fault in faults if fault.agent]
        return Report(
            STATUS,
            [*rows, *silent],
            len(rows),
            faults,
            blocks=lambda kept, width: screen(kept, len(faults), in_short(raised, quiet)),
            notes=[*notes, *look.remarks],
        )


def _codes_of(agent: str, findings: Iterable[Finding]) -> list[str]:
    """Codes of what names the agent, each once, the worst first."""
    return list(dict.fromkeys(each.code for each in findings if agent in each.agents and each.severity > Severity.INFO))


class _Line:
    """Remembers the reading before, to tell what happened since.

    Health takes several answers of each agent and changes slowly: it is looked at every two seconds, however often the
    rest is read, so that `-w 0.1` costs a fleet next to nothing. A file is another matter.
    """

    def __init__(self, settings: Settings) -> None:
        self._looking = HealthQuery(settings)
        self._before: tuple[FleetSummary, int] | None = None
        self._every_ns = 0 if settings.from_file else _HEALTH_EVERY_NS
        self._looked_ns: int | None = None
        self._looks = True
        self._ill = 0

    def calls(self) -> tuple[Call, ...]:
        """What the next reading asks."""
        now = time.monotonic_ns()
        self._looks = self._looked_ns is None or now - self._looked_ns >= self._every_ns
        if self._looks:
            self._looked_ns = now
        return HEALTH_CALLS if self._looks else _BRIEFLY

    def __call__(self, output: Output, survey: Survey) -> None:
        summary = summarise(data for _, data in survey.answers("status"))
        change = Rates() if self._before is None else rates(self._before[0], summary, survey.tick_ns - self._before[1])
        self._before = (summary, survey.tick_ns)
        if self._looks:
            self._ill = sum(each.severity > Severity.INFO for each in self._looking(survey).judged.raised)
        output.stream(MOMENTS, [moment(summary, change, survey.at_ns, self._ill)])
