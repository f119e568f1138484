"""Times that a prefill rank's rooms took to transfer, and the cost of the next transfer that they predict.

The transfer of a room, as far as its request has to wait for it, begins when the engine has finished the prompt and
the decode ranks to which this rank writes have opened the room, and ends when all decode ranks of the room have it.
Parts that were sent before, while layers were computed, shorten it.

A rank sends the bytes of its rooms by and large one after the other, so a room waits for the bytes of the rooms that
were in transfer when its own transfer began: two prompts behind a long one take as long as that. How much of these
bytes a room waits for is fitted as well, because rooms with many parts take turns, and ranks with cores to spare send
several at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter, mul
from statistics import median
from typing import NamedTuple

_ROOMS = 64
_MOST_PEERS = 4096  # peers choose their names, and in Kubernetes have new ones after each restart
_FIT_KEPT_NS = 1_000_000_000  # a fit takes 0.7 ms, and routers ask often
_HALF_LIFE_ROOMS = 24
_FIT_ROUNDS = 5
_OUTLIER = 2.0  # median deviations from which on a room counts less
_QUEUEING = (1.0, 0.5, 0.0)
_LONGEST_MESSAGE = 0.25  # of the room's time: round trips to a rank that is starting up take longer than rooms


class Ahead(NamedTuple):
    """Rooms in transfer, when a new one begins.

    Attributes:
        tokens: tokens of all of them.
        first_tokens: tokens of the first.
        first_ns: time for which it has been the first.
    """

    tokens: int = 0
    first_tokens: int = 0
    first_ns: int = 0


class Transferred(NamedTuple):
    """One finished transfer.

    Attributes:
        tokens: tokens that were transferred, without a prefix that decode had cached.
        took_ns: from begin to end.
        ended_ns: monotonic time of the end.
        path: path of most parts of this rank; "" if it sent none.
        ahead: rooms in transfer at the begin.
    """

    tokens: int
    took_ns: int
    ended_ns: int
    path: str
    ahead: Ahead = Ahead()


@dataclass(slots=True)
class Transfer:
    """The transfer of one room in progress.

    Attributes:
        began_ns: monotonic time of its begin.
        ahead: rooms in transfer at that time.
        arrived_ns: monotonic time at which the last decode rank so far had all of it; 0: none has.
    """

    tokens: int
    began_ns: int
    ahead: Ahead
    arrived_ns: int = 0


@dataclass(frozen=True, slots=True)
class TransferFit:
    """Cost of transfers by one prefill rank's instance to one decode rank, fitted to its latest rooms.

    Attributes:
        fixed_ns: time of a transfer apart from its size.
        ns_per_token: additional time of a token.
        queueing: how much of the bytes of rooms in transfer a new one waits for: 1 all, 0 none.
        error_ratio: median relative deviation of the rooms from the fit.
        rooms: number of rooms.
        ended_ns: monotonic end of the latest room.
        path: path of that room.
    """

    fixed_ns: float
    ns_per_token: float
    queueing: float
    error_ratio: float
    rooms: int
    ended_ns: int
    path: str

    def alone_ns(self, tokens: int) -> float:
        """Returns the predicted time of a transfer of `tokens` tokens while no other room is in transfer."""
        return self.fixed_ns + tokens * self.ns_per_token

    def wait_ns(self, ahead: Ahead) -> float:
        """Returns how long a new room waits for the rooms in transfer."""
        return self.queueing * _left(ahead, self.fixed_ns, self.ns_per_token) * self.ns_per_token


@dataclass(slots=True)
class _PeerTimes:
    """Latest transfers to one decode rank.

    Attributes:
        count: number of all transfers to it, also of those that are not kept.
        fit: the latest fit, the count at that time, and its monotonic time.
    """

    rooms: deque[Transferred] = field(default_factory=lambda: deque(maxlen=_ROOMS))
    count: int = 0
    fit: tuple[TransferFit, int, int] | None = None
    least_rtt_ns: int | None = None


class TransferTimes:
    """Transfers of one prefill rank."""

    def __init__(self) -> None:
        self._by_peer: OrderedDict[str, _PeerTimes] = OrderedDict()  # the least recently used first
        self._active: dict[int, Transfer] = {}  # in the order of their begin
        self._active_tokens = 0
        self._first_since_ns = 0

    def __len__(self) -> int:
        return len(self._active)

    def begin(self, room: int, tokens: int, at_ns: int) -> None:
        """Records that the transfer of a room begins at monotonic `at_ns`."""
        self.cancel(room, at_ns)
        if self._active:
            first = next(iter(self._active.values()))
            ahead = Ahead(self._active_tokens, first.tokens, max(0, at_ns - self._first_since_ns))
        else:
            ahead, self._first_since_ns = Ahead(), at_ns
        self._active[room] = Transfer(tokens, at_ns, ahead)
        self._active_tokens += tokens

    def arrived(self, room: int, peer: str, sent_ns: int, rtt_ns: int | None) -> None:
        """Records that a decode rank has all of a room.

        Args:
            sent_ns: monotonic time at which its message came, less the time for which it was kept there.
            rtt_ns: latest round trip. The message took half of the shortest one, as round trips to a busy rank include
                waiting there.
        """
        transfer = self._active.get(room)
        if transfer is None:
            return
        times = self._times(peer)
        if rtt_ns is not None:
            times.least_rtt_ns = rtt_ns if times.least_rtt_ns is None else min(rtt_ns, times.least_rtt_ns)
        longest = _LONGEST_MESSAGE * (sent_ns - transfer.began_ns)
        arrived_ns = sent_ns - round(min((times.least_rtt_ns or 0) / 2, longest))
        transfer.arrived_ns = max(arrived_ns, transfer.arrived_ns)

    def cancel(self, room: int, at_ns: int) -> None:
        """Forgets the transfer of a room that has failed, or whose pages were recalled; ignores unknown rooms."""
        if room in self._active:
            self._remove(room, at_ns)

    def keep(self, rooms: Set[int], at_ns: int) -> None:
        """Forgets the transfers of all other rooms: their end was among records that were lost."""
        for room in self._active.keys() - rooms:
            self._remove(room, at_ns)

    def end(self, room: int, peers: Collection[str], path: str, now_ns: int) -> None:
        """Records that all decode ranks of a room, `peers`, have it; ignores unknown rooms.

        Args:
            path: path of most of its parts from this rank; "" if it sent none.
            now_ns: present time, monotonic, which counts if no decode rank has said when it had the room.
        """
        if room not in self._active:
            return
        transfer = self._active[room]
        ended_ns = transfer.arrived_ns or now_ns
        self._remove(room, ended_ns)
        took_ns = max(1, ended_ns - transfer.began_ns)
        done = Transferred(transfer.tokens, took_ns, ended_ns, path, transfer.ahead)
        for peer in peers:
            times = self._times(peer)
            times.rooms.append(done)
            times.count += 1

    def fit(self, peer: str, now_ns: int) -> TransferFit | None:
        """Returns the cost of transfers to a decode rank, at monotonic `now_ns`; None if no room was transferred to it.

        The fit may lack rooms of the last second, but no more than it has.
        """
        times = self._by_peer.get(peer)
        if times is None or not times.count:
            return None
        if times.fit is not None:
            fit, count, fitted_ns = times.fit
            few_new = times.count < 2 * count and now_ns - fitted_ns < _FIT_KEPT_NS
            if few_new or count == times.count:
                return fit
        count = times.count
        fit = fit_transfers(times.rooms)
        times.fit = fit, count, now_ns
        return fit

    def in_transfer(self) -> dict[int, int]:
        """Returns the tokens of each room in transfer, by number of the room."""
        return {room: transfer.tokens for room, transfer in self._active.items()}

    def ahead(self, now_ns: int) -> Ahead:
        """Returns the rooms in transfer at monotonic `now_ns`."""
        tokens = list(self.in_transfer().values())
        return Ahead(sum(tokens), tokens[0], max(0, now_ns - self._first_since_ns)) if tokens else Ahead()

    def _times(self, peer: str) -> _PeerTimes:
        """Returns the times of a decode rank; takes the place of the least recently used one if there are too many."""
        times = self._by_peer.get(peer)
        if times is None:
            while len(self._by_peer) >= _MOST_PEERS:
                self._by_peer.popitem(last=False)
            times = self._by_peer[peer] = _PeerTimes()
        self._by_peer.move_to_end(peer)
        return times

    def _remove(self, room: int, at_ns: int) -> None:
        if next(iter(self._active)) == room:
            self._first_since_ns = max(at_ns, self._first_since_ns)
        self._active_tokens -= self._active.pop(room).tokens


def fit_transfers(rooms: Iterable[Transferred]) -> TransferFit:
    """Fits the cost of transfers to finished ones, of which there is at least one, oldest first.

    Errors are relative, since prompts of 16 tokens matter as much as prompts of 16,000. Older rooms and outliers weigh
    less. Of the assumptions about how much rooms wait for each other, the one that fits best is taken.
    """
    latest = list(rooms)
    took = [float(each.took_ns) for each in latest]
    recent = [0.5 ** (age / _HALF_LIFE_ROOMS) for age in reversed(range(len(latest)))]
    fits = []
    for queueing in _QUEUEING if any(any(each.ahead) for each in latest) else _QUEUEING[:1]:
        fixed_ns = ns_per_token = error = 0.0
        predicted, robust = took, [1.0] * len(latest)
        for _ in range(_FIT_ROUNDS):
            waited = [each.tokens + queueing * _left(each.ahead, fixed_ns, ns_per_token) for each in latest]
            weights = [
                age * sure / max(real, expected) ** 2
                for real, expected, age, sure in zip(took, predicted, recent, robust, strict=True)
            ]
            fixed_ns, ns_per_token = _weighted_line(waited, took, weights)
            predicted = [fixed_ns + ns_per_token * tokens for tokens in waited]
            relative = [abs(expected / real - 1) for real, expected in zip(took, predicted, strict=True)]
            error = median(relative)
            robust = [min(1.0, _OUTLIER * max(error, 0.01) / max(each, 1e-9)) for each in relative]
        fits.append((error, fixed_ns, ns_per_token, queueing))
    error, fixed_ns, ns_per_token, queueing = min(fits, key=itemgetter(0))
    last = latest[-1]
    return TransferFit(fixed_ns, ns_per_token, queueing, error, len(latest), last.ended_ns, last.path)


def _left(ahead: Ahead, fixed_ns: float, ns_per_token: float) -> float:
    """Returns the tokens of rooms ahead that are not sent yet."""
    sent = max(0.0, ahead.first_ns - fixed_ns) / ns_per_token if ns_per_token else 0.0
    return ahead.tokens - min(ahead.first_tokens, sent)


def _weighted_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Returns a, b ≥ 0 with the least weighted square error of a + b·x; a is 0 if all x are about equal."""
    total = sum(weights)
    mean_x, mean_y = _sum_of_products(weights, x) / total, _sum_of_products(weights, y) / total
    off = [each - mean_x for each in x]
    weighted = [weight * each for weight, each in zip(weights, off, strict=True)]
    spread = _sum_of_products(weighted, off) / total
    slope = _sum_of_products(weighted, [each - mean_y for each in y]) / total / spread if spread > 0 else 0.0
    if spread <= (0.01 * mean_x) ** 2 or mean_y < slope * mean_x:
        by_x = [weight * each for weight, each in zip(weights, x, strict=True)]
        return 0.0, _sum_of_products(by_x, y) / max(_sum_of_products(by_x, x), 1e-9)
    return (mean_y, 0.0) if slope < 0 else (mean_y - slope * mean_x, slope)


def _sum_of_products(x: Iterable[float], y: Iterable[float]) -> float:
    return float(sum(map(mul, x, y)))
