"""`kvctl peers`: lists connections between agents, compares two agents, measures lanes, and forgets lost peers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import DONE, FORCE, Rounds, act, named, once_and_live, permitted, yes_option
from kvctl.commands.options import KvctlGroup, Parsed, completed_by
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, live, run
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import ProgressLine
from kvctl.health.answers import inner
from kvctl.health.lanes import lane_evidence, measured_lane
from kvctl.render.peers import MATRIX, PEERS, draw_matrix, pairs
from kvctl.render.report import Grid, Report, Text
from kvctl.render.transfer_costs import COSTS, RankCost, cost_rows
from kvctl.render.units import parse_size
from kvctl.render.view import Column, Kind, View, Width

INCOMPATIBLE = "incompatible"
DIFFERS = "differs"
SAME = "same"
_VERDICTS = {INCOMPATIBLE: "bold red", DIFFERS: "yellow", SAME: "dim"}
# "page_size 64 ≠ 32": the prefill agent's value first.
_FACTOR = re.compile(r"(?P<factor>protocol version|\S+) (?P<prefill>\S.*?) ≠ (?P<decode>.+)", re.DOTALL)
_PROBE_LIMIT_NS = 60_000_000_000
_FRESH_S = 0.05  # so long an agent keeps a reading of its host's devices
_CALLS = (Call("peers"),)
_DEVICES = Call("nics", {"fresh": True})

DIFF = View(
    "peers.diff",
    (
        Column("factor", help="Name of the compared setting."),
        Column("a", help="Value of the first agent."),
        Column("b", help="Value of the second agent."),
        Column("verdict", help="incompatible, differs or same.", styles=_VERDICTS),
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
        Column("bytes", Kind.BYTES, help="Size of each descriptor.", header="SIZE"),
        Column("descriptors", Kind.COUNT, help="Descriptors in one write."),
        Column("write", Kind.DURATION, help="Time of one write."),
        Column("descriptor", Kind.DURATION, help="Additional time per descriptor.", header="PER DESCRIPTOR"),
        Column("gb_per_s", Kind.RATE, help="Rate, in GB/s.", header="GB/S"),
        Column("lane", help="rdma, tcp, cuda_ipc, shared memory or another; empty: unknown."),
        Column(
            "devices",
            Kind.LIST,
            help="Network devices of the prefill rank's host that carried the bytes.",
            path=lambda row: list(row["carried"]),
        ),
        Column("lane_source", help="Origin of LANE: engine, counters of the devices, or rate.", header="KNOWN FROM"),
        Column("carried", Kind.MAP, Width.WIDE, "Bytes that each device sent meanwhile."),
        Column("moved", Kind.BYTES, Width.WIDE, "Bytes of all writes of the measurement."),
    ),
    sort=("agent", "peer", "bytes"),
    empty="no connection was measured",
)


@click.group(cls=KvctlGroup, default="show")
def peers() -> None:
    """Connections between agents; without a subcommand, like `kvctl peers show`."""


@peers.command(
    view=PEERS,
    short_help="List connections, one row per end.",
    examples=[
        ("All connections", "kvctl peers"),
        ("Connections that are not ready", "kvctl peers --filter 'state!=ready'"),
    ],
)
def show(settings: Settings) -> None:
    """List connections between agents: state, last heartbeat, round trip, lane, errors, incompatible settings."""

    def read(survey: Survey) -> Report:
        answers = survey.answers("peers")
        rows = [
            {**row, "lane_evidence": lane_evidence(row, inner(agent.data, "nics"))}
            for agent, data in answers
            for row in data
        ]
        return Report(PEERS, rows, len(answers), survey.faults)

    run(settings, PEERS, (*_CALLS, Call("nics", optional=True)), read)


@peers.command(
    view=MATRIX,
    short_help="Show prefill by decode ranks: reachability, lane, compatibility.",
    examples=[("Each prefill rank against each decode rank", "kvctl peers matrix")],
)
def matrix(settings: Settings) -> None:
    """Show for every prefill and decode rank whether they are connected, by which lane, and whether they fit.

    If the two ends of a connection report different states, the worse one is shown. The other formats (tsv, csv, json)
    have one row per pair.
    """

    def read(survey: Survey) -> Report:
        answers = survey.answers("peers")
        roles = {agent.name: agent.hello["role"] for agent, _ in answers}
        rows = pairs(roles, (row for _, data in answers for row in data))
        return Report(
            MATRIX, rows, len(answers), survey.faults, blocks=lambda kept, width: [Text(draw_matrix(kept, width))]
        )

    run(settings, MATRIX, _CALLS, read)


@peers.command(
    view=DIFF,
    short_help="Compare two agents.",
    examples=[
        ("Why these two are incompatible", "kvctl peers diff prefill-0 decode-0"),
        ("All settings, including equal ones", "kvctl peers diff prefill-0 decode-0 --all"),
    ],
)
@click.argument("a", shell_complete=completed_by("agents"))
@click.argument("b", shell_complete=completed_by("agents"))
@click.option("--all", "everything", is_flag=True, help="Also list settings that are the same.")
def diff(settings: Settings, a: str, b: str, everything: bool) -> None:
    """Compare agents A and B: settings that make them incompatible, build, transport, configuration.

    The exit code is 1 if they are incompatible.
    """
    calls = (*_CALLS, Call("status"), Call("config"))
    run(settings, DIFF, calls, lambda survey: _compare(survey, a, b, everything))


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
    swapped = first.hello["role"] == "decode"
    prefill, decode = (second, first) if swapped else (first, second)
    by_prefill, by_decode = _row_about(decode, prefill), _row_about(prefill, decode)
    refused = refusals(by_prefill, by_decode, swapped)
    builds = [_build(agent.data["status"]) for agent in (first, second)]
    configs = [{row["key"]: row["value"] for row in agent.data["config"]} for agent in (first, second)]
    expected = {"role", *(key for key in builds[0] if key.startswith("sizes."))}  # these may differ between instances
    shown = [
        row
        for row in _comparisons("build", *builds) + _comparisons("config", *configs)
        if everything or (row["verdict"] == DIFFERS and row["factor"] not in expected)
    ]
    if refused:
        headline = f"A {a} and B {b} do not fit"
    else:
        connected = by_prefill or by_decode
        headline = f"A {a} and B {b}: {'compatible' if connected else 'not connected with each other'}"
    report = Report(
        DIFF,
        sorted([*refused, *shown], key=lambda row: list(_VERDICTS).index(row["verdict"])),
        2,
        faults,
        blocks=lambda kept, width: [Text([[(headline, "bold")]]), Grid(DIFF, kept)],
    )
    if refused:
        report.failure = f"{a} and {b} do not fit: {'; '.join(row['text'] for row in refused)}"
    return report


def _row_about(peer: AgentAnswer, agent: AgentAnswer) -> dict[str, Any] | None:
    """Returns the row in which `agent` describes `peer`; None if it does not know the peer."""
    return next((row for row in agent.data["peers"] if row["peer"] == peer.name), None)


def refusals(
    by_prefill: Mapping[str, Any] | None, by_decode: Mapping[str, Any] | None, swapped: bool
) -> list[dict[str, Any]]:
    """Returns one row of DIFF per setting that makes a prefill and a decode agent incompatible.

    Args:
        by_prefill: the prefill agent's row about the decode agent.
        by_decode: the decode agent's row about the prefill agent. It mostly repeats what the prefill agent sent, so it
            counts only if the prefill agent reports nothing.
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


