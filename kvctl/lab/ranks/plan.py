"""Turns the request of a bench or demo into a plan, or refuses it with the arithmetic; imports no torch.

It joins geometry from `layout`, legal combinations from `resolve`, and what fits this machine's memory from `sizing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvctl.lab.ranks.bench_messages import Plan, PlannedRank, PlannedShare, PlanRequest, Role
from kvctl.lab.ranks.budget import gpu_budget, host_budget
from kvctl.lab.ranks.geometry import model_shape, resolve_shape
from kvctl.lab.ranks.gpus import Placement, place
from kvctl.lab.ranks.loads import Needs, prefill_groups, resolve_load, segment_items
from kvctl.lab.ranks.resolve import (
    STAGED_PATHS,
    check_load,
    instance_inputs,
    resolve_chunk_tokens,
    resolve_paths,
    resolve_pipelines,
)
from kvctl.lab.ranks.sizing import MIB, rank_bytes, ring_bytes
from kvctl.lab.ranks.transfer_volume import Owed, TransferVolume
from kvctl.lab.ranks.workload import most_tokens
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.layout.local_shard import local_shards, segment_heads
from kvctl_agent.layout.plan_inputs import PlanInputs

_PATIENCE_S = 3600


def make_plan(request: PlanRequest) -> Plan:
    """Resolve a request.

    Raises:
        LayoutError, ConfigError: what was asked for cannot be; the message has the arithmetic.
        DeviceError: it needs GPUs, or what drives them, and they are not to be had.
    """
    check_load(request)
    placement = place(request)
    shape = resolve_shape(request)
    chunk_tokens = resolve_chunk_tokens(request)
    inputs = instance_inputs(request, model_shape(shape, request.page_size), chunk_tokens)
    mover = TransferVolume(inputs, shape)
    paths = resolve_paths(request.paths, inputs, request.device)
    pipelines = resolve_pipelines(request.pipelines)
    if placement.every:
        budget = gpu_budget(request, mover, placement, _longest_prompt(request))
    else:
        budget = host_budget(request)
    needs = [resolve_load(request, mover, load, budget) for load in request.loads]
    # Where nothing is staged the smallest ring stays: with it comes the scratch memory that a lane is measured with.
    ring = MIB
    if any(path in STAGED_PATHS for path in paths):
        longest = [need.longest for need in needs]
        staged = max((need.window + 1) * need.reader_bytes for need in needs)
        ring = ring_bytes(request, budget, mover, longest, staged)
    config: dict[str, str | int | float | bool] = {
        "transport": request.transport,
        "chunk_tokens": chunk_tokens,
        "staging_ring_mb": ring // MIB,
    }
    if any(each.prefill.cp > 1 for each in inputs):
        config["cp_mode"] = request.cp_mode
    if request.workers is not None:
        config["workers"] = request.workers
    if request.direct_sms is not None:
        config["direct_sms"] = request.direct_sms
    if request.requests or request.rate:
        # A room's number is known to both sides from the beginning of its lot; it may arrive much later.
        config["bootstrap_timeout_s"] = config["waiting_timeout_s"] = _PATIENCE_S
    lot_rooms = max(need.lot_rooms for need in needs)
    groups = prefill_groups(mover)
    instances = range(len(inputs))
    ranks = [
        *(rank for instance in instances for rank in _ranks("prefill", instance, mover, needs, placement)),
        *_ranks("decode", -1, mover, needs, placement),
    ]
    notes = [note for need in needs for note in need.notes] + _pipeline_notes(pipelines, needs)
    if request.compute == "gpu":
        notes += _compute_notes(ranks)
    return Plan(
        shape=shape,
        page_size=request.page_size,
        page_order=request.page_order,
        chunk_tokens=chunk_tokens,
        transport=request.transport,
        device=request.device,
        compute=request.compute,
        paths=list(paths),
        pipelines=list(pipelines),
        cp_mode=request.cp_mode,
        ranks=ranks,
        shares=[share for instance in instances for share in _shares(mover, instance, needs[0], request.device)],
        loads=[need.load for need in needs],
        ring_bytes=ring,
        # A multiple of every instance's dp, so that a room's position in its lot decides its prefill dp group.
        room_stride=-(-lot_rooms // groups) * groups,
        aux_slots=lot_rooms,
        config=config,
        notes=list(dict.fromkeys(notes)),
    )


def _ranks(
    role: Role, instance: int, mover: TransferVolume, needs: Sequence[Needs], placement: Placement
) -> Iterator[PlannedRank]:
    inputs = mover.inputs[max(0, instance)]
    side = inputs.prefill if role == "prefill" else inputs.decode
    items = segment_items(mover, needs, instance, role)
    before = sum(each.prefill.size for each in mover.inputs[: max(0, instance)])
    for unique in range(side.size):
        at = side.coord(unique)
        here = local_shards(inputs.shape, inputs.page_size, side, at)
        mine = [groups[at.dp] for groups in items]
        yield PlannedRank(
            role=role,
            instance=instance,
            unique=unique,
            dp=at.dp,
            pp=at.pp,
            cp=at.cp,
            tp=at.tp,
            heads=[here[0].head_lo, here[0].head_hi],
            layers=[here[0].layer_lo, here[0].layer_hi],
            pool_pages=mine[0],
            state_slots={each.segment.name: mine[each.segment.index] for each in here if each.segment.state},
            pool_bytes=rank_bytes(mover, max(0, instance), role, at, mine),
            device=placement.of(role, before + unique),
        )


def _shares(mover: TransferVolume, instance: int, need: Needs, device: str) -> Iterator[PlannedShare]:
    """Who owes what to whom for one of the load's longest rooms, to every decode dp group it may go to."""
    inputs = mover.inputs[instance]
    # Room numbers 0 to dp - 1 meet every prefill dp group.
    for room in range(inputs.prefill.dp):
        for decode_dp in range(inputs.decode.dp):
            for owed in mover.owed(instance, *need.longest, room, decode_dp):
                yield _share(inputs, instance, owed, device)


