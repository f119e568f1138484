"""`kvctl peers`: who is connected to whom, and what stands between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.commands.names import AgentName
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.peers_probe import probe
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.peer_diff import DIFF, DIFFERS, INCOMPATIBLE, SAME, build, comparisons, refusals
from kvctl.render.peer_matrix import MATRIX, draw, pairs
from kvctl.render.peers import PEERS
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row

_CALLS = (Call("peers"),)


@click.group(cls=KvctlGroup, default="show")
def peers() -> None:
    """Connections between agents; `kvctl peers` alone shows them."""


@peers.command(
    view=PEERS,
    short_help="One row per connection and end.",
    examples=[
        ("All connections", "kvctl peers"),
        ("Connections that are not ready", "kvctl peers --filter 'state!=ready'"),
    ],
)
@pass_settings
def show(settings: Settings) -> None:
    """Connections between agents: state, last heartbeat, round trip, lane, errors, incompatible factors."""
    run(settings, PEERS, _CALLS, _read)


@peers.command(
    view=MATRIX,
    short_help="Prefill by decode: reachability, lane, compatibility.",
    examples=[("Each prefill rank against each decode rank", "kvctl peers matrix")],
)
@pass_settings
def matrix(settings: Settings) -> None:
    """Every prefill rank against every decode rank: whether they reach each other, by which lane, whether they fit.

    A pair counts as the worse of what its two ends say. Formats for programs give a row per pair.
    """
    run(settings, MATRIX, _CALLS, _read_matrix)


@peers.command(
    view=DIFF,
    short_help="Differences between two agents.",
    examples=[
        ("Why these two do not fit each other", "kvctl peers diff prefill-0 decode-0"),
        ("Everything, also what is the same", "kvctl peers diff prefill-0 decode-0 --all"),
    ],
)
@click.argument("a", type=AgentName())
@click.argument("b", type=AgentName())
@click.option("--all", "everything", is_flag=True, help="Also what is the same.")
@pass_settings
def diff(settings: Settings, a: str, b: str, everything: bool) -> None:
    """Differences between agents A and B: factors that make them incompatible, build, transport, configuration.

    Exits 1 where they do not fit each other.
    """

    def read(survey: Survey) -> Report:
        return _compare(survey, a, b, everything)

    run(settings, DIFF, (*_CALLS, Call("status"), Call("config")), read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("peers")
    return Report(PEERS, [row for _, data in answers for row in data], len(answers), survey.faults)


def _read_matrix(survey: Survey) -> Report:
    answers = survey.answers("peers")
    roles = {agent.name: agent.hello["role"] for agent, _ in answers}
    rows = pairs(roles, (row for _, data in answers for row in data))

    def blocks(kept: Sequence[Row], width: int) -> list[Block]:
        return [Text(draw(kept, width))]

    return Report(MATRIX, rows, len(answers), survey.faults, blocks=blocks)


def _compare(survey: Survey, a: str, b: str, everything: bool) -> Report:
    agents = {agent.name: agent for agent in survey.agents if agent.data.keys() >= {"peers", "status", "config"}}
    faults = [fault for fault in survey.faults if fault.agent in {a, b}]
    missing = [name for name in (a, b) if name not in agents]
    if missing:
        report = Report(DIFF, [], 0, faults)
        if agents and not faults:
            report.failure = f"no agent named {' or '.join(missing)} answers; there are: {', '.join(agents)}"
        return report
    first, second = agents[a], agents[b]
    refused, connected = _refusals(first, second)
    own, other = ({row["key"]: row["value"] for row in agent.data["config"]} for agent in (first, second))
    builds = build(first.data["status"]), build(second.data["status"])
    rows = [
        *comparisons(*builds, "build", {**builds[0], **builds[1]}),
        *comparisons(own, other, "config", {**own, **other}),
    ]
    expected = {"role", *(key for key in builds[0] if key.startswith("sizes."))}  # of two instances these differ
    shown = [row for row in rows if everything or (row["verdict"] == DIFFERS and row["factor"] not in expected)]
    order = (INCOMPATIBLE, DIFFERS, SAME)
    report = Report(
        DIFF,
        sorted([*refused, *shown], key=lambda row: order.index(row["verdict"])),
        2,
        faults,
        blocks=lambda kept, width: [Text([[(_headline(a, b, refused, connected), "bold")]]), Grid(DIFF, kept)],
    )
    if refused:
        report.failure = f"{a} and {b} do not fit: {'; '.join(row['text'] for row in refused)}"
    return report


def _refusals(a: AgentAnswer, b: AgentAnswer) -> tuple[list[dict[str, Any]], bool]:
    """What each says of the other, and whether either knows the other at all."""

    def view_of(agent: AgentAnswer, peer: AgentAnswer) -> dict[str, Any] | None:
        return next((row for row in agent.data["peers"] if row["peer"] == peer.name), None)

    swapped = a.hello["role"] == "decode"
    prefill, decode = (b, a) if swapped else (a, b)
    ours, theirs = view_of(prefill, decode), view_of(decode, prefill)
    return refusals(ours, theirs, swapped), bool(ours or theirs)


def _headline(a: str, b: str, refused: Sequence[Row], connected: bool) -> str:
    if refused:
        return f"A {a} and B {b} do not fit"
    return f"A {a} and B {b}: " + ("nothing stands between them" if connected else "not connected with each other")


peers.add_command(probe)
