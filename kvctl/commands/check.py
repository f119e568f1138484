"""`kvctl check`: prints one line for a monitoring system and exits with the state."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click

from kvctl.client.fleet import Survey
from kvctl.client.health_reads import DIAGNOSIS_CALLS
from kvctl.commands.health_query import earlier, health_watch
from kvctl.commands.options import KvctlCommand, KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.queries import no_agent, source
from kvctl.commands.settings import OUTPUTS, PROMETHEUS, Settings
from kvctl.errors import CliError
from kvctl.exit_codes import CheckState
from kvctl.health.check import (
    MEASURES,
    MEASURES_BY_NAME,
    Measure,
    Problem,
    Threshold,
    ThresholdError,
    Unit,
    Verdict,
    parse_thresholds,
    verdicts,
    worst,
)
from kvctl.health.finding import AREAS
from kvctl.render import palette
from kvctl.render.report import Report
from kvctl.render.sanitize import one_line
from kvctl.render.view import Column, Kind, View, Width

CHECK = View(
    "check",
    (
        Column("check", help="Area of the check."),
        Column("state", Kind.VERDICT, help="ok, warning, critical or unknown.", styles=palette.VERDICTS),
        Column("muted", Kind.COUNT, help="Muted findings, which do not affect the state."),
        Column("problems", Kind.LIST, help="Findings, exceeded thresholds and agents that do not answer."),
        Column("values", Kind.MAP, Width.WIDE, "Measured values of the area, in seconds, bytes, ratios and counts."),
    ),
)

_SUMMARY = ("agents", "ring", "active", "room-age")
_SUFFIX = {Unit.COUNT: "", Unit.SECONDS: "_seconds", Unit.RATIO: "_ratio", Unit.BYTES: "_bytes"}
_Result = TypeVar("_Result")
_NAGIOS = "nagios"
_FORMATS = (_NAGIOS, *OUTPUTS, PROMETHEUS)


def rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Returns one row of CHECK per area; values are in seconds, ratios, bytes and counts."""
    return [
        {
            "check": verdict.area,
            "state": verdict.state.label,
            "muted": len(verdict.muted),
            "problems": [problem.text for problem in verdict.problems],
            "values": dict(verdict.values),
        }
        for verdict in verdicts
    ]


def plugin(name: str, verdicts: Sequence[Verdict], thresholds: Mapping[str, Threshold]) -> str:
    """Formats the output of a monitoring plugin: one line with performance data, then the remaining problems.

    Args:
        name: name of the check, printed before the state unless it is "all".
        verdicts: verdict of each area.
        thresholds: thresholds by name of the measure.
    """
    state = worst(verdict.state for verdict in verdicts)
    problems = _each_once(verdicts)
    values = {name: value for verdict in verdicts for name, value in verdict.values.items()}
    first = problems[0].text if problems else _summary(values)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    title = "KVCTL" if name == "all" else f"KVCTL {name.upper()}"
    line = f"{title} {state.name} - {_plain(first)}{more}"
    performance = " ".join(_performance(MEASURES_BY_NAME[each], value, thresholds) for each, value in values.items())
    muted = Counter(finding.code for verdict in verdicts for finding in verdict.muted)
    long = [f"{problem.state.name}: {_plain(problem.text)}" for problem in problems[1:]]
    if muted:
        long.append(f"muted: {', '.join(f'{code} ({times})' for code, times in sorted(muted.items()))}")
    return "\n".join([f"{line} | {performance}", *long]) + "\n"


def unknown(text: str) -> str:
    """Returns the plugin output of a check that could not be carried out."""
    return f"KVCTL {CheckState.UNKNOWN.name} - {_plain(text)}\n"


def _each_once(verdicts: Sequence[Verdict]) -> list[Problem]:
    """Returns the distinct problems, worst first: an agent that does not answer is the same problem in every area."""
    found = dict.fromkeys(problem for verdict in verdicts for problem in verdict.problems)
    return sorted(found, key=lambda problem: -problem.state.gravity)


