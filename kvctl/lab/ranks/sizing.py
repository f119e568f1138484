"""Fits a load into the memory there is: how many rooms at once, how large the pools and the rings.

A bench that asks for more rooms in flight than memory holds is limited and told so, not refused; only one that cannot
hold a single room is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kvctl.lab.ranks import workload
from kvctl.lab.ranks.bench_messages import Load, PlanRequest
from kvctl.lab.ranks.transfer_volume import TransferVolume
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.local_shard import local_shards
from kvctl_agent.layout.parallel import RankCoord

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory a fleet may take.

    Attributes:
        pool_bytes: of all pools together.
        ring_bytes: of one ring.
        room_bytes: of one room's pools, which may take what rings would have where there is little.
        detail: what to say after naming it, "" where nothing.
    """

    pool_bytes: int
    ring_bytes: int
    room_bytes: int
    detail: str = ""


def rooms_that_fit(budget: Budget, mover: TransferVolume, load: Load) -> int:
    """How many of the load's longest rooms all pools hold together, at least one.

    Raises:
        LayoutError: not even one.
    """
    nbytes = check_room_fits(budget, mover, workload.most_tokens(load.tokens))
    return max(1, budget.pool_bytes // nbytes)


def check_room_fits(budget: Budget, mover: TransferVolume, tokens: int) -> int:
    """Bytes that a room of so many tokens takes in all pools, of the prefill instance where that is most.

    Raises:
        LayoutError: they are not to be had.
    """
    nbytes = max(pool_bytes(mover, instance, tokens) for instance in range(len(mover.inputs)))
    if nbytes > budget.room_bytes:
        raise LayoutError(
            f"one room of {tokens} tokens needs {nbytes} bytes of KV pools, prefill and decode together, but only "
            f"{budget.room_bytes} are to be had{budget.detail}: use fewer --tokens or a smaller shape"
        )
    return nbytes


def pool_bytes(mover: TransferVolume, instance: int, tokens: int) -> int:
    """Bytes that a room takes in every rank of one dp group on either side."""
    items = mover.items(tokens)
    inputs = mover.inputs[instance]
    return sum(
        rank_bytes(mover, instance, role, RankCoord(0, pp, cp, tp), items)
        for role, side in (("prefill", inputs.prefill), ("decode", inputs.decode))
        for pp in range(side.pp)
        for cp in range(side.cp)
        for tp in range(side.tp)
    )


def rank_bytes(mover: TransferVolume, instance: int, role: str, at: RankCoord, items: Sequence[int]) -> int:
    """Bytes of so many pages (of a state: items) of each segment in one rank's pool."""
    inputs = mover.inputs[instance]
    side = inputs.prefill if role == "prefill" else inputs.decode
    return sum(
        here.num_layers * here.heads * here.segment.page_head_bytes * count
        for here, count in zip(local_shards(inputs.shape, inputs.page_size, side, at), items, strict=True)
    )


def ring_bytes(
    request: PlanRequest, budget: Budget, mover: TransferVolume, longest: Sequence[tuple[int, int]], wanted: int
) -> int:
    """Each decode rank's ring: what its rooms in flight need and one more, within the rings' share of the memory.

    Args:
        longest: (tokens, cached tokens) of each load's longest room.
        wanted: staged bytes of as many rooms as one decode rank has in flight, and of one more.

    Raises:
        LayoutError: `--ring-mb` is smaller than one part.
    """
    instances = range(len(mover.inputs))
    part = max((mover.largest_part(instance, *room) for instance in instances for room in longest), key=lambda p: p[0])
    part_bytes, arithmetic = part
    if request.ring_mb is None:
        return max(1, ceil(max(part_bytes, min(wanted, budget.ring_bytes)) / MIB)) * MIB
    if request.ring_mb * MIB < part_bytes:
        raise LayoutError(
            f"--ring-mb {request.ring_mb} is smaller than one part: {arithmetic} need {part_bytes} bytes, the ring has "
            f"{request.ring_mb * MIB}; give --ring-mb {-(-part_bytes // MIB)} or more, or a smaller --chunk-tokens"
        )
    return request.ring_mb * MIB
