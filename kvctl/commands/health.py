"""`kvctl health`: lists findings and health codes, and manages mutes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvctl.client.fleet import Survey
from kvctl.client.health_reads import DIAGNOSIS_CALLS
from kvctl.commands.health_query import earlier, health_watch
from kvctl.commands.options import KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.queries import run, source
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.health import mutes as mute_store
from kvctl.health.codes import CODES, CODES_BY_NAME
from kvctl.health.engine import HealthReading, examine
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.mutes import Baseline, Mute
from kvctl.health.snapshot import Snapshot
from kvctl.render import palette
from kvctl.render.findings import HEALTH, folded, labelled, overview, paragraphs, row
from kvctl.render.report import Block, Report, Text
from kvctl.render.units import duration, parse_duration
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.values import near

_PREFIX = "KV_"

CODES_VIEW = View(
    "health_codes",
    (
        Column("code"),
        Column("severity", Kind.VERDICT, help="Highest severity of the code.", styles=palette.VERDICTS),
        Column("area", width=Width.NORMAL, help="Area of kvctl check that includes the code."),
        Column("sees", Kind.SENTENCE, help="Symptoms."),
        Column("means", Kind.SENTENCE, Width.WIDE, "Meaning of the code."),
        Column("remedy", Kind.SENTENCE, Width.WIDE),
        Column("alert", width=Width.WIDE, help="Equivalent Prometheus expression, if the metrics suffice."),
    ),
)

MUTES = View(
    "health_mutes",
    (
        Column("target", help="Muted code, or code and subject.", header="MUTED"),
        Column("left", Kind.DURATION, help="Remaining time of the mute."),
        Column(
            "until_worse",
            help="Findings when the mute was created; worse findings end the mute.",
            header="UNTIL WORSE THAN",
        ),
        Column("reason", Kind.SENTENCE, help="Reason for the mute."),
        Column("made_at", Kind.SECOND, Width.WIDE, "Time at which the mute was created."),
    ),
    sort=("left",),
    empty="nothing is muted",
)


def code_row(code: Code) -> dict[str, Any]:
    """Returns the row of CODES_VIEW for one health code."""
    return {
        "code": code.name,
        "severity": code.severity.label,
        "area": code.area,
        "sees": code.sees,
        "means": code.means,
        "remedy": code.remedy,
        "alert": code.alert,
    }


def page(rows: Sequence[Row], width: int) -> list[Block]:
    """Formats the full description of each health code for a terminal; a `Report`'s `blocks`."""
    return [
        Text(
            [
                [
                    (row["code"], "bold"),
                    (
                        f"  {palette.VERDICT_GLYPHS[row['severity']]} {row['severity']}",
                        palette.VERDICTS[row["severity"]],
                    ),
                    (f"  kvctl check {row['area']}", "dim"),
                ],
                *(
                    line
                    for label in ("sees", "means", "remedy", "alert")
                    for line in labelled(label, row[label] or "", width)
                ),
            ]
        )
        for row in rows
    ]


def mute_row(mute: Mute, now_ns: int) -> dict[str, Any]:
    """Returns the row of MUTES for one mute."""
    worst = mute.baseline
    return {
        "target": mute.target,
        "code": mute.code,
        "subject": mute.subject,
        "left_ns": mute.until_ns - now_ns,
        "until_ns": mute.until_ns,
        "made_at_ns": mute.made_at_ns,
        "until_worse": f"{worst.count} {worst.severity.label}, weight {worst.weight:.3g}" if worst else None,
        "reason": mute.reason or None,
    }


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    return [CompletionItem(each.name, help=each.sees) for each in CODES if each.name.startswith(incomplete.upper())]


@click.group(cls=KvctlGroup, default="show")
def health() -> None:
    """Findings about the fleet, worst first; `kvctl health` alone shows one line per finding."""


