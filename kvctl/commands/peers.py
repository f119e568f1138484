"""`kvctl peers`: who is connected to whom, and what stands between them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import once_and_live, permitted
from kvctl.commands.options import AgentName, KvctlGroup, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, run
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import progress
from kvctl.render.peers import MATRIX, PEERS, draw_matrix, pairs
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.units import parse_size
from kvctl.render.view import Column, Kind, Row, View, Width

INCOMPATIBLE = "incompatible"
DIFFERS = "differs"
SAME = "same"
# "page_size 64 ≠ 32": the prefill agent's value first.
_FACTOR = re.compile(r"(?P<factor>protocol version|\S+) (?P<prefill>\S.*?) ≠ (?P<decode>.+)", re.DOTALL)

DIFF = View(
    "peers.diff",
    (
        Column("factor", help="Name of the compared setting."),
        Column("a", help="Value of the first agent."),
        Column("b", help="Value of the second agent."),
        Column(
            "verdict",
            styles={INCOMPATIBLE: "bold red", DIFFERS: "yellow", SAME: "dim"},
            help="incompatible, differs or same.",
        ),
        Column("kind", width=Width.NORMAL, help="Origin of the setting."),
        Column("text", width=Width.WIDE, help="Description."),
    ),
    empty="no difference",
)


PROBE = View(
    "probe",
    (
        Column("agent"),
        Column("peer"),
        Column("bytes", kind=Kind.BYTES, header="SIZE", help="Size of each descriptor."),
        Column("descriptors", kind=Kind.COUNT, header="DESCRIPTORS", help="Descriptors in one write."),
        Column("write", kind=Kind.DURATION, header="WRITE", help="Time of one write."),
        Column("descriptor", kind=Kind.DURATION, header="PER DESCRIPTOR", help="Additional time per descriptor."),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S", help="Rate, in GB/s."),
    ),
    sort=("agent", "peer", "bytes"),
    empty="no connection was measured",
)

_LONGEST_NS = 60_000_000_000
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
        return [Text(draw_matrix(kept, width))]

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


class Size(click.ParamType[int]):
    """Bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(parse_size(str(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@peers.command(
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

    WRITE is the time of a whole write. Every write has a fixed cost, which the row of 64 bytes shows; PER DESCRIPTOR is
    the time that each descriptor adds.

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


def refusals(
    by_prefill: Mapping[str, Any] | None, by_decode: Mapping[str, Any] | None, swapped: bool
) -> list[dict[str, Any]]:
    """Returns the incompatible settings of a prefill and a decode agent.

    Args:
        by_prefill: the prefill agent's row about the decode agent.
        by_decode: the decode agent's row about the prefill agent. It mostly repeats what the prefill agent sent, so it
            counts only if the prefill agent reports nothing.
        swapped: `a` is the decode agent.
    """
    differences = list(by_prefill["differences"]) if by_prefill else []
    decode_first = bool(by_prefill) and not differences
    texts = differences or (list(by_decode["differences"]) if by_decode else [])
    rows = []
    for text in texts:
        found = _FACTOR.fullmatch(text)
        first, second = (found["prefill"], found["decode"]) if found else (None, None)
        if swapped != decode_first:
            first, second = second, first
        factor = found["factor"] if found else text
        rows.append({"factor": factor, "a": first, "b": second, "verdict": INCOMPATIBLE, "kind": "plan", "text": text})
    return rows


def comparisons(a: Mapping[str, Any], b: Mapping[str, Any], kind: str, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Returns one row per key with the values of both agents."""
    return [
        {
            "factor": key,
            "a": a.get(key),
            "b": b.get(key),
            "verdict": SAME if a.get(key) == b.get(key) else DIFFERS,
            "kind": kind,
            "text": None,
        }
        for key in keys
    ]


def build(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the versions and engine of an agent as a flat mapping."""
    transport, pool, sizes = status["transport"], status["pool"], status["sizes"]
    return {
        "version": status["version"],
        "role": status["role"],
        "device": status["device"],
        **{f"transport.{key}": _text(value) for key, value in transport.items()},
        **{f"sizes.{key}": value for key, value in sizes.items()},
        **{f"pool.{key}": value for key, value in pool.items()},
    }


def _text(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ",".join(value)