def _share(inputs: PlanInputs, instance: int, owed: Owed, device: str) -> PlannedShare:
    share = owed.share
    segment = inputs.segments[share.segment]
    first = segment_heads(segment, inputs.decode.tp, inputs.decode.coord(share.reader).tp).lo + share.dst_head
    pages = sum(owed.parts)
    return PlannedShare(
        instance=instance,
        writer=share.writer,
        reader=share.reader,
        segment=segment.name,
        heads=[first, first + share.heads],
        layers=[share.layer_lo, share.layer_hi],
        bytes=owed.payload_bytes,
        parts=len(owed.parts),
        descriptors={
            "bulk": share.num_layers * len(segment.planes) * pages if share.whole_rows else None,
            "slice": share.num_layers * sum(plane.rows for plane in segment.planes) * pages,
            "staged": len(owed.parts),
            # None at all: what is counted here is kernels.
            "direct": len(owed.parts) if device == "cuda" else None,
        },
    )


def _longest_prompt(request: PlanRequest) -> int:
    if request.requests:
        return max(each.tokens for each in request.requests)
    return max(most_tokens(load.tokens) for load in request.loads)


def _pipeline_notes(pipelines: Sequence[str], needs: Sequence[Needs]) -> list[str]:
    """Layer groups that the formula's threshold leaves out are no fault, but people should know."""
    threshold = KEYS_BY_NAME["pipeline_min_tokens"].default
    assert isinstance(threshold, int)
    longest = max(need.longest[0] for need in needs)
    if longest >= threshold or not {"on", "measured"} & set(pipelines):
        return []
    return [
        f"pipeline: every prompt is shorter than pipeline_min_tokens = {threshold} and takes the plain path; give "
        f"longer --tokens, or layers per group as a number"
    ]


def _compute_notes(ranks: Sequence[PlannedRank]) -> list[str]:
    """Where computing for real is not what it is on as many GPUs as the instance would have."""
    notes = []
    computing = [rank for rank in ranks if rank["role"] == "prefill"]
    for gpu, count in sorted(Counter(rank["device"] for rank in computing).items()):
        if count > 1:
            notes.append(f"compute: {count} prefill ranks share GPU {gpu} and compete for it")
    if any(rank["pp"] for rank in computing):
        notes.append("compute: pipeline stages do not wait for each other's layers")
    return notes
