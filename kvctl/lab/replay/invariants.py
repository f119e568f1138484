"""Names and texts of the invariants of a replay, which `decode_invariants` and `prefill_invariants` check.

The simulations in the tests know all ranks and check the transferred bytes. A replay has the inputs and actions of one
rank only, so its invariants are those that one rank can violate by itself.
"""

from __future__ import annotations

INVARIANTS: dict[str, str] = {
    "exception": "a machine raises nothing but LocalProtocolError, whatever its input",
    "two-owners": "no byte of the ring that may be written has two live owners",
    "serial-reused": "a serial identifies one grant and is never used again",
    "bad-grant": "a grant lies within the ring and belongs to an open room",
    "watermark-back": "the watermark never moves back",
    "gated-by-nobody": "a grant from an empty ring may be written at once",
    "scatter": "a part is scattered once, to its own pages, and only after its bytes landed in its granted region",
    "success-with-a-gap": "Success only when every planned byte is in its pages and its prefill ranks have accepted",
    "state-after-end": "a finished room never changes its state",
    "released-early": "pages are released once, and only when nothing can write or read them any more",
    "left-behind": "no state of a room remains once every rank has finished with it",
    "transfer-unasked": "a part is sent only to a decode rank that opened the room, and only as planned",
    "transfer-after-end": "no part is sent after its room has failed, was released, or was reported as drained",
    "transfer-ungranted": "a staged part is sent only into a region that is granted and not revoked",
    "transfer-gated": "a staged part is sent only when the watermark has passed its region",
    "transfer-without-lease": "a part is sent only to a peer that was heard from recently",
    "transfer-twice": "a part is sent once",
    "drained-in-flight": "drained and revoked are reported only when nothing of the room or region is in flight",
}


class Violation(Exception):
    """Raised when an invariant does not hold.

    Attributes:
        invariant: a key of `INVARIANTS`.
        room: number of the room that the violation concerns; None if there is none.
    """

    def __init__(self, invariant: str, text: str, room: int | None = None) -> None:
        assert invariant in INVARIANTS
        super().__init__(text)
        self.invariant = invariant
        self.room = room
