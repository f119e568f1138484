"""Times that a prefill rank's rooms took to transfer, and the cost of the next transfer that they predict.

The transfer of a room, as far as its request has to wait for it, begins when the engine has finished the prompt and
every decode rank of the room has opened it, and ends when the last of these ranks has all of it. Parts that were sent
before, while layers were computed, shorten it.

Rooms that are transferred at the same time slow each other. Each observation therefore has, beside the time that the
room took, the time that it would have taken alone if the rooms in transfer had shared the rank equally (processor
sharing). Both are measured in constant time per room: the rank's *virtual* time passes 1/n as fast while n rooms are in
transfer, so that the share of a room is the virtual time between its begin and its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ROOMS = 64
_MOST_PEERS = 4096  # limit of the table by peer name: peers choose their names
_HALF_LIFE_ROOMS = 24
_FIT_ROUNDS = 4
_OUTLIER = 2.0  # median deviations from which on a room counts less
_SHARING = (0.0, 0.5, 1.0)

_Floats = npt.NDArray[np.float64]


class Transferred(NamedTuple):
    """One finished transfer.

    Attributes:
        tokens: tokens that were transferred, without a prefix that decode had cached.
        took_ns: from begin to end.
        share_ns: virtual time from begin to end.
        ended_ns: monotonic time of the end.
        path: path of most parts of this rank; "" if it sent none.
    """

    tokens: int
    took_ns: int
    share_ns: int
    ended_ns: int
    path: str


@dataclass(slots=True)
class Transfer:
    """The transfer of one room in progress.

    Attributes:
        began_ns, began_virtual_ns: its begin in monotonic and in virtual time.
        arrived_ns: monotonic time at which the last decode rank so far had all of it; 0: none has.
    """

    tokens: int
    began_ns: int
    began_virtual_ns: float
    arrived_ns: int = 0


@dataclass(frozen=True, slots=True)
class TransferFit:
    """Cost of transfers by one prefill rank's instance to one decode rank, fitted to its latest rooms.

    Attributes:
        fixed_ns: time of a transfer apart from its size.
        ns_per_token: additional time of a token.
        sharing: share of the remaining time of other rooms in transfer that a room waits: 1 if all rooms share one
            resource equally, 0 if they do not slow each other.
        error_ratio: median relative deviation of the rooms from the fit.
        rooms: number of rooms.
        ended_ns: monotonic end of the latest room.
        path: path of that room.
    """

    fixed_ns: float
    ns_per_token: float
    sharing: float
    error_ratio: float
    rooms: int
    ended_ns: int
    path: str

    def alone_ns(self, tokens: int) -> float:
        """Returns the predicted time of a transfer of `tokens` tokens while no other room is in transfer."""
        return self.fixed_ns + tokens * self.ns_per_token


class TransferTimes:
    """Transfers of one prefill rank; the control thread calls `begin`, `arrived`, `cancel` and `end`.

    Any thread may call the other methods.
    """

    def __init__(self) -> None:
        self._by_peer: dict[str, deque[Transferred]] = {}
        self._counts: dict[str, int] = {}
        self._fits: dict[str, tuple[int, TransferFit]] = {}
        self._active: dict[int, Transfer] = {}
        self._virtual_ns = 0.0
        self._at_ns = 0

    def begin(self, room: int, tokens: int, at_ns: int) -> None:
        """Records that the transfer of a room begins at monotonic `at_ns`."""
        self._advance(at_ns)
        self._active[room] = Transfer(tokens, at_ns, self._virtual_ns)

    def arrived(self, room: int, at_ns: int) -> None:
        """Records that a decode rank had all of a room at monotonic `at_ns`, which may be past."""
        if transfer := self._active.get(room):
            transfer.arrived_ns = max(at_ns, transfer.arrived_ns)

    def cancel(self, room: int, at_ns: int) -> None:
        """Forgets the transfer of a room that has failed, or whose pages were recalled; ignores unknown rooms."""
        if room in self._active:
            self._advance(at_ns)
            del self._active[room]

    def end(self, room: int, peers: Collection[str], path: str, now_ns: int) -> None:
        """Records that all decode ranks of a room, `peers`, have it; ignores unknown rooms.

        Args:
            path: path of most of its parts from this rank; "" if it sent none.
            now_ns: present time, monotonic. The messages of the decode ranks were on their way since the room arrived.
        """
        if room not in self._active:
            return
        self._advance(now_ns)
        others = len(self._active)
        transfer = self._active.pop(room)
        ended_ns = transfer.arrived_ns or now_ns
        took_ns = max(1, ended_ns - transfer.began_ns)
        share_ns = self._virtual_ns - transfer.began_virtual_ns - (now_ns - ended_ns) / others
        done = Transferred(transfer.tokens, took_ns, min(max(1, round(share_ns)), took_ns), ended_ns, path)
        for peer in peers:
            latest = self._by_peer.get(peer)
            if latest is None:
                if len(self._by_peer) >= _MOST_PEERS:
                    continue
                latest = self._by_peer[peer] = deque(maxlen=_ROOMS)
            latest.append(done)
            self._counts[peer] = self._counts.get(peer, 0) + 1

    def fit(self, peer: str) -> TransferFit | None:
        """Returns the cost of transfers to a decode rank; None if no room was transferred to it."""
        count = self._counts.get(peer, 0)
        known = self._fits.get(peer)
        if known is not None and known[0] == count:
            return known[1]
        latest = self._by_peer.get(peer)
        if latest is None:
            return None
        fit = fit_transfers(latest.copy())
        self._fits[peer] = count, fit
        return fit

    def in_transfer(self) -> dict[int, int]:
        """Returns the tokens of each room in transfer, by number of the room."""
        return {room: transfer.tokens for room, transfer in self._active.copy().items()}

    def ahead(self, now_ns: int) -> list[tuple[int, float]]:
        """Returns for each room in transfer its tokens, and the virtual time in ns that it has had so far."""
        active, virtual_ns = self._active.copy(), self._virtual_ns
        virtual_ns += max(0, now_ns - self._at_ns) / max(1, len(active))
        return [(each.tokens, max(0.0, virtual_ns - each.began_virtual_ns)) for each in active.values()]

    def _advance(self, at_ns: int) -> None:
        if at_ns > self._at_ns:
            self._virtual_ns += (at_ns - self._at_ns) / max(1, len(self._active))
            self._at_ns = at_ns


def fit_transfers(rooms: Iterable[Transferred]) -> TransferFit:
    """Fits the cost of transfers to finished ones, of which there is at least one, oldest first.

    Errors are relative, since prompts of 16 tokens matter as much as prompts of 16,000. Older rooms and outliers weigh
    less. Of the assumptions about how rooms share the rank, the one that fits best is taken.
    """
    latest = list(rooms)
    tokens = np.array([each.tokens for each in latest], float)
    took = np.array([each.took_ns for each in latest], float)
    share = np.array([each.share_ns for each in latest], float)
    recent = 0.5 ** (np.arange(len(latest))[::-1] / _HALF_LIFE_ROOMS)
    best: tuple[float, float, float, float] | None = None
    for sharing in _SHARING:
        alone = took * (share / took) ** sharing
        fixed_ns, ns_per_token, error = _fit_line(tokens, alone, recent)
        if best is None or error < best[0] - 1e-9:
            best = error, fixed_ns, ns_per_token, sharing
    assert best is not None
    error, fixed_ns, ns_per_token, sharing = best
    last = latest[-1]
    return TransferFit(fixed_ns, ns_per_token, sharing, error, len(latest), last.ended_ns, last.path)


def _fit_line(x: _Floats, y: _Floats, weights: _Floats) -> tuple[float, float, float]:
    """Fits y = a + b·x with a, b ≥ 0 by relative errors; returns a, b and the median relative error."""
    predicted, robust = y, np.ones_like(y)
    a = b = error = 0.0
    for _ in range(_FIT_ROUNDS):
        a, b = _weighted_line(x, y, weights * robust / np.maximum(y, predicted) ** 2)
        predicted = a + b * x
        relative = np.abs(predicted / y - 1)
        error = float(np.median(relative))
        robust = np.minimum(1.0, _OUTLIER * max(error, 0.01) / np.maximum(relative, 1e-9))
    return a, b, error


def _weighted_line(x: _Floats, y: _Floats, weights: _Floats) -> tuple[float, float]:
    """Returns a, b ≥ 0 with the least weighted square error of a + b·x; a is 0 if all x are about equal."""
    total = weights.sum()
    mean_x, mean_y = float((weights * x).sum() / total), float((weights * y).sum() / total)
    spread = float((weights * (x - mean_x) ** 2).sum() / total)
    slope = float((weights * (x - mean_x) * (y - mean_y)).sum() / total) / spread if spread > 0 else 0.0
    through_origin = float((weights * x * y).sum() / max(float((weights * x * x).sum()), 1e-9))
    if spread <= (0.01 * mean_x) ** 2 or mean_y < slope * mean_x:
        return 0.0, through_origin
    return (mean_y, 0.0) if slope < 0 else (mean_y - slope * mean_x, slope)


def remaining_ns(fit: TransferFit, ahead: Sequence[tuple[int, float]]) -> list[float]:
    """Returns for each room in transfer the time for which a new room may have to wait, in ns, longest first.

    Args:
        ahead: rooms in transfer, as `TransferTimes.ahead` returns them.
    """
    left = [max(0.0, fit.alone_ns(tokens) - had) * fit.sharing for tokens, had in ahead]
    return sorted((each for each in left if each > 0), reverse=True)
