"""Reads a fleet's health for a command: the readings to compare, and the rows of `kvctl status`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvctl.client.calls import Call
from kvctl.client.faults import Fault
from kvctl.client.fleet import Survey
from kvctl.client.health_reads import DIAGNOSIS_CALLS
from kvctl.commands.queries import source
from kvctl.commands.settings import Settings
from kvctl.health.answers import text
from kvctl.health.codes import CODES, CODES_BY_NAME
from kvctl.health.engine import HealthReading, Ignored, codes_of_agents
from kvctl.health.finding import Code
from kvctl.health.snapshot import Snapshot
from kvctl.render.groups import placed
from kvctl_agent.contract.values import near

PAUSE_S = 1.0
"""Time between two readings: long enough for a slow lane to make progress, short enough to wait for."""
METRICS_PAUSE_S = 5.0
"""The same for engines without an agent, whose queues and counters tell of rooms only in sums."""
_FIRST_TIMEOUT_NS = 1_000_000_000
_PREFIX = "KV_"


def code_of(text: str) -> Code:
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


def complete_code(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    return [CompletionItem(each.name, help=each.sees) for each in CODES if each.name.startswith(incomplete.upper())]


def _ignored(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[Ignored]:
    return [
        Ignored(code_of(code).name, subject.strip()) for code, _, subject in (value.partition(":") for value in values)
    ]


ignore_option = click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="CODE[:SUBJECT]",
    callback=_ignored,
    shell_complete=complete_code,
    help="Ignore a health code, or one subject or agent of it. Repeatable.",
)


def earlier(settings: Settings, calls: Sequence[Call] = DIAGNOSIS_CALLS) -> Snapshot | None:
    """Returns a snapshot to compare the next reading with: one taken now, or the previous one in a file.

    Returns None if there is none: with `-w`, where the next reading follows anyway, if no agent answers, and at the
    beginning of a file.

    Raises:
        CliError: the source of the data cannot be used.
    """
    if settings.watch_ns is not None:
        return None
    if settings.from_file is not None:
        return _previous_moment(settings, calls)
    # The next reading waits longer for agents that do not answer this one.
    brief = replace(settings, timeout_ns=min(settings.timeout_ns, _FIRST_TIMEOUT_NS))
    with source(brief) as fleet:
        survey = fleet.survey(calls)
    if not survey.agents:
        return None
    # At least PAUSE_S from the end of one reading to the end of the next: some codes need a heartbeat in between.
    pause_s = METRICS_PAUSE_S if any(agent.endpoint.metrics for agent in survey.agents) else PAUSE_S
    time.sleep(max(0.0, pause_s - (time.monotonic_ns() - survey.tick_ns) / 1e9))
    return Snapshot(survey, survey.tick_ns)


def _previous_moment(settings: Settings, calls: Sequence[Call]) -> Snapshot | None:
    from kvctl.client.recordings import RecordingSource

    with source(settings) as file:
        if not isinstance(file, RecordingSource) or file.moment == 0:
            return None
        file.seek(file.moment - 1)
        survey = file.survey(calls)
    return Snapshot(survey, survey.tick_ns)


@dataclass(frozen=True, slots=True)
class AgentRows:
    """Rows of `kvctl status`, one for each agent.

    Attributes:
        rows: the answers to `status` with host, instance and health codes; for an agent that did not answer a row with
            `name`, `host`, `health`, its fault, and `role` if its peers know it.
        answered: number of agents that answered.
        faults: faults of those that did not.
        notes: remarks about agents that answered only a part.
    """

    rows: Sequence[Mapping[str, Any]]
    answered: int
    faults: Sequence[Fault]
    notes: list[str]


def agent_rows(survey: Survey, reading: HealthReading) -> AgentRows:
    """Returns a row for each agent of a survey of `HEALTH_CALLS`."""
    codes, reasons = codes_of_agents(reading.findings), {fault.agent: fault.message for fault in survey.faults}
    rows: list[dict[str, Any]] = [
        {**data, "host": agent.host, "health": codes.get(agent.name, ["incomplete"] if agent.name in reasons else [])}
        for agent, data in survey.answers("status")
    ]
    answered = {row["name"] for row in rows}
    # An agent that refuses a query that only health needs has answered nevertheless.
    faults = [fault for fault in survey.faults if fault.agent not in answered]
    opposite = {"prefill": {"role": "decode"}, "decode": {"role": "prefill"}}
    roles = {
        text(peer, "peer"): opposite.get(agent.role, {})
        for agent in reading.snapshot.agents.values()
        for peer in agent.peers
    }
    silent = [
        {"name": fault.agent, **roles.get(fault.agent, {}), "host": survey.host_of(fault.agent), "health": [fault.code]}
        for fault in faults
        if fault.agent
    ]
    notes = [f"{name}: health is incomplete: {reason}" for name, reason in reasons.items() if name in answered]
    return AgentRows(placed([*rows, *silent]), len(rows), faults, notes)
