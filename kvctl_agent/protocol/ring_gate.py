"""A writer's view of one reader's ring: which granted regions it may write now."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl_agent.protocol.ring import Position, may_write


class RingGate:
    """The latest watermark heard from one incarnation of one reader.

    A watermark of another incarnation must not open new grants, nor an old high sequence mask new ones: a new
    incarnation gets a new Gate.
    """

    __slots__ = ("heard_ns", "position", "sequence")

    def __init__(self) -> None:
        self.position = Position(0, 0)
        self.sequence = -1
        self.heard_ns = 0

    def hear(self, watermark: Sequence[int], now_ns: int) -> bool:
        """Take a (round, tail, sequence) from the reader; True when it moved. Late or malformed ones change nothing."""
        if len(watermark) != 3:
            return False
        round_, tail, sequence = watermark
        position = Position(round_, tail)
        if sequence < self.sequence or (sequence == self.sequence and position <= self.position):
            return False
        self.sequence, self.position, self.heard_ns = sequence, position, now_ns
        return True

    def open(self, round_: int, end: int) -> bool:
        return may_write(round_, end, self.position)
