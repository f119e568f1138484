"""`kvctl peers probe`: what writing to a decode rank costs right now, measured on the living link."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import once_and_live, permitted
from kvctl.commands.names import AgentName
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import progress
from kvctl.render.operations import PROBE
from kvctl.render.report import Report
from kvctl.render.units import parse_size

_LONGEST_NS = 60_000_000_000


class Size(click.ParamType[int]):
    """Bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(parse_size(str(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    cls=KvctlCommand,
    view=PROBE,
    short_help="Measure the lane between two agents.",
    examples=[
        ("The lane from prefill-0 to decode-0", "kvctl peers probe prefill-0 decode-0"),
        ("All lanes, while rooms are open", "kvctl peers probe --busy"),
    ],
)
@click.argument("prefill", type=AgentName(), required=False)
@click.argument("decode", type=AgentName(), required=False)
@click.option("--bytes", "nbytes", type=Size(), metavar="SIZE", help="Largest write, 1MiB to 64MiB. [default: 16MiB]")
@click.option("--busy", is_flag=True, help="Also while rooms are open; their parts wait for it.")
@pass_settings
def probe(settings: Settings, prefill: str | None, decode: str | None, nbytes: int | None, busy: bool) -> None:
    """Write from the PREFILL rank to scratch memory of the DECODE rank, and show the time by size of descriptor.

    TAKES is the time of a whole write. Every write has a fixed cost, which the one of 64 bytes shows; EACH ADDS is the
    time that a descriptor adds.

    Without names every prefill rank measures its connection to every decode rank that it is connected to, one after the
    other. A lane takes about 0.2 s, more where it is slow. kvctl peers shows the result from then on. Level: operate.
    """
    once_and_live(settings)
    output = Output(settings)
    output.selection(PROBE)
    names = (prefill,) if prefill is not None and not settings.endpoints else ()
    with Fleet((*settings.endpoints, *names), settings.labels, settings.timeout_ns, settings.keys) as fleet:
        survey = fleet.survey((Call("peers"),))
        report = Report(PROBE, [], 0, survey.faults)
        found = list(_pairs(survey, prefill, decode))
        if survey.agents and not found:
            report.failure = _nothing(survey, prefill, decode)
        _probe_all(fleet, survey, report, found, {"bytes": nbytes, "busy": busy or None}, quiet=settings.quiet)
    if report.rows or output.document:
        output.emit(report)
    raise click.exceptions.Exit(conclude(output, settings, survey, report))


def _probe_all(
    fleet: Fleet,
    survey: Survey,
    report: Report,
    pairs: list[tuple[AgentAnswer, str]],
    args: dict[str, Any],
    *,
    quiet: bool,
) -> None:
    """One lane after the other, since two at a time would measure each other."""
    faults, rows, answered = list(survey.faults), [], set()
    able = permitted(list({agent.name: agent for agent, _ in pairs}.values()), Call("probe"), faults)
    shown = sys.stderr.isatty() and not quiet
    for agent, peer in pairs:
        if agent not in able:
            continue
        if shown:
            progress(f"probing {agent.name} → {peer}")
        answer = _probe(fleet, agent, Call("probe", {"peer": peer, **args}))
        if isinstance(answer, Fault):
            faults.append(answer)
        else:
            rows += answer
            answered.add(agent.name)
    if shown:
        progress("")
    report.rows, report.faults, report.answered = rows, faults, len(answered)


def _probe(fleet: Fleet, agent: AgentAnswer, call: Call) -> list[dict[str, Any]] | Fault:
    deadline = time.monotonic_ns() + _LONGEST_NS
    while True:
        (reply,) = fleet.ask([(agent.endpoint, call)])
        if reply.fault is not None:
            return reply.fault
        if not reply.data["running"]:
            rows: list[dict[str, Any]] = reply.data["rows"]
            return rows
        if time.monotonic_ns() > deadline:
            text = f"the connection to {reply.data['peer']} was not measured within {_LONGEST_NS / 1e9:g} s"
            return Fault(agent.name, FaultCode.TIMEOUT, text)


def _pairs(survey: Survey, prefill: str | None, decode: str | None) -> Iterator[tuple[AgentAnswer, str]]:
    """Writers and the readers that they are connected to."""
    for agent, rows in survey.answers("peers"):
        if agent.hello["role"] != "prefill" or prefill not in (None, agent.name):
            continue
        for row in rows:
            if row["state"] == "ready" and decode in (None, row["peer"]):
                yield agent, row["peer"]


def _nothing(survey: Survey, prefill: str | None, decode: str | None) -> str:
    writers = [agent.name for agent in survey.agents if agent.hello["role"] == "prefill"]
    if prefill is not None and prefill not in writers:
        return f"no prefill rank named {prefill} answers; there are: {', '.join(writers) or 'none'}"
    who = prefill or "no prefill rank"
    return f"{who} is {'not ' if prefill else ''}connected to {decode or 'any decode rank'}: kvctl peers matrix"
