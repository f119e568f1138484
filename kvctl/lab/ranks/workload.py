"""Which rooms a bench runs, how long their prompts are, who decodes them and how many fit in memory at once.

Everything here follows from the request alone, so that every path of a run, and every run with the same seed, sees the
same rooms.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvctl.lab.ranks.bench_messages import Tokens

MIN_ROOMS = 24
MAX_ROOMS = 256
# Enough bytes that a run lasts, few enough that the slowest path of a default bench stays well under a minute.
ROOMS_BYTES = 3 << 30
# A lot drains at its end; with several windows' worth of rooms in it that is little of its time.
LOT_WINDOWS = 4
MIN_LOT_ROOMS = 12
LOT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How a load is cut: `in_flight` rooms at once (less than asked for where memory is short), lots of `rooms`."""

    in_flight: int
    rooms: int


def default_rooms(room_bytes: int, in_flight: int) -> int:
    """Rooms of a load when nobody said: at least two windows of them, more where rooms are small."""
    return max(MIN_ROOMS, 2 * in_flight, min(MAX_ROOMS, ROOMS_BYTES // max(1, room_bytes)))


def draw_tokens(tokens: Tokens, rooms: int, seed: int) -> list[int]:
    """Prompt length of each room: the given values in turn, or uniform over the given range."""
    if tokens.values:
        return [tokens.values[index % len(tokens.values)] for index in range(rooms)]
    source = random.Random(seed)
    return [source.randint(tokens.low, tokens.high) for _ in range(rooms)]


def draw_arrivals(rate: float, rooms: int, seed: int) -> list[float]:
    """When each room arrives, in milliseconds from the first: a Poisson process of `rate` a second."""
    source = random.Random(f"arrivals {seed}")
    gaps = [source.expovariate(rate) * 1e3 for _ in range(rooms - 1)]
    return list(accumulate(gaps, initial=0.0))


def mean_tokens(tokens: Tokens) -> float:
    """What `draw_tokens` gives on average."""
    return sum(tokens.values) / len(tokens.values) if tokens.values else (tokens.low + tokens.high) / 2


def most_tokens(tokens: Tokens) -> int:
    """The longest prompt `draw_tokens` can give."""
    return max(tokens.values) if tokens.values else tokens.high


def prefix_tokens(tokens: int, page_size: int, hit: float) -> int:
    """The decode side's cached prefix: that fraction of the prompt in whole pages, leaving one page to move."""
    pages = -(-tokens // page_size)
    return min(int(pages * hit), pages - 1) * page_size


def active_groups(in_flight: int, decode_dp: int) -> int:
    """Decode dp groups that get rooms: with fewer rooms in flight than groups, only that many."""
    return min(in_flight, decode_dp)


def decode_group(position: int, active: int) -> int:
    """Decode dp group of the room at a position of its lot.

    Shifted by one each time round: with equal sizes on both sides every prefill dp group meets every decode group.
    """
    return (position + position // active) % active


def windows(in_flight: int, decode_dp: int) -> list[int]:
    """Rooms in flight of each decode dp group; they add up to `in_flight`."""
    base, more = divmod(in_flight, decode_dp)
    return [base + (group < more) for group in range(decode_dp)]


def fit_batch(concurrency: int, rooms: int, room_bytes: int, most_rooms: int, decode_dp: int) -> BatchSizes:
    """Cut a load of `rooms` rooms into lots of which each fits in memory.

    Args:
        concurrency: rooms in flight asked for.
        rooms: rooms of the load.
        room_bytes: payload of a room of mean length.
        most_rooms: how many of the longest rooms the pools may hold at once, at least 1.
        decode_dp: decode dp groups; lots are whole rounds over them where they can be.
    """
    in_flight = min(concurrency, most_rooms, rooms)
    wanted = max(LOT_WINDOWS * in_flight, MIN_LOT_ROOMS, LOT_BYTES // max(1, room_bytes))
    size = min(wanted, most_rooms, rooms)
    lots = -(-rooms // size)
    size = -(-rooms // lots)  # even lots rather than a small last one
    active = active_groups(in_flight, decode_dp)
    rounded = -(-size // active) * active
    return BatchSizes(in_flight, rounded if rounded <= min(most_rooms, rooms) else size)


def cut(rooms: int, lot_rooms: int) -> list[tuple[int, int]]:
    """Lots as [first, end) of the rooms."""
    return [(first, min(first + lot_rooms, rooms)) for first in range(0, rooms, lot_rooms)]


def cut_to_fit(nbytes: Sequence[int], most_bytes: int) -> list[tuple[int, int]]:
    """Lots as [first, end) of rooms of these sizes, none over `most_bytes` unless a single room is."""
    lots = []
    first = held = 0
    for index, size in enumerate(nbytes):
        if held + size > most_bytes and index > first:
            lots.append((first, index))
            first, held = index, 0
        held += size
    return [*lots, (first, len(nbytes))]


def prefill_instance(position: int, groups: int, instances: int, decode_dp: int) -> int:
    """Prefill instance of the room at a position of its lot, in turns.

    Within an instance the position decides the dp group, so a turn lasts until each of its `groups` has had a room.
    Shifted by one now and then, so that every instance meets every decode group.
    """
    turn = position // groups
    return (turn + turn // (instances * decode_dp)) % instances


def group_windows(in_flight: int, groups: Sequence[int], sessions: Sequence[int], decode_dp: int) -> list[int]:
    """Most rooms in flight of each decode dp group, where requests say themselves when and where they run.

    All ranks of a group must open the same rooms in the same order. Turns of sessions become ready in an order of each
    rank's own, so there none may have to wait for another: the window is at least the number of the group's sessions.
    """
    here = [len({each for each, at in zip(sessions, groups, strict=True) if at == group}) for group in range(decode_dp)]
    alone = max(sessions, default=-1) < 0
    return [in_flight if alone else max(in_flight, count) for count in here]


def most_held(
    counts: Sequence[int], lots: Sequence[tuple[int, int]], group_of: Sequence[int], groups: int
) -> list[int]:
    """Pages (or items) that a rank of each dp group needs for its largest lot, number 0 (never used) included.

    Args:
        counts: those of every room of the load.
        lots: as from `cut`.
        group_of: dp group of every room; -1: none of these ranks has to do with it.
        groups: dp groups of the side.
    """
    most = [0] * groups
    for first, end in lots:
        held = [0] * groups
        for index in range(first, end):
            if group_of[index] >= 0:
                held[group_of[index]] += counts[index]
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return [count + 1 for count in most]