def _comparisons(kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one row of DIFF per setting, with the values of both agents."""
    rows = []
    for key in {**a, **b}:
        first, second = a.get(key), b.get(key)
        verdict = SAME if first == second else DIFFERS
        rows.append({"factor": key, "a": first, "b": second, "verdict": verdict, "kind": kind, "text": None})
    return rows


def _build(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns version, role, device, engine, pool and parallel sizes of an agent as a flat mapping."""
    transport = {
        key: value if isinstance(value, str) else ",".join(value) for key, value in status["transport"].items()
    }
    sections = {"transport": transport, "sizes": status["sizes"], "pool": status["pool"]}
    return {
        **{key: status[key] for key in ("version", "role", "device")},
        **{f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()},
    }


@peers.command(
    view=DONE,
    short_help="Forget a peer that is gone.",
    examples=[
        ("A decode server that was restarted under another name", "kvctl peers forget decode-node3-old"),
        ("The same on one agent, in a script", "kvctl peers forget decode-node3-old -e prefill-0 --yes"),
    ],
)
@click.argument("peer", shell_complete=completed_by("agents"))
@click.option("--force", is_flag=True, help="Also free memory that the peer may still write.")
@yes_option
def forget(settings: Settings, peer: str, force: bool, yes: bool) -> None:
    """Make all agents that have lost PEER forget it, so that it is not reported. If it still runs, it connects anew.

    Agents do this by themselves: at once if PEER has closed or was replaced by a server on the same host, otherwise
    after a while. On decode ranks the prefill instance of PEER is forgotten with it, and rooms that wait for it fail;
    an instance that the agent was created with stays. While PEER may still write memory of failed rooms, this is
    refused without --force: first make sure that its process has ended. Level: operate.
    """
    own_names: dict[str, str] = {}

    def knowing(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        own_names.update({agent.name: agent.own_name for agent in survey.agents})
        found = [agent for agent, rows in survey.answers("peers") if any(row["peer"] == peer for row in rows)]
        return found or f"no agent that answers knows a peer {peer}; kvctl peers lists them"

    def question(agents: Sequence[AgentAnswer]) -> str:
        text = f"Forget {peer} on {named(agents)}"
        return f"{text} {FORCE}" if force else text

    def rounds(agents: Sequence[AgentAnswer]) -> Rounds:
        call = Call("forget", {"peer": own_names.get(peer, peer), "force": force})
        return [[(agent, call) for agent in agents]]

    call = Call("forget", {"peer": peer, "force": force})
    act(settings, call, question, yes=yes, look=_CALLS, select=knowing, rounds=rounds)


@peers.command(
    view=COSTS,
    short_help="Predict the transfer time of a prompt for each pair.",
    examples=[
        ("Each prefill and decode group, for a prompt of 4096 tokens", "kvctl peers cost --tokens 4096"),
        ("The same for a router, with the ranks behind each row", "kvctl peers cost --tokens 4096 -o json"),
    ],
)
@click.option(
    "--tokens",
    type=click.IntRange(0, 1 << 24),
    default=1024,
    show_default=True,
    metavar="N",
    help="Length of the prompt, without the prefix that decode has cached.",
)
def cost(settings: Settings, tokens: int) -> None:
    """Predict how long the KV of a prompt takes from each prefill to each decode instance or dp group.

    The time counts from the end of the forward, or from the opening of the room if that is later, until decode may
    start. It is fitted to the latest rooms of each pair; before there are any, there is no prediction.
    docs/routers.md describes the fields and how a router uses them.
    """
    calls = (Call("status"), Call("cost", {"tokens": tokens}))

    def read(survey: Survey) -> Report:
        ranks = [
            RankCost(agent.name, agent.data["status"], answer)
            for agent, answer in survey.answers("cost")
            if "status" in agent.data
        ]
        return Report(COSTS, cost_rows(ranks, tokens), len(ranks), survey.faults)

    run(settings, COSTS, calls, read)


@peers.command(
    view=PROBE,
    short_help="Measure the lane between two agents.",
    examples=[
        ("The lane from prefill-0 to decode-0", "kvctl peers probe prefill-0 decode-0"),
        ("All lanes, even while rooms are open", "kvctl peers probe --busy"),
    ],
)
@click.argument("prefill", shell_complete=completed_by("agents"), required=False)
@click.argument("decode", shell_complete=completed_by("agents"), required=False)
@click.option(
    "--bytes",
    "nbytes",
    type=Parsed("size", parse_size),
    metavar="SIZE",
    help="Largest write, 1MiB to 64MiB. [default: 16MiB]",
)
@click.option("--busy", is_flag=True, help="Measure even while rooms are open; their parts are delayed.")
def probe(settings: Settings, prefill: str | None, decode: str | None, nbytes: int | None, busy: bool) -> None:
    """Measure writes from the PREFILL rank to scratch memory of the DECODE rank, by size of descriptor.

    WRITE is the time of a whole write. Every write has a fixed cost, which the row of 64 bytes shows; PER DESCRIPTOR is
    the time that each descriptor adds.

    Without names, every prefill rank measures its connection to every decode rank, one after the other. One lane takes
    about 0.3 s, a slow one longer. Afterwards, kvctl peers shows the rate. Level: operate.

    LANE tells what carried the bytes of these writes: as the engine tells (Mooncake); otherwise as the counters of the
    network devices of the PREFILL rank's host tell, which are read before and after; otherwise as the rate suggests.
    Counters contain the bytes of all processes: KNOWN FROM says if they were too many.
    """
    once_and_live(settings)
    output = Output(settings)
    output.selection(PROBE)
    chosen = settings.naming((prefill,)) if prefill is not None and not settings.endpoints else settings
    with live(chosen) as fleet:
        survey = fleet.survey(_CALLS)
        report = Report(PROBE, [], 0, survey.faults)
        found = list(_connections(survey, prefill, decode))
        if survey.agents and not found:
            report.failure = _no_connection(survey, prefill, decode)
        with ProgressLine(settings.quiet) as line:
            _probe_all(fleet, survey, report, found, {"bytes": nbytes, "busy": busy or None}, line)
    if report.rows or output.document:
        output.emit(report)
    raise click.exceptions.Exit(conclude(output, settings, survey, report))


def _probe_all(
    fleet: Fleet,
    survey: Survey,
    report: Report,
    connections: list[tuple[AgentAnswer, str]],
    args: dict[str, Any],
    line: ProgressLine,
) -> None:
    """Measures the lanes and stores the results in the report.

    Measures one lane after the other, since simultaneous measurements would disturb each other.
    """
    faults, found, answered = list(survey.faults), list[dict[str, Any]](), set()
    able = permitted(list({agent.name: agent for agent, _ in connections}.values()), Call("probe"), faults)
    own_names = {agent.name: agent.own_name for agent in survey.agents}
    for agent, peer in connections:
        if agent not in able:
            continue
        line.show(f"probing {agent.name} → {peer}")
        own_name = own_names.get(peer, peer)
        before = _answers(fleet, agent, _DEVICES)
        answer = _probe(fleet, agent, Call("probe", {"peer": own_name, **args}))
        if isinstance(answer, Fault):
            faults.append(replace(answer, agent=agent.name))
        else:
            time.sleep(_FRESH_S)
            lane = measured_lane(own_name, before, _answers(fleet, agent, _DEVICES, *_CALLS), answer)
            found += [{**row, **lane, "agent": agent.name, "peer": peer} for row in answer["rows"]]
            answered.add(agent.name)
    report.rows, report.faults, report.answered = found, faults, len(answered)


def _answers(fleet: Fleet, agent: AgentAnswer, *calls: Call) -> dict[str, Any]:
    """Returns an agent's answers by command, without those that it did not give."""
    replies = fleet.ask([(agent.endpoint, call) for call in calls])
    return {reply.call.command: reply.data for reply in replies if reply.fault is None}


def _probe(fleet: Fleet, agent: AgentAnswer, call: Call) -> dict[str, Any] | Fault:
    deadline = time.monotonic_ns() + _PROBE_LIMIT_NS
    while True:
        (reply,) = fleet.ask([(agent.endpoint, call)])
        if reply.fault is not None:
            return reply.fault
        if not reply.data["running"]:
            answer: dict[str, Any] = reply.data
            return answer
        if time.monotonic_ns() > deadline:
            text = f"the connection to {reply.data['peer']} was not measured within {_PROBE_LIMIT_NS / 1e9:g} s"
            return Fault(agent.name, FaultCode.TIMEOUT, text)


def _connections(survey: Survey, prefill: str | None, decode: str | None) -> Iterator[tuple[AgentAnswer, str]]:
    """Yields pairs of a prefill agent and the name of a decode agent that is connected to it."""
    for agent, rows in survey.answers("peers"):
        if agent.hello["role"] != "prefill" or prefill not in (None, agent.name):
            continue
        for row in rows:
            if row["state"] == "ready" and decode in (None, row["peer"]):
                yield agent, row["peer"]


def _no_connection(survey: Survey, prefill: str | None, decode: str | None) -> str:
    writers = [agent.name for agent in survey.agents if agent.hello["role"] == "prefill"]
    if prefill is not None and prefill not in writers:
        return f"no prefill rank named {prefill} answers; there are: {', '.join(writers) or 'none'}"
    subject = f"{prefill} is not" if prefill else "no prefill rank is"
    return f"{subject} connected to {decode or 'any decode rank'}; kvctl peers matrix shows all connections"
