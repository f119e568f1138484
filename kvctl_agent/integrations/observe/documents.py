"""Rows of the documents of an observed rank: peers, costs, settings, and names that this host's ranks have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from kvctl_agent.contract.admin import LOCK_SUFFIX
from kvctl_agent.contract.snapshots import ConfigRow, PeerRow, Role
from kvctl_agent.observer.documents import PeerCost

Key = TypeVar("Key")
Value = TypeVar("Value")

_MOST_NAMES = 4096
_UNKNOWN_S = 10.0  # a peer may write its lock file after its first message


def with_rows(build: Callable[[], Iterable[Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields a document that has rows only."""
    yield {}
    yield from build()


def peer_row(
    agent: str, role: Role, engine: str, name: str, endpoint: str, state: str, heard_ns: int | None, error: str | None
) -> PeerRow:
    """Returns the row of a peer; what no engine tells is None, and the observer fills in the rooms.

    Args:
        agent, role: name and role of the observed rank.
        engine: its transfer engine.
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


def unpredicted(engine: str, peers: Iterable[PeerRow]) -> Iterator[PeerCost]:
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
            "calibrated": None,
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


class RankNames:
    """Names of this host's ranks by the endpoint that their peers know; the lock files have both.

    Args:
        directory: directory of the admin sockets.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: dict[str, tuple[str | None, float]] = {}  # with the time from which a missing name is looked up

    def name_of(self, endpoint: str) -> str:
        """Returns the name of the rank with this endpoint; the endpoint itself if it is on another host.

        The files are read once for each endpoint, before its first room, and again every 10 s for one that they lack.
        """
        name, due = self._names.get(endpoint, (None, 0.0))
        if name is None and (now := monotonic()) >= due:
            name = self._find(endpoint)
            put_bounded(self._names, endpoint, (name, now + _UNKNOWN_S), _MOST_NAMES)
        return endpoint if name is None else name

    def _find(self, endpoint: str) -> str | None:
        for path in self._directory.glob(f"*{LOCK_SUFFIX}"):
            try:
                lines = path.read_text(encoding="ascii", errors="replace").splitlines()
            except OSError:
                continue
            if lines[1:2] == [endpoint]:
                return path.name.removesuffix(LOCK_SUFFIX)
        return None


def put_bounded(entries: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Sets an entry as the latest one, and removes the earliest ones beyond `most`."""
    entries.pop(key, None)
    while len(entries) >= most:
        del entries[next(iter(entries))]
    entries[key] = value