@health.command(
    view=HEALTH,
    short_help="One line per finding, the worst first.",
    examples=[
        ("Findings, the worst first", "kvctl health"),
        ("Stop a script if there is a problem", "kvctl health -q || exit 1"),
        ("Critical findings only, every 10 s", "kvctl health --filter 'severity=critical' -w 10"),
    ],
)
@click.option("--muted", is_flag=True, help="Include muted findings.")
def show(settings: Settings, muted: bool) -> None:
    """One line per finding, the worst first, and the number of muted findings.

    Reads the fleet twice, a second apart, because some problems show only in the growth of counters; with -w each
    reading is compared with the one before.

    Exit codes as for kvctl doctor: 0 no problem, 1 a warning, a critical finding or an agent that does not answer, 3 no
    agent. Findings of severity info and muted ones do not count; --filter changes only the output. For monitoring, use
    kvctl check.
    """
    query = health_watch(settings, earlier(settings))

    def read(survey: Survey) -> Report:
        reading = query(survey)
        rows = [*(row(each) for each in reading.judged.raised), *(_muted_rows(reading) if muted else ())]
        agents, muted_count = len(reading.snapshot.answered), len(reading.judged.muted)
        silent = len({fault.agent for fault in survey.faults})
        report = Report(
            HEALTH,
            rows,
            agents,
            survey.faults,
            blocks=lambda kept, width: (
                overview(kept, agents, silent, len(CODES), muted_count, survey.hosts) if agents else []
            ),
            wrong=_is_wrong(reading.judged.raised, survey),
        )
        if muted_count and not muted and settings.output not in {"table", "wide"}:
            report.notes.append(f"{muted_count} muted (kvctl health mutes)")
        report.notes.extend(reading.remarks)
        return report

    run(settings, HEALTH, DIAGNOSIS_CALLS, read)


@health.command(
    view=HEALTH,
    short_help="Each finding in full: evidence, cause, remedy.",
    examples=[
        ("Every finding in full", "kvctl health detail"),
        ("Findings of one code", "kvctl health detail KV_PEER_LOST"),
    ],
)
@click.argument("code", required=False, shell_complete=_names)
def detail(settings: Settings, code: str | None) -> None:
    """Each finding in full: evidence, likely cause and remedy; with CODE only those of that code.

    Muted findings are included and marked. Exit codes as for kvctl health; with CODE only those findings count.
    """
    only = None if code is None else _code(code).name
    query = health_watch(settings, earlier(settings))

    def read(survey: Survey) -> Report:
        reading = query(survey)
        rows = [*(row(each) for each in reading.judged.raised), *_muted_rows(reading)]
        rows = [each for each in rows if only in {None, each["code"]}]
        report = Report(
            HEALTH,
            rows,
            len(reading.snapshot.answered),
            survey.faults,
            blocks=lambda kept, width: paragraphs(folded(kept, survey.hosts), width),
            wrong=_is_wrong([each for each in reading.judged.raised if only in {None, each.code}], survey),
        )
        if report.answered and not rows:
            text = f"{only} is not raised" if only else "healthy: no findings"
            report.notes.append(f"incomplete: {'no findings' if only is None else text}" if survey.faults else text)
        report.notes.extend(reading.remarks)
        return report

    run(settings, HEALTH, DIAGNOSIS_CALLS, read)


@health.command(
    view=CODES_VIEW,
    short_help="Every health code and its symptom.",
    examples=[("All health codes", "kvctl health codes")],
)
def codes(settings: Settings) -> None:
    """Every health code with the symptom that an operator sees; contacts no agent."""
    rows = [code_row(each) for each in CODES]
    Output(settings).emit(Report(CODES_VIEW, rows, answered=0))


@health.command(
    view=CODES_VIEW,
    short_help="The page of a code.",
    examples=[("What KV_RING_PINNED means and what to do", "kvctl health explain ring_pinned")],
)
@click.argument("code", shell_complete=_names)
def explain(settings: Settings, code: str) -> None:
    """The page of a code: symptom, meaning, remedy, and the same condition as a Prometheus alert.

    Upper or lower case, with or without KV_; contacts no agent.
    """
    Output(settings).emit(Report(CODES_VIEW, [code_row(_code(code))], answered=0, blocks=page))


