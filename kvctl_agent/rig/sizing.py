"""Fits a load into the memory there is: how many rooms at once, how large the pools and the rings.

A bench that asks for more rooms in flight than memory holds is limited and told so, not refused; only one that cannot
hold a single room is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl_agent.contract.rig import Load, PlannedLoad, PlannedRoom, PlanRequest
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import grid, page_count
from kvctl_agent.layout.cost import room_cost
from kvctl_agent.layout.heads import head_range
from kvctl_agent.layout.plan import PlanInputs, shares
from kvctl_agent.layout.side import Side
from kvctl_agent.rig import workload

MIB = 1 << 20
# Rings together get at most this part of the memory, pools the rest.
RING_SHARE = 4
MAX_RING_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Needs:
    """What one load needs of every rank.

    Attributes:
        load: the load, cut into lots.
        prefill_pages, decode_pages: pages of the pools of each dp group's ranks.
        reader_bytes: staged bytes of the largest room at one decode rank.
        window: rooms in flight at one decode rank.
        note: what people should know, or "".
    """

    load: PlannedLoad
    prefill_pages: list[int]
    decode_pages: list[int]
    reader_bytes: int
    window: int
    note: str


def size_load(request: PlanRequest, inputs: PlanInputs, load: Load) -> Needs:
    """Resolve one point of a sweep.

    Raises:
        LayoutError: not even one room fits.
    """
    page_size, prefill, decode = inputs.page_size, inputs.prefill, inputs.decode
    most = _rooms_that_fit(request, inputs, load)
    mean_bytes = max(1, round(workload.mean_tokens(load.tokens))) * inputs.shape.token_bytes
    count = request.rooms or workload.default_rooms(mean_bytes, min(load.concurrency, most))
    lot = workload.fit_lot(load.concurrency, count, mean_bytes, most, decode.dp)
    lots = workload.cut(count, lot.rooms)
    active = workload.active_groups(lot.in_flight, decode.dp)
    tokens = workload.draw_tokens(load.tokens, count, request.seed)
    prefixes = [workload.prefix_tokens(length, page_size, request.prefix_hit) for length in tokens]
    pages = [page_count(length, page_size) for length in tokens]
    kinds = [(total, prefix // page_size) for total, prefix in zip(pages, prefixes, strict=True)]
    costs = {kind: room_cost(inputs, *kind) for kind in set(kinds)}
    rooms = [
        PlannedRoom(
            tokens=tokens[index],
            prefix_tokens=prefixes[index],
            decode_dp=workload.decode_group(index - first, active),
            bytes=costs[kinds[index]].payload_bytes,
        )
        for first, end in lots
        for index in range(first, end)
    ]
    planned = PlannedLoad(
        concurrency=load.concurrency,
        in_flight=lot.in_flight,
        windows=workload.windows(lot.in_flight, decode.dp),
        tokens=load.tokens.text,
        tokens_mean=sum(tokens) / count,
        rooms=rooms,
        lots=[list(pair) for pair in lots],
    )
    note = ""
    if lot.in_flight < min(load.concurrency, count):
        note = f"concurrency {load.concurrency}: rooms in flight limited to {lot.in_flight} by memory"
    elif count < load.concurrency:
        note = f"concurrency {load.concurrency}: only {count} rooms to run"
    return Needs(
        load=planned,
        prefill_pages=workload.pool_pages(pages, lots, prefill.dp, lambda at: at % prefill.dp),
        decode_pages=workload.pool_pages(pages, lots, decode.dp, lambda at: workload.decode_group(at, active)),
        reader_bytes=max(cost.staging_bytes // max(1, cost.readers) for cost in costs.values()),
        window=-(-lot.in_flight // decode.dp),
        note=note,
    )


def rank_page_bytes(inputs: PlanInputs, side: Side) -> int:
    """Bytes of one page, K and V over all layers, in one rank's pool."""
    heads = head_range(inputs.shape.num_kv_heads, side.tp, 0)
    return inputs.shape.num_layers * inputs.page_size * (heads.hi - heads.lo) * inputs.shape.token_head_bytes


def ring_bytes(request: PlanRequest, inputs: PlanInputs, needs: Sequence[Needs]) -> int:
    """Each decode rank's ring: what its rooms in flight need and one more, within the rings' share of the memory.

    Raises:
        LayoutError: `--ring-mb` is smaller than one part.
    """
    longest = max(workload.most_tokens(load.tokens) for load in request.loads)
    pages = page_count(longest, inputs.page_size)
    prefix = workload.prefix_tokens(longest, inputs.page_size, request.prefix_hit) // inputs.page_size
    part_bytes = room_cost(inputs, pages, prefix).largest_part_bytes
    if request.ring_mb is None:
        wanted = max((need.window + 1) * need.reader_bytes for need in needs)
        share = min(MAX_RING_BYTES, request.memory_bytes // RING_SHARE // inputs.decode.size)
        return max(1, -(-max(part_bytes, min(wanted, share)) // MIB)) * MIB
    if request.ring_mb * MIB < part_bytes:
        shape = inputs.shape
        tokens = max(cell.count for cell in grid(pages, prefix, inputs.chunk_pages)) * inputs.page_size
        heads = max(share.heads for share in shares(inputs, 0, 0))
        raise LayoutError(
            f"--ring-mb {request.ring_mb} is smaller than one part: {shape.num_layers} layers x {tokens} tokens x "
            f"{heads} heads x {shape.token_head_bytes} B of K and V need {part_bytes} bytes, the ring has "
            f"{request.ring_mb * MIB}; give --ring-mb {-(-part_bytes // MIB)} or more, or a smaller --chunk-tokens"
        )
    return request.ring_mb * MIB


def _rooms_that_fit(request: PlanRequest, inputs: PlanInputs, load: Load) -> int:
    """How many of the load's longest rooms all pools hold together."""
    prefill, decode = inputs.prefill, inputs.decode
    pages = page_count(workload.most_tokens(load.tokens), inputs.page_size)
    # A room takes pages in every rank of one dp group on either side.
    page_bytes = rank_page_bytes(inputs, prefill) * (prefill.size // prefill.dp)
    page_bytes += rank_page_bytes(inputs, decode) * (decode.size // decode.dp)
    if pages * page_bytes > request.memory_bytes:
        raise LayoutError(
            f"one room of {pages * inputs.page_size} tokens needs {pages * page_bytes} bytes of KV pools, prefill and "
            f"decode together, but only {request.memory_bytes} are to be had: use fewer --tokens or a smaller shape"
        )
    budget = request.memory_bytes - request.memory_bytes // RING_SHARE
    return max(1, budget // (pages * page_bytes))
