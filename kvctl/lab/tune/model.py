"""Predicts what a room and a load cost on each path. Every term is one small function; all times are µs.

- A part's write costs its descriptors; a staged part is gathered, written once, scattered, and asks for a grant first.
- Parts of one share overlap: while one is written the next is gathered, so that k parts take the longest stage k times
  and the others once.
- Alone, a room takes what its busiest writer takes, but no less than all its work spread over the cores.
- Many rooms share what is scarce: the cores, the writers' lanes, and how many may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvctl.lab.tune.costs import Costs
from kvctl.lab.tune.room import Owed, Room

GRANT_US = 250.0
"""Request and grant over the control channel, and waking the scatter: between idle processes of one host."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one of a share's equal parts costs: before its write, its write, and after it."""

    gather_us: float
    write_us: float
    scatter_us: float

    @property
    def total_us(self) -> float:
        return self.gather_us + self.write_us + self.scatter_us


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is to be expected of one choice.

    Attributes:
        alone_us: of a room that has the machine to itself, from forward done to decode may start.
        rooms_per_s: at the load's concurrency.
        p50_us, p99_us: a room's time under that load: of a mean prompt and of one of the longest.
        bound: what limits it: "cores", "lane" or "latency".
        cpu_us: processor time of a room over all ranks.
    """

    alone_us: float
    rooms_per_s: float
    gb_per_s: float
    p50_us: float
    p99_us: float
    bound: str
    cpu_us: float


def parts_of(room: Room, chunk_tokens: int) -> int:
    """Parts that each share comes in."""
    return max(1, -(-room.tokens // chunk_tokens))


def part(owed: Owed, path: str, parts: int, costs: Costs) -> Part:
    """One of `parts` equal parts of a share on a path."""
    nbytes = owed.nbytes / parts
    if path != "staged":
        return Part(0.0, costs.lane.cost.write_us(max(1, owed.descriptors[path] // parts), nbytes), 0.0)
    return Part(
        costs.gather.us(nbytes, owed.src_row),
        costs.lane.cost.write_us(1, nbytes),
        costs.scatter.us(nbytes, owed.dst_row),
    )


def chain_us(one: Part, parts: int) -> float:
    """Equal parts one behind the other, each stage working on one part at a time."""
    return one.total_us + (parts - 1) * max(one.gather_us, one.write_us, one.scatter_us)


def busiest_us(room: Room, path: str, parts: int, costs: Costs) -> float:
    """The longest chain: a writer sends its shares one after the other, a reader scatters them as they come."""

    def chain(owed: Owed) -> float:
        return chain_us(part(owed, path, parts, costs), parts)

    return max(sum(chain(each) for each in room.of_writer(writer)) for writer in room.writers)


def cpu_us(room: Room, path: str, parts: int, costs: Costs) -> float:
    """Processor time of all ranks."""
    total = costs.rank_us * (len(room.writers) + len(room.readers))
    for each in room.owed:
        one = part(each, path, parts, costs)
        write = one.write_us if costs.lane.on_cpu else costs.lane.cost.us_per_write
        total += parts * (one.gather_us + write + one.scatter_us)
    return total


def lane_us(room: Room, path: str, parts: int, costs: Costs) -> float:
    """How long the busiest writer's lane is taken."""
    return max(
        sum(parts * part(each, path, parts, costs).write_us for each in room.of_writer(writer))
        for writer in room.writers
    )


def predict(
    room: Room,
    path: str,
    chunk_tokens: int,
    costs: Costs,
    concurrency: int,
    rate: float | None,
    mean_share: float,
) -> Prediction:
    """Predict one path.

    Args:
        concurrency: rooms in flight at most.
        rate: rooms that arrive in a second; None: as soon as there is room.
        mean_share: tokens of a mean prompt over those of `room`, which is one of the longest.
    """
    parts = parts_of(room, chunk_tokens)
    fixed = costs.room_us + (GRANT_US if path == "staged" else 0.0)
    work = cpu_us(room, path, parts, costs)
    longest = fixed + max(busiest_us(room, path, parts, costs), work / costs.cores)
    alone = fixed + (longest - fixed) * mean_share
    limits: dict[str, float] = {
        "cores": costs.cores * 1e6 / (work * mean_share),
        "latency": concurrency * 1e6 / alone,
    }
    if not costs.lane.on_cpu:
        limits["lane"] = 1e6 / (lane_us(room, path, parts, costs) * mean_share)
    bound, most = min(limits.items(), key=lambda item: item[1])
    done = most if rate is None else min(rate, most)
    waits: Callable[[float], float] = (
        (lambda alone_us: max(alone_us, concurrency * 1e6 / most))
        if rate is None or rate >= most
        else (lambda alone_us: alone_us / (1 - rate / most))
    )
    return Prediction(
        alone_us=alone,
        rooms_per_s=done,
        gb_per_s=done * room.nbytes * mean_share / 1e9,
        p50_us=waits(alone),
        p99_us=waits(alone) * longest / alone,
        bound=bound,
        cpu_us=work * mean_share,
    )


def ring_bytes(room: Room, path: str, concurrency: int, groups: int, chunk_tokens: int) -> int:
    """The ring of a decode rank in which no part waits for another room's: 0 where nothing is staged."""
    if path != "staged":
        return 0
    in_flight = -(-concurrency // groups)
    return room.readers_bytes * in_flight + room.readers_bytes // parts_of(room, chunk_tokens)


def exposed_us(compute_us: float, transfer_us: float, groups: int, group_us: float) -> float:
    """Transfer that is waited for after a forward whose layers go in so many groups; each costs its own hand-over."""
    whole = transfer_us / groups
    return max(whole, compute_us / groups + transfer_us - compute_us) + (groups - 1) * group_us
