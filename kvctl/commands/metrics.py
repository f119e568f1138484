"""`kvctl metrics`: lists counters, gauges and histograms of the agents, also in the Prometheus text format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Report
from kvctl.render.sanitize import one_line, printable
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.metrics import METRICS as DECLARED

_INVALID_IN_NAMES = re.compile("[^a-zA-Z0-9_:]")


def _mean(row: Row) -> float | None:
    return row["sum"] / row["count"] if row.get("count") else None


METRICS = View(
    "metrics",
    (
        Column("agent"),
        Column("name"),
        Column("labels", Kind.MAP, help="Labels of the sample."),
        Column("value", Kind.NUMBER, help="Value of a counter or gauge."),
        Column("count", Kind.COUNT, Width.NORMAL, "Observations of a histogram."),
        Column("mean", Kind.NUMBER, Width.NORMAL, "Mean of a histogram's observations.", path=_mean),
        Column("unit", width=Width.NORMAL),
        Column("kind", width=Width.WIDE, help="counter, gauge or histogram."),
        Column("sum", Kind.NUMBER, Width.WIDE, "Sum of a histogram's observations."),
        Column("help", width=Width.WIDE),
    ),
    sort=("name", "agent"),
)

SCHEMA = View(
    "metrics_schema",
    (
        Column("name"),
        Column("kind", help="counter, gauge or histogram."),
        Column("unit", width=Width.NORMAL),
        Column("labels", Kind.LIST, Width.NORMAL, "Names of the labels."),
        Column("help", Kind.SENTENCE),
    ),
)


def sample_rows(agent: str, families: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per sample of one agent's metric families."""
    return [
        {
            "agent": agent,
            **{key: family[key] for key in ("name", "kind", "unit", "help")},
            "value": None,
            "count": None,
            "sum": None,
            **sample,
        }
        for family in families
        for sample in family["samples"]
    ]


def exposition(rows: Sequence[Row]) -> str:
    """Formats rows as Prometheus text format 0.0.4, with an `agent` label on every sample."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(_INVALID_IN_NAMES.sub("_", row["name"]), []).append(row)
    lines: list[str] = []
    for name, samples in sorted(families.items()):
        help_text = printable(samples[0]["help"].replace("\\", "\\\\").replace("\n", "\\n"))
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {one_line(samples[0]['kind'])}"]
        for row in samples:
            labels = {"agent": row["agent"], **row["labels"]}
            if row["kind"] == "histogram":
                lines += _histogram(name, labels, row)
            elif row["value"] is not None:
                lines.append(f"{name}{_labels(labels)} {_number(row['value'])}")
    return "".join(f"{line}\n" for line in lines)


def _histogram(name: str, labels: Mapping[str, str], row: Row) -> list[str]:
    lines = [
        f"{name}_bucket{_labels({**labels, 'le': '+Inf' if bound is None else _number(bound)})} {_number(total)}"
        for bound, total in row.get("buckets", ())
    ]
    return [
        *lines,
        f"{name}_sum{_labels(labels)} {_number(row['sum'])}",
        f"{name}_count{_labels(labels)} {row['count']}",
    ]


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (_INVALID_IN_NAMES.sub("_", key), str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for key, value in labels.items()
    )
    return "{" + ",".join(f'{key}="{printable(value)}"' for key, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))


@click.group(cls=KvctlGroup, default="show")
def metrics() -> None:
    """Counters, gauges and histograms of the agents; without a subcommand, like `kvctl metrics show`."""


@metrics.command(
    view=METRICS,
    short_help="List all samples; -o prom prints the Prometheus text format.",
    examples=[
        ("Samples of one metric", "kvctl metrics --filter 'name~rooms_finished'"),
        ("The Prometheus text format", "kvctl metrics -o prom"),
    ],
)
def show(settings: Settings) -> None:
    """List counters, gauges and histograms, one row per sample; -o prom prints the Prometheus text format."""
    run(settings, METRICS, (Call("metrics"),), _read)


@metrics.command(
    view=SCHEMA,
    short_help="List the metrics: kind, unit, labels, meaning.",
    examples=[("Names, units and meanings of all metrics", "kvctl metrics schema -o wide")],
)
def schema(settings: Settings) -> None:
    """List the metrics of an agent of this version, with kind, unit and labels; queries no agent."""
    rows = [
        {
            "name": metric.name,
            "kind": metric.kind,
            "unit": metric.unit,
            "labels": list(metric.labels),
            "help": metric.help,
        }
        for metric in DECLARED
    ]
    Output(settings).emit(Report(SCHEMA, rows, answered=0))


def _read(survey: Survey) -> Report:
    answers = survey.answers("metrics")
    rows = [row for agent, families in answers for row in sample_rows(agent.name, families)]
    return Report(METRICS, rows, len(answers), survey.faults, prometheus=exposition)
