"""`kvctl check`: prints one line for a monitoring system and exits with the state."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click

from kvctl.client.fleet import Survey
from kvctl.client.health_reads import DIAGNOSIS_CALLS
from kvctl.commands.health_query import earlier, ignore_option
from kvctl.commands.options import KvctlCommand, KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.queries import no_agent, source
from kvctl.commands.settings import OUTPUTS, PROMETHEUS, Settings
from kvctl.errors import CliError
from kvctl.exit_codes import CheckState
from kvctl.health.check import Problem, Verdict, verdicts, worst
from kvctl.health.engine import HealthWatch, Ignored
from kvctl.health.finding import AREAS, counted
from kvctl.render import palette
from kvctl.render.report import Report
from kvctl.render.sanitize import one_line
from kvctl.render.view import Column, Kind, View

CHECK = View(
    "check",
    (
        Column("check", help="Area of the check."),
        Column("state", Kind.VERDICT, help="ok, warning, critical or unknown.", styles=palette.VERDICTS),
        Column("problems", Kind.LIST, help="Findings, and agents that do not answer."),
    ),
)

_Result = TypeVar("_Result")
_NAGIOS = "nagios"
_FORMATS = (_NAGIOS, *OUTPUTS, PROMETHEUS)


def rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Returns one row of CHECK per area."""
    return [
        {
            "check": verdict.area,
            "state": verdict.state.label,
            "problems": [problem.text for problem in verdict.problems],
        }
        for verdict in verdicts
    ]


def plugin(name: str, verdicts: Sequence[Verdict], agents: int) -> str:
    """Formats the output of a monitoring plugin: one line with performance data, then the remaining problems.

    Args:
        name: name of the check, printed before the state unless it is "all".
    """
    state = worst(verdict.state for verdict in verdicts)
    problems = _each_once(verdicts)
    first = problems[0].text if problems else counted(agents, "agent")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    title = "KVCTL" if name == "all" else f"KVCTL {name.upper()}"
    line = f"{title} {state.name} - {_plain(first)}{more}"
    states = Counter(problem.state for problem in problems)
    values = {"agents": agents, "warnings": states[CheckState.WARNING], "criticals": states[CheckState.CRITICAL]}
    performance = " ".join(f"'{label}'={value};;;0;" for label, value in values.items())
    ignored = Counter(finding.code for verdict in verdicts for finding in verdict.ignored)
    long = [f"{problem.state.name}: {_plain(problem.text)}" for problem in problems[1:]]
    if ignored:
        long.append(f"ignored: {', '.join(f'{code} ({times})' for code, times in sorted(ignored.items()))}")
    return "\n".join([f"{line} | {performance}", *long]) + "\n"


def unknown(text: str) -> str:
    """Returns the plugin output of a check that could not be carried out."""
    return f"KVCTL {CheckState.UNKNOWN.name} - {_plain(text)}\n"


def _each_once(verdicts: Sequence[Verdict]) -> list[Problem]:
    """Returns the distinct problems, worst first: an agent that does not answer is the same problem in every area."""
    found = dict.fromkeys(problem for verdict in verdicts for problem in verdict.problems)
    return sorted(found, key=lambda problem: -problem.state.gravity)


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
        "kvctl_check_findings",
        "Findings by code.",
        [(f'code="{code}",severity="{state}"', times) for (code, state), times in sorted(found.items())],
    )
    return "".join(f"{line}\n" for line in lines)


def _gauge(name: str, text: str, samples: Sequence[tuple[str, float]]) -> list[str]:
    if not samples:
        return []
    shown = [f"{name}{{{labels}}} {value:g}" for labels, value in samples]
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

    The state results from the findings of the health codes. An agent that does not answer is CRITICAL, wrong usage
    UNKNOWN. Ignored findings do not count, and are mentioned. Takes a second, because some problems show only in the
    growth of counters. For thresholds of your own, use the agents' metrics with Prometheus.
    """


def _declare(name: str, areas: Sequence[str], text: str) -> None:
    line = f"kvctl check {name}"
    examples = [
        ("One line and an exit status" if name == "all" else f"Only {name}", line),
        ("If at least four agents must answer", f"{line} --agents 4"),
    ]

    @check.command(name, cls=KvctlCommand, view=CHECK, short_help=text, help=text, examples=examples)
    @click.option(
        "--agents",
        "least",
        type=click.IntRange(1),
        default=1,
        metavar="N",
        help="CRITICAL if fewer than N agents answer.",
    )
    @ignore_option
    @click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(_FORMATS),
        metavar="|".join(_FORMATS),
        help=f"Output format. [default: {_NAGIOS}, also on terminals]",
    )
    def command(settings: Settings, least: int, ignored: Sequence[Ignored], form: str | None) -> None:
        query = HealthWatch(earlier(settings), ignored)

        def examine(survey: Survey) -> list[Verdict]:
            return verdicts(areas, query(survey), no_agent(settings, survey).message, least)

        _run(name, examine, settings, form)


_Examine = Callable[[Survey], Sequence[Verdict]]


def _run(name: str, examine: _Examine, settings: Settings, form: str | None) -> NoReturn:
    """Checks once, or repeatedly with `-w`, and exits with the worst state of the last check."""
    chosen = form or click.get_current_context().ensure_object(dict).get("output") or _NAGIOS
    output = Output(replace(settings, output=chosen))
    with source(settings) as fleet:
        while True:
            survey = fleet.survey(DIAGNOSIS_CALLS)
            found = examine(survey)
            if chosen == _NAGIOS:
                output.write(plugin(name, found, len(survey.agents)))
            else:
                output.emit(_report(survey, found), compact=settings.watch_ns is not None)
            for remark in survey.remarks:
                output.note(remark)
            if settings.watch_ns is None or not fleet.advance():
                raise click.exceptions.Exit(worst(verdict.state for verdict in found))
            time.sleep(settings.watch_ns / 1e9)


def _report(survey: Survey, found: Sequence[Verdict]) -> Report:
    return Report(CHECK, rows(found), len(survey.agents), survey.faults, prometheus=lambda _: exposition(found))


_declare("all", tuple(AREAS), "All areas.")
for _name, _text in AREAS.items():
    _declare(_name, (_name,), f"{_text[0].upper()}{_text[1:]}.")
