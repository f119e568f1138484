"""View of bootstrap: one row per prefill instance, combined from its registry and the answering agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvctl.render.view import Column, Kind, View, Width

RANKS = View(
    "bootstrap.ranks",
    (
        Column("rank", help="Coordinates in the instance."),
        Column("agent"),
        Column("state", styles={"registered": "green", "missing": "bold red"}, help="registered or missing."),
        Column(
            "connected", kind=Kind.COUNT, header="DECODE RANKS", help="Decode ranks connected to this prefill rank."
        ),
        Column("endpoint"),
        Column("incarnation", width=Width.NORMAL),
    ),
)


BOOTSTRAP = View(
    "bootstrap",
    (
        Column("registry", help="Address of the bootstrap registry."),
        Column(
            "state",
            styles={"complete": "green", "waiting": "yellow", "refused": "bold red", "silent": "bold red"},
            help="complete, waiting, refused or silent.",
        ),
        Column("expected", kind=Kind.COUNT, help="Prefill ranks of the instance."),
        Column("registered", kind=Kind.COUNT, help="Number of prefill ranks that have registered."),
        Column("missing", kind=Kind.LIST, help="Coordinates of prefill ranks that have not registered."),
        Column("decode_ranks", kind=Kind.COUNT, header="DECODE", help="Decode ranks that queried this registry."),
        Column(
            "decode_connected",
            kind=Kind.COUNT,
            header="CONNECTED",
            help="Decode ranks connected to every registered prefill rank.",
        ),
        Column(
            "unanswered", kind=Kind.LIST, width=Width.NORMAL, help="Registered prefill ranks that do not answer kvctl."
        ),
        Column("sizes", kind=Kind.MAP, width=Width.NORMAL, help="Ranks along each axis: dp, pp, cp, tp."),
        Column("text", width=Width.WIDE, help="The registry's description of the ranks that are missing or refused."),
        Column("names", kind=Kind.LIST, width=Width.WIDE, help="Prefill ranks that have registered."),
        Column("asked_by", kind=Kind.LIST, width=Width.WIDE, help="Agents that queried this registry."),
    ),
    sort=("registry",),
    empty="no prefill instance is known",
    also=("Ranks of each instance", RANKS),
)


def instances(
    answers: Iterable[Mapping[str, Any]], peers: Iterable[Mapping[str, Any]], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Combines the registries' states that all agents report; the one with the most ranks counts, since others are
    older.

    Args:
        answers: rows of `bootstrap`.
        peers: rows of `peers`.
        roles: roles of the agents that answered, by name.
    """
    by_registry: dict[str, list[Mapping[str, Any]]] = {}
    for row in answers:
        by_registry.setdefault(row["registry"], []).append(row)
    links = {(row["agent"], row["peer"]) for row in peers if row["state"] == "ready"}
    return [_instance(registry, answers, links, roles) for registry, answers in by_registry.items()]


def _instance(
    registry: str, answers: list[Mapping[str, Any]], links: set[tuple[str, str]], roles: Mapping[str, str]
) -> dict[str, Any]:
    best = max(answers, key=lambda row: (len(row["registered"]), row["expected"] or 0))
    names = [rank["name"] for rank in best["registered"]]
    asked_by = sorted(row["agent"] for row in answers)
    decode = [name for name in asked_by if roles.get(name) == "decode"]
    connected = [name for name in decode if names and all((name, each) in links for each in names)]
    return {
        "registry": registry,
        "state": _state(best),
        "expected": best["expected"],
        "registered": len(names),
        "missing": [place(rank, best["sizes"]) for rank in best["missing"]],
        "sizes": best["sizes"],
        "decode_ranks": len(decode),
        "decode_connected": len(connected),
        # Registered ranks that did not answer: they have ended, or run where kvctl does not look.
        "unanswered": [name for name in names if name not in roles],
        "text": best["text"],
        "names": names,
        "asked_by": asked_by,
        "ranks": _ranks(best, decode, links),
    }


def _state(row: Mapping[str, Any]) -> str:
    if row["expected"] is None:
        return "silent" if row["text"].startswith("no answer") else "waiting"
    if row["missing"]:
        return "waiting"
    return "refused" if row["text"] else "complete"


def _ranks(row: Mapping[str, Any], decode: list[str], links: set[tuple[str, str]]) -> list[dict[str, Any]]:
    there = [
        {
            "rank": place(rank["rank"], row["sizes"]),
            "agent": rank["name"],
            "state": "registered",
            "connected": sum((name, rank["name"]) in links for name in decode),
            "endpoint": rank["endpoint"],
            "incarnation": rank["incarnation"],
        }
        for rank in row["registered"]
    ]
    absent = [
        {"rank": place(rank, row["sizes"]), "agent": None, "state": "missing", "connected": None}
        | {"endpoint": None, "incarnation": None}
        for rank in row["missing"]
    ]
    return [*there, *absent]


def place(rank: Mapping[str, int], sizes: Mapping[str, int] | None) -> str:
    """Formats coordinates as `tp=2` or `dp=1 tp=0`: only the axes of size 2 or more."""
    axes = [f"{axis}={number}" for axis, number in rank.items() if sizes is None or sizes.get(axis, 0) > 1]
    return " ".join(axes) or "the only rank"