def _summary(values: Mapping[str, float | None]) -> str:
    shown = [name for name in _SUMMARY if name in values] if "agents" in values and len(values) > 3 else list(values)
    if values.get("draining") and "draining" not in shown:
        shown = [*shown, "draining"]
    known = [(MEASURES_BY_NAME[name], values[name]) for name in shown if values[name] is not None]
    return ", ".join(f"{measure.name.replace('-', ' ')} {measure.human(value)}" for measure, value in known) or "ok"


def _performance(measure: Measure, value: float | None, thresholds: Mapping[str, Threshold]) -> str:
    """Formats one measure as performance data of the plugin guidelines: `'ring'=24.4%;80;95;0;`, or U if unknown.

    There is no maximum, because ring use can exceed 100 % while regions are granted ahead.
    """
    threshold = thresholds.get(measure.name, Threshold())
    scale = 100 if measure.unit is Unit.RATIO else 1
    # A plugin's range contains the acceptable values: "4:" warns below 4.
    colon = ":" if measure.least else ""
    warn, crit = (
        "" if limit is None else f"{_number(limit * scale)}{colon}" for limit in (threshold.warn, threshold.crit)
    )
    now = "U" if value is None else f"{_number(value * scale)}{measure.unit.value}"
    return f"'{measure.name}'={now};{warn};{crit};0;"


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _plain(text: str) -> str:
    """Formats text as one printable line without `|`, which would start the performance data."""
    return one_line(text).replace("|", "/")


def exposition(verdicts: Sequence[Verdict]) -> str:
    """Formats the verdicts as Prometheus gauges, for node_exporter's textfile collector."""
    found: Counter[tuple[str, str]] = Counter()
    for problem in (problem for verdict in verdicts for problem in verdict.problems if problem.code):
        found[problem.code, problem.state.label] += problem.count
    lines = _gauge(
        "kvctl_check_state",
        "0 ok, 1 warning, 2 critical, 3 unknown.",
        [(f'check="{verdict.area}"', verdict.state.value) for verdict in verdicts],
    )
    lines += _gauge(
        "kvctl_check_muted",
        "Findings that are muted.",
        [(f'check="{each.area}"', len(each.muted)) for each in verdicts],
    )
    lines += _gauge(
        "kvctl_check_findings",
        "Findings by code.",
        [(f'code="{code}",severity="{state}"', times) for (code, state), times in sorted(found.items())],
    )
    for verdict in verdicts:
        for name, value in verdict.values.items():
            measure = MEASURES_BY_NAME[name]
            text = measure.help[0].upper() + measure.help[1:] + "."
            family = f"kvctl_check_{name.replace('-', '_')}{_SUFFIX[measure.unit]}"
            lines += _gauge(family, text, [] if value is None else [("", value)])
    return "".join(f"{line}\n" for line in lines)


def _gauge(name: str, text: str, samples: Sequence[tuple[str, float]]) -> list[str]:
    if not samples:
        return []
    shown = [f"{name}{{{labels}}} {value:g}" if labels else f"{name} {value:g}" for labels, value in samples]
    return [f"# HELP {name} {text}", f"# TYPE {name} gauge", *shown]