@health.command(
    view=MUTES,
    short_help="Mute a code for a while.",
    examples=[
        ("One code for two hours", "kvctl health mute KV_LANE_SLOW 2h --reason 'switch is replaced'"),
        ("One code for one agent", "kvctl health mute KV_CLOCK_SKEW:decode-0 1d"),
    ],
)
@click.argument("target", metavar="CODE[:SUBJECT]", shell_complete=_names)
@click.argument("time_", metavar="TIME")
@click.option("--reason", default="", metavar="TEXT", help="Reason, shown by `kvctl health mutes`.")
def mute(settings: Settings, target: str, time_: str, reason: str) -> None:
    """Mute a code, or one subject or agent of it, for TIME (30m, 2h, 1d).

    A mute ends early when the finding gets worse: a higher severity, a larger weight or more findings than now. Muted
    findings stay visible as a count. Mutes are per user, in $XDG_STATE_HOME/kvctl/mutes.json: a check run by another
    user ignores them. They hold for every fleet, independent of -e and -c: with several fleets, name a SUBJECT that
    only one of them has.
    """
    code, subject = _target(target)
    lasts_ns = _lifetime(time_)
    found = _current_findings(settings)
    now_ns = time.time_ns()
    made = Mute(code.name, subject, now_ns, now_ns + lasts_ns, reason, None)
    if found is not None:
        covered = [each for each in found if made.covers(each)]
        made = Mute(code.name, subject, now_ns, now_ns + lasts_ns, reason, Baseline.of(covered))
    with mute_store.edit(mute_store.default_path()) as mutes:
        mutes[:] = [each for each in mutes if each.target != made.target and each.until_ns > now_ns] + [made]
    output = Output(settings)
    output.emit(Report(MUTES, [mute_row(made, now_ns)], answered=0))
    if made.baseline is None:
        state = "is not raised now" if found is not None else "could not be examined: no agent answered"
        output.note(f"{made.target} {state}; every finding of it is muted for {duration(lasts_ns)}")


@health.command(
    short_help="End a mute.",
    examples=[("As listed by kvctl health mutes", "kvctl health unmute KV_LANE_SLOW")],
)
@click.argument("target", metavar="CODE[:SUBJECT]", shell_complete=_names)
def unmute(settings: Settings, target: str) -> None:
    """End a mute; give the target as `kvctl health mutes` lists it."""
    code, subject = _target(target)
    now_ns = time.time_ns()
    wanted = f"{code.name}:{subject}" if subject else code.name
    with mute_store.edit(mute_store.default_path()) as mutes:
        kept = [each for each in mutes if each.until_ns > now_ns]
        gone = [each for each in kept if each.target == wanted]
        mutes[:] = [each for each in kept if each.target != wanted]
    if not gone:
        others = ", ".join(each.target for each in kept)
        raise CliError(f"{wanted} is not muted; " + (f"muted: {others}" if others else "no mute is active"))
    Output(settings).note(f"{wanted} is reported again")


@health.command(
    view=MUTES,
    short_help="Mutes: remaining time and reason.",
    examples=[("Mutes and how long they last", "kvctl health mutes")],
)
def mutes(settings: Settings) -> None:
    """Mutes: remaining time, the condition that ends them early, and the reason; contacts no agent."""
    now_ns = time.time_ns()
    rows = [mute_row(each, now_ns) for each in mute_store.load(mute_store.default_path()) if each.until_ns > now_ns]
    Output(settings).emit(Report(MUTES, rows, answered=0))


def _is_wrong(raised: Sequence[Finding], survey: Survey) -> bool:
    """Returns whether there is a finding more severe than info, or an agent that does not answer."""
    return bool(survey.faults) or any(each.severity > Severity.INFO for each in raised)


def _muted_rows(reading: HealthReading) -> list[dict[str, Any]]:
    now_ns = time.time_ns()
    return [row(each, muted_ns=mute.until_ns - now_ns) for each, mute in reading.judged.muted]


def _code(text: str) -> Code:
    """Returns the health code that the user typed, in upper or lower case, with or without KV_.

    Raises:
        click.UsageError: there is no such code.
    """
    name = text.upper()
    for each in (name, _PREFIX + name.removeprefix(_PREFIX)):
        if each in CODES_BY_NAME:
            return CODES_BY_NAME[each]
    hint = near(each, CODES_BY_NAME)
    raise click.UsageError(f"there is no code {text}{hint or '; kvctl health codes lists them'}")


def _target(text: str) -> tuple[Code, str]:
    code, _, subject = text.partition(":")
    return _code(code), subject.strip()


def _lifetime(text: str) -> int:
    try:
        lasts_ns = parse_duration(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if lasts_ns <= 0:
        raise click.UsageError(f"{text} is not a positive time: write it as 1h")
    return lasts_ns


def _current_findings(settings: Settings) -> list[Finding] | None:
    """Returns the current findings of the fleet, for the baseline of a mute; None if no agent answers."""
    before = earlier(settings)
    if before is None:
        return None
    with source(settings) as fleet:
        survey = fleet.survey(DIAGNOSIS_CALLS)
    return examine(Snapshot(survey, survey.tick_ns, before), CODES)
