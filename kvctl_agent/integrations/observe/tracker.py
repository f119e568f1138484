"""Base of the trackers of observed ranks, and names that ranks of this host have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from kvctl_agent.contract.admin import LOCK_SUFFIX
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import encodable
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord, RoomValues

Key = TypeVar("Key")
Value = TypeVar("Value")

_MOST_NAMES = 4096
_UNKNOWN_S = 10.0  # a peer may write its lock file after its first message
_LONGEST_TEXT = 2000


class EventTracker:
    """Writes the telemetry of one observed rank; one thread at a time calls its methods, each for one event.

    Times are monotonic ns.

    Args:
        directory: directory of the admin sockets of this host's ranks.

    Attributes:
        rooms: rooms for which the engine should make turns.
    """

    rooms: Mapping[Any, Any]

    def __init__(self, name: str, telemetry: Telemetry, directory: Path) -> None:
        self.name = name
        self.telemetry = telemetry
        self.note = telemetry.recorder.record
        self.name_of = RankNames(directory).name_of

    def lost(self, events: int, text: str, at_ns: int | None = None) -> None:
        """Counts and notes events that are not shown."""
        self.telemetry.metrics.add("kvctl_internal_errors_total", events)
        self.note("observe", text, "error", at_ns=at_ns)

    def open_record(self, number: int, at_ns: int, state: RoomState) -> RoomRecord:
        """Returns the record of a new room, of which nobody knows the planned bytes."""
        record = self.telemetry.open(number, 0, at_ns)
        values: RoomValues = record
        values.planned = None
        record.state(state, at_ns)
        return record

    def record_failure(self, record: RoomRecord, at_ns: int, code: str, text: str, rank: str | None = None) -> None:
        """Stores the cause of a failure, which `rank` has found, by default this one."""
        text, failed_ns = encodable(text)[:_LONGEST_TEXT], self.telemetry.clock.wall_ns(at_ns)
        record.fail({"rank": rank or self.name, "code": code, "at_ns": failed_ns, "text": text}, at_ns)
        self.telemetry.metrics.add("kvctl_room_failures_total", 1, code)
        severity = "info" if code == "ABORTED" else "warning"
        self.note("room", f"failed: {code}: {text}", severity, record.room, at_ns=at_ns)  # type: ignore[arg-type]


class RankNames:
    """Names of this host's ranks by the endpoint that their peers know; the lock files have both."""

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
