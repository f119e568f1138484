"""Telemetry that remembers nothing, for machines that are run again: only the clock and the rooms' records work."""

from __future__ import annotations

from typing import Any, cast

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord


class _Clock:
    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns

    def wall_ns(self, moment_ns: int) -> int:
        return moment_ns + self.offset_ns


class _Nobody:
    """Listens to nothing that is counted or noted."""

    def add(self, *_: Any) -> None: ...

    def observe(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...


class _Rooms:
    def __init__(self, role: Role) -> None:
        self._role: Role = role

    def open(self, room: int, nonce: int) -> RoomRecord:
        return RoomRecord(room, nonce, self._role, 0, event_limit=0)


class _Silence:
    def __init__(self, role: Role, offset_ns: int) -> None:
        self.clock = _Clock(offset_ns)
        self.metrics = self.recorder = _Nobody()
        self.rooms = _Rooms(role)

    def finish(self, *_: Any) -> None: ...

    def part(self, *_: Any) -> None: ...


def null_telemetry(role: Role, clock_offset_ns: int) -> Telemetry:
    """What a machine needs of telemetry and no more; failures carry the wall clock of the recording."""
    return cast(Telemetry, _Silence(role, clock_offset_ns))
