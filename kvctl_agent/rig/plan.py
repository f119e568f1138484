"""Turns a bench's request into a plan, or says with the arithmetic why it cannot be: in one short, torch-free process.

It joins what neither the bench nor the agent knows: geometry from `layout`, what makes sense to ask for from `resolve`,
and what fits this machine's memory from `sizing`.
"""

from __future__ import annotations

from kvctl_agent.contract.rig import Load, Plan, PlannedRank, PlannedShare, PlanRequest
from kvctl_agent.layout.chunks import grid, page_count
from kvctl_agent.layout.heads import head_range
from kvctl_agent.layout.plan import PlanInputs, shares
from kvctl_agent.layout.side import Side
from kvctl_agent.rig import workload
from kvctl_agent.rig.resolve import check_load, plan_inputs, resolve_chunk_tokens, resolve_paths, resolve_shape
from kvctl_agent.rig.sizing import MIB, rank_page_bytes, ring_bytes, size_load

STAGED_PATHS = ("staged", "auto")


def make_plan(request: PlanRequest) -> Plan:
    """Resolve a request.

    Raises:
        LayoutError, ConfigError: what was asked for cannot be; the message has the arithmetic.
    """
    check_load(request)
    shape = resolve_shape(request)
    chunk_tokens = resolve_chunk_tokens(request)
    inputs = plan_inputs(request.prefill, request.decode, shape, request.page_size, chunk_tokens)
    paths = resolve_paths(request.paths, inputs)
    needs = [size_load(request, inputs, load) for load in request.loads]
    # Where nothing is staged the smallest ring stays: with it comes the scratch memory that a lane is measured with.
    ring = ring_bytes(request, inputs, needs) if any(path in STAGED_PATHS for path in paths) else MIB
    config: dict[str, str | int | float | bool] = {
        "transport": request.transport,
        "chunk_tokens": chunk_tokens,
        "staging_ring_mb": ring // MIB,
    }
    if request.workers is not None:
        config["workers"] = request.workers
    lot_rooms = max(end - first for need in needs for first, end in need.load["lots"])
    return Plan(
        shape=shape,
        page_size=request.page_size,
        page_order=request.page_order,
        chunk_tokens=chunk_tokens,
        transport=request.transport,
        paths=list(paths),
        ranks=[
            *_ranks("prefill", inputs, _most([need.prefill_pages for need in needs])),
            *_ranks("decode", inputs, _most([need.decode_pages for need in needs])),
        ],
        shares=_shares(inputs, request.loads[0], request.prefix_hit),
        loads=[need.load for need in needs],
        ring_bytes=ring,
        # A multiple of prefill dp, so that a room's position in its lot decides its prefill dp group.
        room_stride=-(-lot_rooms // inputs.prefill.dp) * inputs.prefill.dp,
        aux_slots=lot_rooms,
        config=config,
        notes=list(dict.fromkeys(need.note for need in needs if need.note)),
    )


def _most(pages: list[list[int]]) -> list[int]:
    """Pages of each dp group's pools that are enough for every load."""
    return [max(group) for group in zip(*pages, strict=True)]


def _ranks(role: str, inputs: PlanInputs, pages: list[int]) -> list[PlannedRank]:
    side: Side = inputs.prefill if role == "prefill" else inputs.decode
    page_bytes = rank_page_bytes(inputs, side)
    ranks = []
    for unique in range(side.size):
        at = side.coord(unique)
        ranks.append(
            PlannedRank(
                role="prefill" if role == "prefill" else "decode",
                unique=unique,
                dp=at.dp,
                pp=at.pp,
                cp=at.cp,
                tp=at.tp,
                heads=list(head_range(inputs.shape.num_kv_heads, side.tp, at.tp)),
                layers=[0, inputs.shape.num_layers],
                pool_pages=pages[at.dp],
                pool_bytes=pages[at.dp] * page_bytes,
            )
        )
    return ranks


def _shares(inputs: PlanInputs, load: Load, prefix_hit: float) -> list[PlannedShare]:
    """Who owes what to whom for one room of the load's longest prompt, to every decode dp group it may go to."""
    tokens = workload.most_tokens(load.tokens)
    pages = page_count(tokens, inputs.page_size)
    prefix = workload.prefix_tokens(tokens, inputs.page_size, prefix_hit) // inputs.page_size
    parts = len(grid(pages, prefix, inputs.chunk_pages))
    moved = pages - prefix
    rows = []
    # Room numbers 0 to dp - 1 meet every prefill dp group.
    for room, decode_dp in ((room, dp) for room in range(inputs.prefill.dp) for dp in range(inputs.decode.dp)):
        for share in shares(inputs, room, decode_dp):
            tp = inputs.decode.coord(share.reader).tp
            first = head_range(inputs.shape.num_kv_heads, inputs.decode.tp, tp).lo + share.dst_head
            rows.append(
                PlannedShare(
                    writer=share.writer,
                    reader=share.reader,
                    heads=[first, first + share.heads],
                    layers=[share.layer_lo, share.layer_hi],
                    bytes=share.payload_bytes(inputs.shape, moved * inputs.page_size),
                    parts=parts,
                    descriptors={
                        "bulk": 2 * share.num_layers * moved if share.whole_rows else None,
                        "slice": 2 * share.num_layers * moved * inputs.page_size,
                        "staged": parts,
                    },
                )
            )
    return rows
