"""Computes the plan of a bench or demo from its request, and reports with the arithmetic why a request is impossible.

Importing this module imports numpy, but not torch. Commands use it through `planner`, which imports it when needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvctl.lab.ranks.geometry import model_shape, resolve_shape, side_of
from kvctl.lab.ranks.plan import Plan, PlannedRank, PlannedShare
from kvctl.lab.ranks.request import (
    COMPUTES,
    DEVICES,
    PAGE_ORDERS,
    PIPELINES,
    STAGED_PATHS,
    PlanRequest,
    Request,
    Role,
    choose,
)
from kvctl.lab.ranks.sizing import MIB, Placement, gpu_budget, host_budget, place, rank_bytes, ring_bytes
from kvctl.lab.ranks.transfer_volume import OwedParts, TransferVolume
from kvctl.lab.ranks.workload import LoadNeeds, prefill_groups, resolve_load, segment_items
from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.layout.chunks import chunk_pages, page_count, prefix_pages
from kvctl_agent.layout.parallel import head_range, local_shards
from kvctl_agent.layout.plan import transfer_slices
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.sizes import check_size

# Prefill ranks create all rooms of a batch at its start, but a room may arrive at the decode side much later.
_ARRIVAL_TIMEOUT_S = 3600


def make_plan(request: PlanRequest) -> Plan:
    """Computes the plan of a fleet from a request.

    Raises:
        LayoutError, ConfigError: the request is impossible; the message contains the arithmetic.
        DeviceError: the request needs GPUs, but no GPU or no driver is available.
    """
    _check_numbers(request)
    placement = place(request)
    shape = resolve_shape(request)
    chunk_tokens = _chunk_tokens(request)
    inputs = _instance_inputs(request, model_shape(shape, request.page_size), chunk_tokens)
    volume = TransferVolume(inputs, shape)
    paths = _paths(request.paths, inputs, request.device)
    pipelines = _pipelines(request.pipelines)
    if placement.every:
        longest_prompt = max(
            [each.tokens for each in request.requests] or [load.tokens.longest for load in request.loads]
        )
        budget = gpu_budget(request, volume, placement, longest_prompt)
    else:
        budget = host_budget(request)
    needs = [resolve_load(request, volume, load, budget) for load in request.loads]
    # Without staged paths the ring has its minimum size: connections are measured with the scratch memory behind it.
    ring = MIB
    if any(path in STAGED_PATHS for path in paths):
        longest = [need.longest for need in needs]
        staged = max((need.window + 1) * need.reader_bytes for need in needs)
        ring = ring_bytes(request, budget, volume, longest, staged)
    config: dict[str, str | int | float | bool] = {
        "transport": request.transport,
        "chunk_tokens": chunk_tokens,
        "staging_ring_mb": ring // MIB,
    }
    if any(each.prefill.cp > 1 for each in inputs):
        config["cp_mode"] = request.cp_mode
    if request.direct_sms is not None:
        config["direct_sms"] = request.direct_sms
    if request.requests or request.rate:
        config["bootstrap_timeout_s"] = config["waiting_timeout_s"] = _ARRIVAL_TIMEOUT_S
    batch_rooms = max(need.batch_rooms for need in needs)
    groups = prefill_groups(volume)
    instances = range(len(inputs))
    ranks = [
        *(rank for instance in instances for rank in _ranks("prefill", instance, volume, needs, placement)),
        *_ranks("decode", -1, volume, needs, placement),
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
        shares=[share for instance in instances for share in _shares(volume, instance, needs[0], request.device)],
        loads=[need.load for need in needs],
        ring_bytes=ring,
        # A multiple of every instance's dp, so that a room's position in its batch determines its prefill dp group.
        room_stride=-(-batch_rooms // groups) * groups,
        aux_slots=batch_rooms,
        config=config,
        notes=list(dict.fromkeys(notes)),
    )


def _ranks(
    role: Role, instance: int, volume: TransferVolume, needs: Sequence[LoadNeeds], placement: Placement
) -> Iterator[PlannedRank]:
    inputs = volume.inputs[max(0, instance)]
    side = inputs.prefill if role == "prefill" else inputs.decode
    items = segment_items(volume, needs, instance, role)
    before = sum(each.prefill.size for each in volume.inputs[: max(0, instance)])
    for unique in range(side.size):
        at = side.coord(unique)
        shards = local_shards(inputs.shape, inputs.page_size, side, at)
        own_items = [groups[at.dp] for groups in items]
        yield PlannedRank(
            role=role,
            instance=instance,
            unique=unique,
            dp=at.dp,
            pp=at.pp,
            cp=at.cp,
            tp=at.tp,
            heads=[shards[0].head_lo, shards[0].head_hi],
            layers=[shards[0].layer_lo, shards[0].layer_hi],
            pool_pages=own_items[0],
            state_slots={each.segment.name: own_items[each.segment.index] for each in shards if each.segment.state},
            pool_bytes=rank_bytes(volume, max(0, instance), role, at, own_items),
            device=placement.of(role, before + unique),
        )


def _shares(volume: TransferVolume, instance: int, need: LoadNeeds, device: str) -> Iterator[PlannedShare]:
    """Yields what each writer sends to each decode rank for a longest room of the load, for all dp groups."""
    inputs = volume.inputs[instance]
    # Room numbers 0 to dp - 1 cover every prefill dp group.
    for room in range(inputs.prefill.dp):
        for decode_dp in range(inputs.decode.dp):
            for owed in volume.owed(instance, *need.longest, room, decode_dp):
                yield _share(inputs, instance, owed, device)


def _share(inputs: PlanInputs, instance: int, owed: OwedParts, device: str) -> PlannedShare:
    share = owed.share
    segment = inputs.segments[share.segment]
    first = head_range(segment.heads, inputs.decode.tp, inputs.decode.coord(share.reader).tp).lo + share.dst_head
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
            # The direct path has no descriptors; these are kernel launches.
            "direct": len(owed.parts) if device == "cuda" else None,
        },
    )


def _pipeline_notes(pipelines: Sequence[str], needs: Sequence[LoadNeeds]) -> list[str]:
    """Returns a note if layer groups were requested but every prompt is shorter than `pipeline_min_tokens`."""
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
    """Returns notes on how the simulated forward differs from one in which every prefill rank has its own GPU."""
    notes = []
    prefill = [rank for rank in ranks if rank["role"] == "prefill"]
    for gpu, count in sorted(Counter(rank["device"] for rank in prefill).items()):
        if count > 1:
            notes.append(f"compute: {count} prefill ranks share GPU {gpu} and compete for it")
    if any(rank["pp"] for rank in prefill):
        notes.append("compute: pipeline stages do not wait for each other's layers")
    return notes


# ---- checks and defaults --------------------------------------------------------------------------------------------


def _check_numbers(request: PlanRequest) -> None:
    """Checks the numbers and names of a request that can be checked without the layout.

    Raises:
        ConfigError, LayoutError: a value is not allowed; the message names the option and the allowed values.
    """
    for load in request.loads:
        check_size("--concurrency", load.concurrency)
        if request.requests:
            continue
        for tokens in load.tokens.values or (load.tokens.low, load.tokens.high):
            check_size("--tokens", tokens)
        if load.tokens.low > load.tokens.high:
            raise ConfigError(f"--tokens {load.tokens.text}: the range ends before it begins")
    choose("--device", request.device, DEVICES)
    choose("--compute", request.compute, COMPUTES)
    if request.compute == "gpu" and request.device != "cuda":
        raise ConfigError("--compute gpu: a forward is computed beside the pools; give --device cuda")
    for option, value in (
        ("--rooms", request.rooms),
        ("--ring-mb", request.ring_mb),
        ("--direct-sms", request.direct_sms),
    ):
        if value is not None:
            check_size(option, value)
    if not 0 <= request.prefix_hit < 1:
        raise ConfigError(f"--prefix-hit {request.prefix_hit}: it must be at least 0 and below 1")
    for option, number in (
        ("--rate", request.rate),
        ("--layer-ms", request.layer_ms),
        ("--decode-ms", request.decode_ms),
    ):
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{option} {number}: it must be 0 or more")
    choose("--transport", request.transport, KEYS_BY_NAME["transport"].choices)
    choose("--page-order", request.page_order, PAGE_ORDERS)
    choose("--cp-mode", request.cp_mode, KEYS_BY_NAME["cp_mode"].choices)
    for index, each in enumerate(request.requests):
        _check_request(index, each, request)


def _check_request(index: int, asked: Request, request: PlanRequest) -> None:
    try:
        check_size("tokens", asked.tokens)
        cached = prefix_pages(asked.prefix_tokens, request.page_size)
        if cached > page_count(asked.tokens, request.page_size):
            raise LayoutError(f"a cached prefix of {asked.prefix_tokens} tokens is longer than the prompt")
        if asked.decode_dp >= request.decode.dp:
            raise LayoutError(f"decode dp group {asked.decode_dp} of {request.decode.dp}")
        if asked.arrival_ms is not None and not 0 <= asked.arrival_ms < float("inf"):
            raise LayoutError(f"it arrives at {asked.arrival_ms} ms")
    except LayoutError as error:
        raise LayoutError(f"request {index}: {error}") from None


def _chunk_tokens(request: PlanRequest) -> int:
    if request.chunk_tokens is not None:
        return check_size("--chunk-tokens", request.chunk_tokens)
    default = KEYS_BY_NAME["chunk_tokens"].default
    assert isinstance(default, int)
    return default


def _instance_inputs(request: PlanRequest, shape: ModelShape, chunk_tokens: int) -> tuple[PlanInputs, ...]:
    """Returns the layout inputs of each pair of a prefill instance and the decode instance.

    Raises:
        LayoutError: two instances cannot exchange KV; the message names the prefill instance if there are several.
    """
    if not request.prefill:
        raise LayoutError("there is no prefill instance")
    inputs = []
    for instance, sizes in enumerate(request.prefill):
        try:
            inputs.append(
                PlanInputs(
                    shape=shape,
                    page_size=request.page_size,
                    chunk_pages=chunk_pages(chunk_tokens, request.page_size),
                    prefill=side_of(sizes),
                    decode=side_of(request.decode),
                    cp_mode=request.cp_mode,
                )
            )
        except LayoutError as error:
            if len(request.prefill) == 1:
                raise
            raise LayoutError(f"prefill instance {instance}: {error}") from None
    return tuple(inputs)


def _pipelines(pipelines: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the pipeline modes to compare, without duplicates; "off" if none is requested.

    Raises:
        ConfigError: a value is neither a mode nor a number of layers.
    """
    for pipeline in pipelines:
        if not (pipeline.isascii() and pipeline.isdecimal() and int(pipeline) > 0):
            choose("--pipeline", pipeline, (*PIPELINES, "a number of layers per group"))
    return tuple(dict.fromkeys(pipelines)) or ("off",)


