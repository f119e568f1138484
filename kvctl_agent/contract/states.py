"""Room states, with SGLang's KVPoll names and numbers."""

from __future__ import annotations

from enum import IntEnum


class RoomState(IntEnum):
    """State of one room on one rank; ranks combine by `min`, which lets `FAILED` win."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4

    @property
    def label(self) -> str:
        """The name people see: `WaitingForInput`, not `WAITING_FOR_INPUT`."""
        return _LABELS[self]

    @property
    def finished(self) -> bool:
        return self is RoomState.SUCCESS or self is RoomState.FAILED


_LABELS = {
    RoomState.FAILED: "Failed",
    RoomState.BOOTSTRAPPING: "Bootstrapping",
    RoomState.WAITING_FOR_INPUT: "WaitingForInput",
    RoomState.TRANSFERRING: "Transferring",
    RoomState.SUCCESS: "Success",
}

STATE_LABELS: tuple[str, ...] = tuple(state.label for state in RoomState)

# The life of one part, in order; timeline events, `kvctl layers` and the bench use these names.
# ready: KV computed; gate: grant, watermark and lease allow it; queue: a worker took it; gather: copied into
# staging; post: handed to the engine;
# wire: the engine reports it complete; arrive: the decode rank heard of it; scatter: in its pages.
STAGES: tuple[str, ...] = ("ready", "gate", "queue", "gather", "post", "wire", "arrive", "scatter")
