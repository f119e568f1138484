"""Decides which room goes where: a small router as every disaggregated fleet has one, with a seed.

Only ranks that can serve take part. A room needs all ranks of its prefill instance and of its decode dp group, and a
place at each of them, counting rooms whose pages are not free yet.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from kvctl.lab.demo.room_accounting import Room
from kvctl.lab.ranks.bench_messages import PlannedRank

# Of rooms that have a cached prefix, of those that are computed before they are asked for, of those sent in groups.
_WITH_PREFIX = 0.25
_AT_ONCE = 0.5
_IN_GROUPS = 0.3
_MOST_CHUNKS = 3
_MOST_GROUPS = 3
SHORT_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Manner:
    """How a room is computed and sent: fields of `contract.steady.SendRoom`."""

    chunks: int
    groups: int
    gap_s: float
    at_once: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One room to open.

    Attributes:
        manner: how it is computed.
        aborter: who gives it up after how long; None: nobody.
        hangs_at: the prefill rank whose last forward never ends; None: none.
        computes: tokens that its prefill ranks were told of; None: those that it has.
    """

    room: Room
    manner: Manner
    aborter: str | None
    abort_after_s: float
    hangs_at: str | None = None
    computes: int | None = None


class Router:
    """Chooses rooms; the same seed and the same answers of the fleet give the same rooms."""

    def __init__(
        self,
        ranks: Mapping[str, PlannedRank],
        *,
        seed: int,
        tokens: tuple[int, int],
        page_size: int,
        slots: int,
        concurrency: int,
        aborts: float = 0.0,
        longest_gap_s: float = SHORT_GAP_S,
    ) -> None:
        """Args:
        ranks: by name.
        tokens: shortest and longest prompt; lengths are log-uniform, as prompts are.
        slots: rooms that a rank has places for.
        concurrency: rooms in flight over all decode dp groups, shared evenly, so that a stuck one stops no other.
        aborts: share of rooms that somebody gives up.
        longest_gap_s: time between two forwards of a room at most.
        """
        self._ranks = ranks
        self._draw = random.Random(seed)
        self._tokens = tokens
        self._page_size = page_size
        self._slots = slots
        self._aborts = aborts
        self._longest_gap_s = longest_gap_s
        self._dps = sorted({rank["dp"] for rank in ranks.values() if rank["role"] == "decode"})
        self._share = -(-concurrency // len(self._dps))
        self._next = self._draw.randrange(1 << 20)
        self._prefill_dp = {
            rank["instance"]: 1 + max(other["dp"] for other in ranks.values() if other["instance"] == rank["instance"])
            for rank in ranks.values()
            if rank["role"] == "prefill"
        }
        self.held: dict[str, int] = dict.fromkeys(ranks, 0)

    def choose(
        self, serving: Mapping[str, Collection[int]], in_flight: Mapping[int, int], now_ns: int
    ) -> Choice | None:
        """The next room, or None where nobody could serve one now.

        Args:
            serving: prefill instances that each rank can exchange rooms with; ranks that are down have none.
            in_flight: rooms of each decode dp group that are not over.
        """
        free = [dp for dp in self._dps if in_flight.get(dp, 0) < self._share]
        pairs = [(instance, dp) for instance in self._prefill_dp for dp in self._groups(instance, serving, free)]
        if not pairs:
            return None
        instance, dp = self._draw.choice(pairs)
        return self.place(instance, dp, self._length(), now_ns)

    def place(
        self, instance: int, decode_dp: int, tokens: int, now_ns: int, prefix_tokens: int | None = None
    ) -> Choice:
        """A room for this prefill instance and decode dp group, whoever serves."""
        draw = self._draw
        number = self._next = self._next + draw.randint(1, 7)
        everybody = self._instance(instance)
        group = number % self._prefill_dp[instance]
        prefill = tuple(name for name in everybody if self._ranks[name]["dp"] == group)
        decode = tuple(self._group(decode_dp))
        if prefix_tokens is None:
            whole = tokens // self._page_size
            prefix_tokens = draw.randint(0, whole) * self._page_size if draw.random() < _WITH_PREFIX else 0
        room = Room(
            number=number,
            tokens=tokens,
            prefix_tokens=prefix_tokens,
            instance=instance,
            decode_dp=decode_dp,
            prefill=prefill,
            decode=decode,
            ranks=(*everybody, *decode),
            opened_ns=now_ns,
        )
        manner = Manner(
            chunks=draw.randint(1, _MOST_CHUNKS),
            groups=draw.randint(2, _MOST_GROUPS) if draw.random() < _IN_GROUPS else 1,
            gap_s=round(draw.uniform(0, self._longest_gap_s), 4),
            at_once=draw.random() < _AT_ONCE,
        )
        aborter = draw.choice([*prefill, *decode]) if draw.random() < self._aborts else None
        # Most within the time that a room takes, some long after.
        after_s = draw.expovariate(1 / 0.05)
        return Choice(room, manner, aborter, after_s)

    def taken(self, name: str) -> None:
        """A rank was told of a room."""
        self.held[name] += 1

    def freed(self, name: str) -> None:
        """A rank has released one."""
        self.held[name] -= 1

    def forget(self, name: str) -> None:
        """A rank's process is gone."""
        self.held[name] = 0

    def gap_s(self, rate: float, bursty: bool) -> float:
        """Time to the next arrival at `rate` rooms a second; bursty: most of them close together, then nothing."""
        if bursty:
            return self._draw.expovariate(rate * 8) if self._draw.random() < 0.9 else self._draw.expovariate(rate / 9)
        return self._draw.expovariate(rate)

    def _groups(self, instance: int, serving: Mapping[str, Collection[int]], free: Sequence[int]) -> list[int]:
        """Decode dp groups that can take a room of an instance."""
        if not all(serving[name] and self._has_place(name) for name in self._instance(instance)):
            return []
        return [
            dp for dp in free if all(instance in serving[name] and self._has_place(name) for name in self._group(dp))
        ]

    def _instance(self, instance: int) -> Sequence[str]:
        return [name for name, rank in self._ranks.items() if rank["instance"] == instance]

    def _group(self, dp: int) -> Sequence[str]:
        return [name for name, rank in self._ranks.items() if rank["role"] == "decode" and rank["dp"] == dp]

    def _has_place(self, name: str) -> bool:
        return self.held[name] < self._slots

    def _length(self) -> int:
        low, high = self._tokens
        return min(high, round(low * exp(self._draw.random() * log(high / low)))) if high > low else low
