"""Generates the rooms of each load (lengths, arrivals, prefill instance, decode dp group) and splits them into batches.

The rooms depend on the request alone, so all paths of a bench, and all benches with the same seed, run the same rooms.
A batch consists of consecutive rooms that fit in memory together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvctl.lab.ranks.plan import PlannedLoad, PlannedRoom
from kvctl.lab.ranks.request import Load, PlanRequest, Role, draw_arrivals
from kvctl.lab.ranks.sizing import Budget, check_room_fits
from kvctl.lab.ranks.transfer_volume import TransferVolume

MIN_ROOMS = 28
MAX_ROOMS = 256
# Enough bytes for a useful run, and few enough that the slowest path of a default bench takes well under a minute.
ROOMS_BYTES = 3 << 30
# Compared paths take turns by batch, and what tells their rates apart is the spread over the batches.
ROUNDS = 7
# At the end of a batch fewer rooms than the window are in flight. With the rooms of several windows in a batch, this
# phase is a small part of its time. Large rooms share the cores from start to end, so that one window is enough: on two
# cores, 4 rooms of 128 MiB at a time had the rate of 12.
BATCH_WINDOWS = 4
MIN_BATCH_ROOMS = 12
BATCH_BYTES = 512 << 20
# A GPU moves a room in half a millisecond: four windows of eight rooms took 20 ms, of which start and end took 3.
GPU_BATCH_WINDOWS = 16
GPU_BATCH_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class LoadNeeds:
    """A planned load, with the figures that size the pools and rings of the ranks.

    Attributes:
        longest: (tokens, cached tokens) of the longest room.
        reader_bytes: maximum bytes that one room stages in the ring of one decode rank.
        window: maximum number of rooms in flight at one decode rank.
    """

    load: PlannedLoad
    longest: tuple[int, int]
    reader_bytes: int
    window: int
    notes: tuple[str, ...]

    @property
    def batch_rooms(self) -> int:
        """Number of rooms in the largest batch."""
        return max(end - first for first, end in self.load["batches"])


def prefill_groups(volume: TransferVolume) -> int:
    """Returns the least common multiple of the dp sizes of all prefill instances.

    A room's position in its batch modulo this number determines its dp group in each prefill instance.
    """
    return lcm(*(inputs.prefill.dp for inputs in volume.inputs))


def segment_items(volume: TransferVolume, needs: Sequence[LoadNeeds], instance: int, role: Role) -> list[list[int]]:
    """Returns the number of pages, or state items, that a rank's pool needs for all loads, as `[segment][dp group]`.

    Args:
        instance: prefill instance; ignored for decode ranks.
    """
    inputs = volume.inputs[max(0, instance)]
    groups = (inputs.prefill if role == "prefill" else inputs.decode).dp
    most: list[list[int]] = []
    for need in needs:
        rooms = need.load["rooms"]
        items = [volume.items(room["tokens"], role) for room in rooms]
        if role == "prefill":
            starts = [first for first, end in need.load["batches"] for _ in range(first, end)]
            group_of = [
                (index - starts[index]) % groups if room["instance"] == instance else -1
                for index, room in enumerate(rooms)
            ]
        else:
            group_of = [room["decode_dp"] for room in rooms]
        batches = [(first, end) for first, end in need.load["batches"]]
        held = [
            most_held([each[segment] for each in items], batches, group_of, groups)
            for segment in range(len(inputs.segments))
        ]
        most = [[max(pair) for pair in zip(*both, strict=True)] for both in zip(most or held, held, strict=True)]
    return most


def resolve_load(request: PlanRequest, volume: TransferVolume, load: Load, budget: Budget) -> LoadNeeds:
    """Generates the rooms of one point of a sweep, in closed loop or with Poisson arrivals, and batches them.

    Raises:
        LayoutError: the budget does not hold one room.
    """
    decode_dp = request.decode.dp
    most = max(1, budget.pool_bytes // check_room_fits(budget, volume, load.tokens.longest))
    mean_bytes = volume.room_bytes(0, max(1, round(load.tokens.mean)), 0).payload
    count = load.rooms or request.rooms or default_rooms(mean_bytes, min(load.concurrency, most))
    in_flight, batch_rooms = fit_batch(load.concurrency, count, mean_bytes, most, decode_dp, request.device == "cuda")
    batches, limits = cut(count, batch_rooms), windows(in_flight, decode_dp)
    active, groups, instances = min(in_flight, decode_dp), prefill_groups(volume), len(volume.inputs)
    lengths = load.tokens.draw(count, random.Random(request.seed))
    arrivals = draw_arrivals(request.rate, count, request.seed) if request.rate else None
    rooms = []
    for first, end in batches:
        for index, tokens in enumerate(lengths[first:end], first):
            instance = prefill_instance(index - first, groups, instances, decode_dp)
            cached = prefix_tokens(tokens, request.decode_run, request.prefix_hit)
            rooms.append(
                PlannedRoom(
                    tokens=tokens,
                    prefix_tokens=cached,
                    instance=instance,
                    decode_dp=decode_group(index - first, active),
                    bytes=volume.room_bytes(instance, tokens, cached).payload,
                    arrival_ms=None if arrivals is None else arrivals[index] - arrivals[first],
                    output_tokens=request.output_tokens,
                )
            )
    notes: tuple[str, ...] = ()
    if in_flight < min(load.concurrency, count):
        limited = f"rooms in flight limited to {in_flight} by memory{budget.detail}"
        notes = (f"concurrency {load.concurrency}: {limited}",)
    elif count < load.concurrency:
        notes = (f"concurrency {load.concurrency}: only {count} rooms to run",)
    kinds = {(room["instance"], room["tokens"], room["prefix_tokens"]) for room in rooms}
    return LoadNeeds(
        load=PlannedLoad(
            concurrency=load.concurrency,
            in_flight=in_flight,
            windows=limits,
            tokens=load.tokens.text,
            tokens_mean=sum(lengths) / count,
            rooms=rooms,
            batches=[list(batch) for batch in batches],
        ),
        longest=max((tokens, prefix) for _, tokens, prefix in kinds),
        reader_bytes=max(volume.room_bytes(*kind).reader_staging for kind in kinds),
        window=max(limits),
        notes=notes,
    )


def default_rooms(room_bytes: int, in_flight: int) -> int:
    """Returns the default number of rooms of a load: at least twice the rooms in flight, more if rooms are small."""
    return max(MIN_ROOMS, 2 * in_flight, min(MAX_ROOMS, ROOMS_BYTES // max(1, room_bytes)))


def prefix_tokens(tokens: int, page_size: int, hit: float) -> int:
    """Returns the length of the prefix that the decode side has cached, in whole pages.

    Args:
        page_size: tokens of a page of the decode side, on all cp ranks together.
        hit: fraction of the prompt that is cached; at least one page remains to be transferred.
    """
    pages = -(-tokens // page_size)
    return min(int(pages * hit), pages - 1) * page_size


def decode_group(position: int, active: int) -> int:
    """Returns the decode dp group of the room at a position of its batch.

    Rooms go to the first `active` groups in rotation. Each round starts one group later: otherwise, with equal dp sizes
    on both sides, a prefill dp group would always send to the same decode dp group.
    """
    return (position + position // active) % active


def windows(in_flight: int, decode_dp: int) -> list[int]:
    """Divides `in_flight` rooms evenly among the decode dp groups; returns the number of each group."""
    base, more = divmod(in_flight, decode_dp)
    return [base + (group < more) for group in range(decode_dp)]


def fit_batch(
    concurrency: int, rooms: int, room_bytes: int, most_rooms: int, decode_dp: int, on_gpus: bool = False
) -> tuple[int, int]:
    """Returns (rooms in flight, rooms per batch) such that every batch fits in memory, and there are `ROUNDS` or fewer.

    Args:
        room_bytes: payload of a room of mean length.
        most_rooms: number of rooms of maximum length that the pools hold at once, at least 1.
        decode_dp: number of decode dp groups; if possible, a batch has the same number of rooms for each.
    """
    in_flight = min(concurrency, most_rooms, rooms)
    windows, nbytes = (GPU_BATCH_WINDOWS, GPU_BATCH_BYTES) if on_gpus else (BATCH_WINDOWS, BATCH_BYTES)
    least = min(max(windows * in_flight, MIN_BATCH_ROOMS), max(in_flight, nbytes // max(1, room_bytes)))
    size = min(max(least, -(-rooms // ROUNDS)), most_rooms, rooms)
    batches = -(-rooms // size)
    size = -(-rooms // batches)  # even batches rather than a small last one
    active = min(in_flight, decode_dp)
    rounded = -(-size // active) * active
    return in_flight, rounded if rounded <= min(most_rooms, rooms) else size


def cut(rooms: int, batch_rooms: int) -> list[tuple[int, int]]:
    """Divides rooms into batches of `batch_rooms`, the last of which may be smaller; returns their [first, end)."""
    return [(first, min(first + batch_rooms, rooms)) for first in range(0, rooms, batch_rooms)]


def prefill_instance(position: int, groups: int, instances: int, decode_dp: int) -> int:
    """Returns the prefill instance of the room at a position of its batch.

    The instances take turns of `groups` consecutive rooms, so that each dp group of an instance gets rooms. The
    rotation shifts by one periodically, so that every instance sends to every decode dp group.

    Args:
        groups: result of `prefill_groups`.
    """
    turn = position // groups
    return (turn + turn // (instances * decode_dp)) % instances


def most_held(
    counts: Sequence[int], batches: Sequence[tuple[int, int]], group_of: Sequence[int], groups: int
) -> list[int]:
    """Returns the pages, or state items, that a rank of each dp group needs for its largest batch, plus page 0.

    Args:
        counts: number of pages of each room of the load.
        group_of: dp group of each room; -1 if the instance takes no part in the room.
    """
    most = [0] * groups
    for first, end in batches:
        held = [0] * groups
        for index in range(first, end):
            if group_of[index] >= 0:
                held[group_of[index]] += counts[index]
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return [count + 1 for count in most]
