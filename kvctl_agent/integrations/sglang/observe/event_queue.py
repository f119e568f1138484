"""Events of one of SGLang's managers, with what its chunks wait for."""

from __future__ import annotations

from time import monotonic_ns as now_ns
from typing import Any

from kvctl_agent.integrations.observe import event_queue
from kvctl_agent.integrations.sglang.observe.tracker import Tracker, Wait, Writer

_MOST_WAITS = 4096


class EventQueue(event_queue.EventQueue):
    """Events of one manager.

    Attributes:
        writers: prefill ranks that receivers have looked up, by the arguments of the look-up.
        waits: prefill: chunks that wait for a ring, by room, chunk and endpoint.
    """

    def __init__(self) -> None:
        super().__init__("SGLang")
        self.writers: dict[tuple[Any, ...], tuple[Writer, ...]] = {}
        self.waits: dict[tuple[int, int, str], Wait] = {}

    def wait(self, at_ns: int, key: tuple[int, int, str], pages: int, ring_round: int, end: int) -> None:
        """Records that a chunk may not be written yet; called again and again for the same chunk.

        Args:
            key: room, chunk and endpoint.
            ring_round, end: of its region in the decode rank's ring, for whose watermark it waits; end -1: it has none.
        """
        known = self.waits.get(key)
        if known is None or known.end != end:
            if len(self.waits) >= _MOST_WAITS:
                self.waits.clear()
            self.waits[key] = Wait(at_ns if known is None else known.since_ns, pages, ring_round, end)
            self.add(Tracker.parked, at_ns, key[0])

    def wait_over(self, key: tuple[int, int, str]) -> bool:
        """Records that a chunk may be written, or can never be; returns whether it had to wait."""
        if self.waits.pop(key, None) is None:
            return False
        self.add(Tracker.parked, now_ns(), key[0])
        return True

    def forget_waits(self, room: int) -> None:
        """Forgets the waits of a room that has ended."""
        if self.waits:
            for key in [key for key in self.waits.copy() if key[0] == room]:
                self.waits.pop(key, None)
