"""`kvctl bootstrap`: lists the prefill ranks that each bootstrap registry expects, and those missing or unconnected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import command
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width

_MOST_RANKS = 32
_REGISTRY_STATES = {"complete": "green", "waiting": "yellow", "refused": "bold red", "silent": "bold red"}

RANKS = View(
    "bootstrap.ranks",
    (
        Column("rank", help="Coordinates in the instance."),
        Column("agent"),
        Column("state", help="registered or missing.", styles={"registered": "green", "missing": "bold red"}),
        Column("connected", Kind.COUNT, help="Decode ranks connected to this prefill rank.", header="DECODE RANKS"),
        Column("endpoint"),
        Column("incarnation", width=Width.NORMAL),
    ),
)

BOOTSTRAP = View(
    "bootstrap",
    (
        Column("registry", help="Address of the bootstrap registry."),
        Column("state", help="complete, waiting, refused or silent.", styles=_REGISTRY_STATES),
        Column("expected", Kind.COUNT, help="Prefill ranks of the instance."),
        Column("registered", Kind.COUNT, help="Number of prefill ranks that have registered."),
        Column("missing", Kind.LIST, help="Coordinates of prefill ranks that have not registered."),
        Column("decode_ranks", Kind.COUNT, help="Decode ranks that queried this registry.", header="DECODE"),
        Column("decode_connected", Kind.COUNT, help="Decode ranks connected to all of them.", header="CONNECTED"),
        Column("unanswered", Kind.LIST, help="Registered prefill ranks that do not answer kvctl."),
        Column("sizes", Kind.MAP, Width.NORMAL, "Ranks along each axis: dp, pp, cp, tp."),
        Column("text", width=Width.WIDE, help="The registry's description of the ranks that are missing or refused."),
        Column("names", Kind.LIST, Width.WIDE, "Prefill ranks that have registered."),
        Column("asked_by", Kind.LIST, Width.WIDE, "Agents that queried this registry."),
    ),
    sort=("registry",),
    empty="no prefill instance is known",
    also=(("Ranks of each instance", RANKS),),
)


@command(view=BOOTSTRAP, examples=[("Ranks that are missing or not connected", "kvctl bootstrap")])
def bootstrap(settings: Settings) -> None:
    """List per prefill instance the expected, registered and missing ranks, and the connected decode ranks.

    On a terminal the ranks are listed below. `waiting`: ranks have not registered yet; `silent`: the registry does not
    answer; `unanswered`: registered ranks that do not answer kvctl.
    """
    run(settings, BOOTSTRAP, (Call("bootstrap"), Call("peers"), Call("status")), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("bootstrap")
    roles = {agent.name: agent.hello["role"] for agent in survey.agents}
    peers = [row for _, data in survey.answers("peers") for row in data]
    rows = instances((row for _, data in answers for row in data), peers, roles)
    waiting = [(agent.name, data["waiting_for"]) for agent, data in survey.answers("status") if data["waiting_for"]]

    def blocks(kept: Sequence[Row], width: int) -> list[Block]:
        tables = [Grid(BOOTSTRAP, kept)]
        for row in kept:
            # Missing ranks come last and matter most; there can be hundreds of the others.
            cut = max(0, len(row["ranks"]) - _MOST_RANKS)
            note = f", the last {_MOST_RANKS}" if cut else ""
            tables.append(Grid(RANKS, row["ranks"][cut:], f"ranks of {row['registry']}{note}"))
        lines = [[(f"{name} ", "bold"), (f"waits: {text}", "yellow")] for name, text in waiting]
        return [*tables, *([Text(lines)] if lines else [])]

    return Report(BOOTSTRAP, rows, len(answers), survey.faults, blocks=blocks)


def instances(
    answers: Iterable[Mapping[str, Any]], peers: Iterable[Mapping[str, Any]], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns one row per registry.

    Agents may report different states of a registry: the report with the most registered ranks is the latest.

    Args:
        answers: rows of the admin command `bootstrap`.
        peers: rows of the admin command `peers`.
        roles: roles of the agents that answered, by name.
    """
    by_registry: dict[str, list[Mapping[str, Any]]] = {}
    for row in answers:
        by_registry.setdefault(row["registry"], []).append(row)
    links = {(row["agent"], row["peer"]) for row in peers if row["state"] == "ready"}
    return [_instance(registry, answers, links, roles) for registry, answers in by_registry.items()]


def _instance(
    registry: str, answers: list[Mapping[str, Any]], links: Collection[tuple[str, str]], roles: Mapping[str, str]
) -> dict[str, Any]:
    latest = max(answers, key=lambda row: (len(row["registered"]), row["expected"] or 0))
    names = [rank["name"] for rank in latest["registered"]]
    asked_by = sorted(row["agent"] for row in answers)
    decode = [name for name in asked_by if roles.get(name) == "decode"]
    connected = [name for name in decode if names and all((name, each) in links for each in names)]
    return {
        "registry": registry,
        "state": _state(latest),
        "expected": latest["expected"],
        "registered": len(names),
        "missing": [_coordinates(rank, latest["sizes"]) for rank in latest["missing"]],
        "sizes": latest["sizes"],
        "decode_ranks": len(decode),
        "decode_connected": len(connected),
        # Registered ranks that did not answer have ended, or run outside the places that kvctl searches.
        "unanswered": [name for name in names if name not in roles],
        "text": latest["text"],
        "names": names,
        "asked_by": asked_by,
        "ranks": _ranks(latest, decode, links),
    }


def _state(row: Mapping[str, Any]) -> str:
    if row["expected"] is None:
        return "silent" if row["text"].startswith("no answer") else "waiting"
    if row["missing"]:
        return "waiting"
    return "refused" if row["text"] else "complete"


def _ranks(row: Mapping[str, Any], decode: list[str], links: Collection[tuple[str, str]]) -> list[dict[str, Any]]:
    registered = [
        {
            "rank": _coordinates(rank["rank"], row["sizes"]),
            "agent": rank["name"],
            "state": "registered",
            "connected": sum((name, rank["name"]) in links for name in decode),
            "endpoint": rank["endpoint"],
            "incarnation": rank["incarnation"],
        }
        for rank in row["registered"]
    ]
    unknown = {"connected": None, "endpoint": None, "incarnation": None}
    return registered + [
        {"rank": _coordinates(rank, row["sizes"]), "agent": None, "state": "missing", **unknown}
        for rank in row["missing"]
    ]


def _coordinates(rank: Mapping[str, int], sizes: Mapping[str, int] | None) -> str:
    """Formats the coordinates of a rank as `tp=2` or `dp=1 tp=0`: only the axes of size 2 or more."""
    axes = [f"{axis}={number}" for axis, number in rank.items() if sizes is None or sizes.get(axis, 0) > 1]
    return " ".join(axes) or "the only rank"