def _paths(paths: tuple[str, ...], inputs: tuple[PlanInputs, ...], device: str) -> tuple[str, ...]:
    """Returns the paths to compare: the requested paths or, if none is requested, all that the layouts allow.

    Raises:
        ConfigError: a path is unknown, or the direct path is requested without GPUs.
        LayoutError: the bulk path is requested between pools that hold different heads.
    """
    every = ((each, share) for each in inputs for dp in range(each.decode.dp) for share in transfer_slices(each, 0, dp))
    split = next(((each, share) for each, share in every if not share.whole_rows), None)
    for path in paths:
        choose("--path", path, KEYS_BY_NAME["path"].choices)
        if path == DIRECT and device != "cuda":
            raise ConfigError("--path direct: a GPU's kernel writes into the decode rank's pool; give --device cuda")
        if path == BULK and split is not None:
            each, share = split
            segment = each.segments[share.segment]
            raise LayoutError(
                f"--path bulk moves whole pages, so both pools must hold the same heads; here a prefill rank holds "
                f"{share.src_pool_heads} and a decode rank {share.dst_pool_heads} of {segment.heads} "
                f"(prefill tp {each.prefill.tp}, decode tp {each.decode.tp}): use slice, staged or auto"
            )
    if paths:
        return tuple(dict.fromkeys(paths))
    return (SLICE if split else BULK, STAGED, *((DIRECT,) if device == "cuda" else ()), "auto")
