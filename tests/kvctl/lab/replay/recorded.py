"""A simulated world that records the inputs of its machines as an agent's control loop does."""

from __future__ import annotations

import base64
from typing import Any

from kvctl.lab.replay.recordings import AgentRecording, Piece
from kvctl_agent.contract.recording import InputHeader
from kvctl_agent.layout.plan_inputs import PLAN_VERSION
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.peer import LocalInfo
from kvctl_agent.protocol.recording import InputLog
from tests.support.protocol.simulation import World


class Recorded:
    """Machine of a `World` that records its inputs."""

    def __init__(self, machine: Any, log: InputLog) -> None:
        self.machine = log.begin(machine)
        self.log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Action]:
        return self.log.handle(self.machine, event, now_ns)


class RecordedWorld(World):  # type: ignore[misc]
    """A world that records all inputs: `logs` has a log for each incarnation, by agent."""

    def __init__(self, *args: Any, capacity: int = 1 << 16, **kwargs: Any) -> None:
        self.capacity = capacity
        self.logs: dict[str, list[InputLog]] = {}
        super().__init__(*args, **kwargs)

    def _machine(self, local: LocalInfo) -> Any:
        log = InputLog(self.capacity)
        machine = self._build(local, asked=log.recording_paths)
        self.logs.setdefault(local.name, []).append(log)
        return Recorded(machine, log)


def header(name: str, role: str = "decode", **changes: Any) -> InputHeader:
    found: InputHeader = {
        "name": name,
        "role": role,
        "incarnation": "1",
        "pid": 1,
        "version": "0.1.0",
        "protocol_version": PROTOCOL_VERSION,
        "plan_version": PLAN_VERSION,
        "clock_offset_ns": 0,
        "taken": 0,
        "missed": 0,
        "fault": "",
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


def recording_of(log: InputLog, name: str = "agent", page_bytes: int = 1 << 20) -> AgentRecording:
    """Fetches a log page by page, as a client does."""
    since = until = None
    found = AgentRecording(header(name), 0)
    while True:
        page = log.pieces(since, until, page_bytes)
        for blob in page.blobs:
            body = base64.b64decode(blob["data"])
            found.pieces.append(Piece(blob["number"], blob["kind"], blob["first"], blob["count"], body))
        found.dropped += page.dropped
        since, until = page.next, page.end
        if since >= until:
            return found
