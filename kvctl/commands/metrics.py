"""`kvctl metrics`: the counters, gauges and histograms of all agents."""

from __future__ import annotations

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.metrics import METRICS, SCHEMA, exposition, sample_rows
from kvctl.render.report import Report
from kvctl_agent.contract.metrics import METRICS as DECLARED


@click.group(cls=KvctlGroup, default="show")
def metrics() -> None:
    """Counters, gauges and histograms of the agents; `kvctl metrics` alone shows them."""


@metrics.command(
    view=METRICS,
    short_help="Every sample; -o prom prints the Prometheus text format.",
    examples=[
        ("Samples of one metric", "kvctl metrics --filter 'name~rooms_finished'"),
        ("The Prometheus text format", "kvctl metrics -o prom"),
    ],
)
@pass_settings
def show(settings: Settings) -> None:
    """Counters, gauges and histograms, one row per sample; -o prom prints the Prometheus text format."""
    run(settings, METRICS, (Call("metrics"),), _read)


@metrics.command(
    view=SCHEMA,
    short_help="Every metric: kind, unit, labels, meaning.",
    examples=[("Names, units and meaning of all metrics", "kvctl metrics schema -o wide")],
)
@pass_settings
def schema(settings: Settings) -> None:
    """Every metric that an agent of this version has, with its kind, unit and labels; asks no agent."""
    rows = [
        {"name": one.name, "kind": one.kind, "unit": one.unit, "labels": list(one.labels), "help": one.help}
        for one in DECLARED
    ]
    Output(settings).emit(Report(SCHEMA, rows, answered=0))


def _read(survey: Survey) -> Report:
    answers = survey.answers("metrics")
    rows = [row for agent, families in answers for row in sample_rows(agent.name, families)]
    return Report(METRICS, rows, len(answers), survey.faults, prometheus=exposition)
