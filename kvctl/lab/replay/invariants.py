"""The rules that a replay checks, by the names under which a breach is reported."""

from __future__ import annotations

INVARIANTS: dict[str, str] = {
    "exception": "a machine raises nothing but LocalProtocolError, whatever it is told",
    "two-owners": "no byte of the ring that may be written has two live owners",
    "serial-reused": "a serial stands for one grant and is never used again",
    "bad-grant": "a grant lies within the ring and belongs to a room that is open",
    "watermark-back": "the watermark never goes back",
    "gated-by-nobody": "a grant given from an empty ring may be written at once",
    "scatter": "a part is scattered once, to its own pages, and only after its bytes have landed where it was granted",
    "success-with-a-gap": "Success only when every planned byte is in its pages and every rank has accepted",
    "state-after-end": "a room that has ended stays as it ended",
    "released-early": "pages are released only when nothing can be writing or reading them any more, and once",
    "left-behind": "nothing of a room is left when it is over everywhere",
    "transfer-unasked": "a part goes only to a decode rank that opened the room, and only as that asked",
    "transfer-after-end": "no part goes after its room has failed, was released, or was said to be drained",
    "transfer-ungranted": "a staged part goes only into a region that was granted and not given back",
    "transfer-gated": "a staged part goes only when the watermark has passed its region",
    "transfer-without-lease": "a part goes only to a peer that was heard from lately",
    "transfer-twice": "a part goes once",
    "drained-in-flight": "drained and revoked are said only when nothing of it is in flight",
}


class Broken(Exception):
    """An invariant does not hold.

    Attributes:
        invariant: one of `INVARIANTS`.
        room: the room that it is about, if it is one.
    """

    def __init__(self, invariant: str, text: str, room: int | None = None) -> None:
        assert invariant in INVARIANTS
        super().__init__(text)
        self.invariant = invariant
        self.room = room
