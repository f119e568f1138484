"""Limits how much staging a prefill rank asks one decode rank for at a time."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol.prefill.send_room import Part, PeerTransfer
from kvctl_agent.protocol.tag import RoomKey


def writer_quota(inputs: PlanInputs, ring_bytes: int) -> int:
    """Returns one writer's share of a decode rank's ring in bytes: the ring divided by the writers of one room."""
    prefill, decode = inputs.prefill, inputs.decode
    writers = prefill.tp * prefill.pp * prefill.cp // (decode.tp * decode.pp)
    return ring_bytes // max(1, writers)


class StagingCredits:
    """Limits the bytes of staging that are requested from one decode rank and not sent yet.

    A decode rank grants regions in the order of requests. If all parts of a thousand rooms were requested at once, the
    ring would be granted to all parts of the first writer, then to all parts of the second, and no room would be
    complete before the last round. With each writer requesting little more than its share of the ring, in the order of
    its rooms, the writers' parts of a room lie close together.

    Computed rooms have credits of their own, which rooms that request ahead of their forward cannot use up: such a
    forward may be waiting for the very pages that a computed room frees once it is sent. A room requests all of its
    parts at once, as soon as earlier requests leave credits for it.

    Args:
        share_bytes: the writer's share of the ring.
    """

    __slots__ = ("_ahead", "_asked", "_computed", "_refilling", "_share_bytes")

    def __init__(self, share_bytes: int) -> None:
        self._share_bytes = share_bytes
        self._refilling = False
        self._asked = {False: 0, True: 0}  # bytes, by whether the room was computed when it requested them
        self._computed: dict[RoomKey, PeerTransfer] = {}  # waiting transfers of computed rooms, oldest first
        self._ahead: dict[RoomKey, PeerTransfer] = {}  # waiting transfers of rooms not computed yet

    @property
    def asked_bytes(self) -> int:
        return sum(self._asked.values())

    def __len__(self) -> int:
        return len(self._computed) + len(self._ahead)

    def charge(self, transfer: PeerTransfer, parts: Iterable[Part], *, computed: bool) -> bool:
        """Charges these parts if the credits allow it; otherwise the transfer waits until `next_waiting` returns it.

        Args:
            computed: all pages of the room are computed.

        Returns:
            whether the parts were charged and may be requested.
        """
        key = transfer.key
        if self._allows(computed=computed):
            self._computed.pop(key, None)
            self._ahead.pop(key, None)
            for part in parts:
                part.counted = computed
                self._asked[computed] += part.nbytes
            return True
        if computed:
            self._ahead.pop(key, None)
            self._computed.setdefault(key, transfer)
        elif key not in self._computed:
            self._ahead.setdefault(key, transfer)
        return False

    def next_waiting(self) -> PeerTransfer | None:
        """Returns a waiting transfer that `charge` will accept now; None if there is none.

        Transfers are released in batches, once half of the credits of computed rooms is free: if they were released one
        by one, each would cost both sides a turn of their control loops.
        """
        if not self._refilling:
            self._refilling = len(self) > 0 and (self._load <= self._share_bytes or not self._asked[True])
        if self._refilling:
            for waiting, computed in ((self._computed, True), (self._ahead, False)):
                if waiting and self._allows(computed=computed):
                    return waiting.pop(next(iter(waiting)))
            self._refilling = False
        return None

    def refund(self, part: Part) -> None:
        """Refunds the credits of a part that was sent, or that will not be sent through the ring after all."""
        if part.counted is not None:
            self._asked[part.counted] -= part.nbytes
            part.counted = None

    def forget(self, transfer: PeerTransfer) -> None:
        """Removes a transfer that will request nothing any more, and refunds the credits of its parts."""
        self._computed.pop(transfer.key, None)
        self._ahead.pop(transfer.key, None)
        for part in transfer.parts.values():
            self.refund(part)

    def _allows(self, *, computed: bool) -> bool:
        if not computed:
            return self.asked_bytes < self._share_bytes or self.asked_bytes == 0
        return self._load < 2 * self._share_bytes or not self._asked[True]

    @property
    def _load(self) -> int:
        """Bytes counted against the credits of computed rooms.

        Requests ahead of a forward count as one share at most, however large they are, so that computed rooms do not
        wait for another room's forward.
        """
        return self._asked[True] + min(self._asked[False], self._share_bytes)
