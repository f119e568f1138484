"""How much staging a writer may have asked one reader for and not sent yet.

A reader grants what is asked for in the order of asking. Were all parts of a thousand rooms asked for at once, the
ring would be given to all parts of the first writer that came, then to all of the second one's, and no room would be
complete before the last lap. With each writer asking for little more than its share of the ring, in the order of its
rooms, the writers' parts of a room lie close together.

Rooms that are computed have an allowance of their own, which those that ask ahead of their forward cannot use up: such
a forward may be waiting for the very pages that a computed room frees when it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol.send_room import Part, PeerTransfer
from kvctl_agent.protocol.tombstones import RoomKey


def writer_quota(inputs: PlanInputs, ring_bytes: int) -> int:
    """One writer's share of a reader's ring, by how many ranks write to it for one room."""
    prefill, decode = inputs.prefill, inputs.decode
    writers = prefill.tp * prefill.pp * prefill.cp // (decode.tp * decode.pp)
    return ring_bytes // max(1, writers)


class StagingCredits:
    """Towards one reader. A room asks for all of its parts at once, when what was asked for before it allows it."""

    __slots__ = ("_ahead", "_asked", "_computed", "_refilling", "_share_bytes")

    def __init__(self, share_bytes: int) -> None:
        self._share_bytes = share_bytes
        self._refilling = False
        self._asked = {False: 0, True: 0}  # bytes, by whether the room was computed when it asked
        self._computed: dict[RoomKey, PeerTransfer] = {}  # legs of computed rooms that must wait, oldest first
        self._ahead: dict[RoomKey, PeerTransfer] = {}  # likewise, of rooms that are not computed yet

    @property
    def asked_bytes(self) -> int:
        return sum(self._asked.values())

    def __len__(self) -> int:
        return len(self._computed) + len(self._ahead)

    def take(self, leg: PeerTransfer, parts: Iterable[Part], *, computed: bool) -> bool:
        """Whether these parts of a leg may be asked for now; else the leg is one of those that `next` gives."""
        key = leg.room_key
        if self._allows(computed=computed):
            self._computed.pop(key, None)
            self._ahead.pop(key, None)
            for part in parts:
                part.counted = computed
                self._asked[computed] += part.nbytes
            return True
        if computed:
            self._ahead.pop(key, None)
            self._computed.setdefault(key, leg)
        elif key not in self._computed:
            self._ahead.setdefault(key, leg)
        return False

    def next(self) -> PeerTransfer | None:
        """A leg that had to wait and may ask now: `take` lets it through.

        Legs are let go in batches, when half of what computed rooms may ask for is sent: asked for one by one, each
        would cost both sides a turn of their control loops.
        """
        if not self._refilling:
            self._refilling = len(self) > 0 and (self._load <= self._share_bytes or not self._asked[True])
        if self._refilling:
            for waiting, computed in ((self._computed, True), (self._ahead, False)):
                if waiting and self._allows(computed=computed):
                    return waiting.pop(next(iter(waiting)))
            self._refilling = False
        return None

    def end(self, part: Part) -> None:
        """This part is sent, or will not be sent through the ring after all."""
        if part.counted is not None:
            self._asked[part.counted] -= part.nbytes
            part.counted = None

    def forget(self, leg: PeerTransfer) -> None:
        """This leg will ask for nothing any more."""
        self._computed.pop(leg.room_key, None)
        self._ahead.pop(leg.room_key, None)
        for part in leg.parts.values():
            self.end(part)

    def _allows(self, *, computed: bool) -> bool:
        if not computed:
            return self.asked_bytes < self._share_bytes or self.asked_bytes == 0
        return self._load < 2 * self._share_bytes or not self._asked[True]

    @property
    def _load(self) -> int:
        """What computed rooms must be sparing with. However large a room is that asked ahead, it counts as one share:
        what is computed must not wait for its forward."""
        return self._asked[True] + min(self._asked[False], self._share_bytes)