class _CheckGroup(KvctlGroup):
    """Group that turns every error into a line on stdout and exit status 3, since other statuses are check results."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return _guarded(lambda: super(_CheckGroup, self).make_context(*args, **kwargs))

    def invoke(self, ctx: click.Context) -> Any:
        return _guarded(lambda: super(_CheckGroup, self).invoke(ctx))


def _guarded(call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except (click.exceptions.Exit, click.Abort):
        raise
    except click.ClickException as error:
        _end_unknown(error.format_message())
    except CliError as error:
        _end_unknown(str(error))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        _end_unknown(f"kvctl failed: {type(error).__name__}: {error}")


def _end_unknown(text: str) -> NoReturn:
    click.echo(unknown(text), nl=False)
    raise click.exceptions.Exit(CheckState.UNKNOWN)


@click.group(cls=_CheckGroup, default="all")
def check() -> None:
    """For a monitoring system: one line, and exit status 0 OK, 1 WARNING, 2 CRITICAL or 3 UNKNOWN.

    The state results from the findings of the health codes and from your own thresholds. An agent that does not answer
    is CRITICAL, wrong usage UNKNOWN. Findings muted by kvctl health mute do not count, and are mentioned. Takes a
    second, because some problems show only in the growth of counters.
    """


def _declare(name: str, areas: Sequence[str], text: str) -> None:
    line = f"kvctl check {name}"
    examples = [
        ("One line and an exit status" if name == "all" else f"Only {name}", line),
        ("With a threshold", f"{line} --warn {_example(name)}"),
    ]

    @check.command(name, cls=KvctlCommand, view=CHECK, short_help=text, help=_help(name, text), examples=examples)
    @click.option("--warn", multiple=True, metavar="NAME=VALUE,…", help="Threshold for WARNING. Repeatable.")
    @click.option("--crit", multiple=True, metavar="NAME=VALUE,…", help="Threshold for CRITICAL. Repeatable.")
    @click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(_FORMATS),
        metavar="|".join(_FORMATS),
        help=f"Output format. [default: {_NAGIOS}, also on terminals]",
    )
    def command(settings: Settings, warn: tuple[str, ...], crit: tuple[str, ...], form: str | None) -> None:
        try:
            thresholds = parse_thresholds(warn, crit, areas)
        except ThresholdError as error:
            raise click.UsageError(str(error)) from error
        _run(name, areas, thresholds, settings, form)


def _help(name: str, text: str) -> str:
    areas = tuple(AREAS) if name == "all" else (name,)
    names = [
        f"  {each.name:<12} {each.help}{' (at least)' if each.least else ''}" for each in MEASURES if each.area in areas
    ]
    listed = "\n".join(names)
    return f"{text}\n\n\b\nThresholds for --warn and --crit, as in {_example(name)}:\n{listed}"


def _example(name: str) -> str:
    examples = {"ready": "agents=4", "peers": "silence=5s", "rooms": "room-age=30s", "transport": "fds=80%"}
    return examples.get(name, "ring=80%")


def _run(
    name: str, areas: Sequence[str], thresholds: Mapping[str, Threshold], settings: Settings, form: str | None
) -> NoReturn:
    """Checks once, or repeatedly with `-w`, and exits with the worst state of the last check."""
    chosen = form or click.get_current_context().ensure_object(dict).get("output") or _NAGIOS
    output = Output(replace(settings, output=chosen))
    query = health_watch(settings, earlier(settings))
    with source(settings) as fleet:
        while True:
            survey = fleet.survey(DIAGNOSIS_CALLS)
            reading = query(survey)
            found = verdicts(areas, reading.snapshot, reading.judged, thresholds, no_agent(settings, survey).message)
            if chosen == _NAGIOS:
                output.write(plugin(name, found, thresholds))
            else:
                output.emit(_report(survey, found), compact=settings.watch_ns is not None)
            for remark in (*survey.remarks, *reading.remarks):
                output.note(remark)
            if settings.watch_ns is None or not fleet.advance():
                raise click.exceptions.Exit(worst(verdict.state for verdict in found))
            time.sleep(settings.watch_ns / 1e9)


def _report(survey: Survey, found: Sequence[Verdict]) -> Report:
    return Report(CHECK, rows(found), len(survey.agents), survey.faults, prometheus=lambda _: exposition(found))


_declare("all", tuple(AREAS), "All areas.")
for _name, _text in AREAS.items():
    _declare(_name, (_name,), f"{_text[0].upper()}{_text[1:]}.")
