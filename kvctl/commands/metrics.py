"""`kvctl metrics`: the counters, gauges and histograms of all agents."""

from __future__ import annotations

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.reading import run
from kvctl.commands.settings import Settings
from kvctl.views.metrics import METRICS, exposition, sample_rows
from kvctl.views.report import Report


@click.command(cls=KvctlCommand, view=METRICS)
@pass_settings
def metrics(settings: Settings) -> None:
    """Counters, gauges and histograms, one row per sample; -o prom prints the Prometheus text format."""
    run(settings, METRICS, (Call("metrics"),), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("metrics")
    rows = [row for agent, families in answers for row in sample_rows(agent.name, families)]
    return Report(METRICS, rows, len(answers), survey.faults, prometheus=exposition)
