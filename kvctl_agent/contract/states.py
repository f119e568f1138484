"""Room states (with SGLang's KVPoll names and numbers), states of peers, and the stages of a part."""

from __future__ import annotations

from enum import IntEnum, StrEnum

MAX_ROOM = (1 << 64) - 1
"""Largest room number."""

MAX_RANKS = 65_536
"""Largest number of ranks in an instance; bounds the work that the sizes sent by a peer can cause."""


class RoomState(IntEnum):
    """State of a room on one rank; the state over several ranks is their minimum, and `FAILED` is the lowest.

    Attributes:
        label: name in output and JSON: `WaitingForInput` for `WAITING_FOR_INPUT`.
        finished: whether the state is final.
    """

    label: str
    finished: bool

    FAILED = 0, "Failed"
    BOOTSTRAPPING = 1, "Bootstrapping"
    WAITING_FOR_INPUT = 2, "WaitingForInput"
    TRANSFERRING = 3, "Transferring"
    SUCCESS = 4, "Success"

    def __new__(cls, number: int, label: str) -> RoomState:
        state = int.__new__(cls, number)
        state._value_ = number
        state.label = label
        state.finished = label in ("Failed", "Success")
        return state


class PeerState(StrEnum):
    """State of a peer as one rank sees it."""

    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    REFUSED = "refused"


STATE_LABELS: tuple[str, ...] = tuple(state.label for state in RoomState)

# Stages of one part, in order; timeline events, `kvctl layers` and the bench use these names. A stage ends when:
# ready: its KV is computed; gate: grant, watermark and lease permit the write; queue: its transfer began;
# gather: it is copied into staging; post: it is posted to the transfer engine; wire: the engine reports completion;
# arrive: the decode rank received its tag; scatter: it is in its pages.
STAGES: tuple[str, ...] = ("ready", "gate", "queue", "gather", "post", "wire", "arrive", "scatter")

DRAINING = "it is draining: kvctl resume ends this"
"""Reason why an agent that is draining is not ready."""

UNREGISTERED = "its engine has unregistered its memory"
"""Reason why an agent cannot serve between `Agent.unregister` and `Agent.register`, as in the sleep mode of engines."""
