"""Room states (with SGLang's KVPoll names and numbers), and the stages of a part."""

from __future__ import annotations

from enum import IntEnum


class RoomState(IntEnum):
    """State of one room on one rank; the state over several ranks is the minimum, so that `FAILED` wins."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4

    @property
    def label(self) -> str:
        """Name in output and JSON: `WaitingForInput` for `WAITING_FOR_INPUT`."""
        return _LABELS[self]

    @property
    def finished(self) -> bool:
        """Whether the state is final."""
        return self is RoomState.SUCCESS or self is RoomState.FAILED


_LABELS = {
    RoomState.FAILED: "Failed",
    RoomState.BOOTSTRAPPING: "Bootstrapping",
    RoomState.WAITING_FOR_INPUT: "WaitingForInput",
    RoomState.TRANSFERRING: "Transferring",
    RoomState.SUCCESS: "Success",
}

STATE_LABELS: tuple[str, ...] = tuple(state.label for state in RoomState)

# Stages of one part, in order; timeline events, `kvctl layers` and the bench use these names. A stage ends when:
# ready: its KV is computed; gate: grant, watermark and lease permit the write; queue: a transfer worker took the part;
# gather: it is copied into staging; post: it is posted to the transfer engine; wire: the engine reports completion;
# arrive: the decode rank received its tag; scatter: it is in its pages.
STAGES: tuple[str, ...] = ("ready", "gate", "queue", "gather", "post", "wire", "arrive", "scatter")
