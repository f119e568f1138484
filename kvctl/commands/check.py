"""`kvctl check`: the fleet for a monitoring system, which reads one line and an exit status."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click

from kvctl.client.fleet import Survey
from kvctl.commands.health_query import HealthQuery, earlier
from kvctl.commands.options import KvctlCommand, KvctlGroup, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import nobody, source
from kvctl.commands.settings import OUTPUTS, PROMETHEUS, Settings
from kvctl.errors import CliError
from kvctl.exit_codes import CheckState
from kvctl.health.areas import AREAS
from kvctl.health.measures import MEASURES
from kvctl.health.snapshot import HEALTH_CALLS
from kvctl.health.thresholds import Threshold, ThresholdError, parse
from kvctl.health.verdict import Verdict, verdicts, worst
from kvctl.render.check import CHECK, exposition, plugin, rows, unknown
from kvctl.render.report import Report

_Result = TypeVar("_Result")
_NAGIOS = "nagios"
_FORMATS = (_NAGIOS, *OUTPUTS, PROMETHEUS)


class _CheckGroup(KvctlGroup):
    """Whatever goes wrong, a monitoring system gets a line on stdout and status 3: any other number is a verdict."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return _guarded(lambda: super(_CheckGroup, self).make_context(*args, **kwargs))

    def invoke(self, ctx: click.Context) -> Any:
        return _guarded(lambda: super(_CheckGroup, self).invoke(ctx))


def _guarded(do: Callable[[], _Result]) -> _Result:
    try:
        return do()
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
    """The fleet for a monitoring system: one line, and exit status 0 OK, 1 WARNING, 2 CRITICAL or 3 UNKNOWN.

    \b
    Findings of the health codes and thresholds of your own decide. An agent that does not answer is CRITICAL, wrong
    usage UNKNOWN. What kvctl health mute has muted does not count, and is mentioned. Takes a second, because some
    things show only in how counters grow.
    """


def _declare(name: str, areas: Sequence[str], text: str) -> None:
    line = f"kvctl check {name}"
    examples = [
        ("One line and an exit status", line),
        ("With a limit of your own", f"{line} --warn {_example(name)}"),
    ]

    @check.command(name, cls=KvctlCommand, view=CHECK, short_help=text, help=_help(name, text), examples=examples)
    @click.option("--warn", multiple=True, metavar="NAME=VALUE,…", help="Where it becomes a WARNING. Repeatable.")
    @click.option("--crit", multiple=True, metavar="NAME=VALUE,…", help="Where it becomes CRITICAL. Repeatable.")
    @click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(_FORMATS),
        metavar="|".join(_FORMATS),
        help=f"Output format. [default: {_NAGIOS}, on terminals, too]",
    )
    @pass_settings
    def command(settings: Settings, warn: tuple[str, ...], crit: tuple[str, ...], form: str | None) -> None:
        try:
            thresholds = parse(warn, crit, areas)
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
    """Looks once, or with `-w` again and again, and ends with the state as exit status."""
    chosen = form or click.get_current_context().ensure_object(dict).get("output") or _NAGIOS
    output = Output(replace(settings, output=chosen))
    looking = HealthQuery(settings, earlier(settings))
    with source(settings) as fleet:
        while True:
            survey = fleet.survey(HEALTH_CALLS)
            look = looking(survey)
            found = verdicts(areas, look.snapshot, look.judged, thresholds, nobody(settings, survey).message)
            if chosen == _NAGIOS:
                output.write(plugin(name, found, thresholds))
            else:
                output.emit(_report(survey, found), compact=settings.watch_ns is not None)
            for remark in (*survey.remarks, *look.remarks):
                output.note(remark)
            if settings.watch_ns is None or not fleet.advance():
                raise click.exceptions.Exit(worst(verdict.state for verdict in found))
            time.sleep(settings.watch_ns / 1e9)


def _report(survey: Survey, found: Sequence[Verdict]) -> Report:
    return Report(CHECK, rows(found), len(survey.agents), survey.faults, prometheus=lambda _: exposition(found))


_declare("all", tuple(AREAS), "Everything below.")
for _name, _text in AREAS.items():
    _declare(_name, (_name,), f"{_text[0].upper()}{_text[1:]}.")
