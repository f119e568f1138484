"""Rows of the documents of an observed rank: peers, costs, settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from kvctl_agent.contract.snapshots import ConfigRow, PeerRow, Role
from kvctl_agent.observer.documents import Builder, PeerCost
from kvctl_agent.telemetry.region import Document

Rows = Callable[[], Iterable[Any]]
"""Builds the rows of a document."""


def builders(
    engine: str, state: Builder, rooms: Rows, peers: Rows, others: Mapping[Document, Rows] | None = None
) -> dict[Document, Builder]:
    """Returns the builders of the documents of a rank of `engine`: its state, and those that have rows only."""
    rows = {Document.ROOMS: rooms, Document.PEERS: peers, **(others or {})}
    rows[Document.COSTS] = lambda: _unpredicted(engine, peers())
    return {Document.STATE: state, **{document: partial(_with_rows, build) for document, build in rows.items()}}


def _with_rows(build: Rows) -> Iterator[Mapping[str, Any]]:
    yield {}
    yield from build()


def peer_row(
    agent: str, role: Role, engine: str, name: str, endpoint: str, state: str, heard_ns: int | None, error: str | None
) -> PeerRow:
    """Returns the row of a peer; what no engine tells is None, and the observer fills in the rooms.

    Args:
        heard_ns: time since the peer's last sign of life.
    """
    unknown: PeerRow = dict.fromkeys(PeerRow.__annotations__)  # type: ignore[assignment]
    return {
        **unknown,
        "agent": agent,
        "peer": name,
        "role": "decode" if role == "prefill" else "prefill",
        "state": state,
        "endpoint": endpoint,
        "last_heard_ns": heard_ns,
        "lane": engine,
        "needed": True,
        "former": [],
        "rooms": 0,
        "last_error": error,
        "differences": [],
    }


def _unpredicted(engine: str, peers: Iterable[PeerRow]) -> Iterator[PeerCost]:
    """Yields the costs of peers without predictions: an engine does not tell when a forward ended."""
    for row in peers:
        yield {
            "peer": row["peer"],
            "incarnation": None,
            "rank": None,
            "state": row["state"],
            "reason": f"observe mode: {engine} owns the transfers",
            "page_tokens": 0,
            "page_bytes": None,
            "own_page_bytes": 0,
        }


def setting(key: str, value: float, unit: str, origin: str, help_text: str) -> ConfigRow:
    """Returns the row of an engine's setting that has the meaning of a configuration key."""
    return {
        "key": key,
        "value": value,
        "default": None,
        "origin": origin,
        "unit": unit,
        "runtime": False,
        "help": help_text,
    }


def variable_origin(variable: str) -> str:
    """Returns where an environment variable's value comes from."""
    return f"environment {variable}" if variable in os.environ else "default"
