"""Computes the plan of a bench or demo from its request, and reports with the arithmetic why a request is impossible.

Importing this module imports numpy, but not torch. Commands use it through `planner`, which imports it when needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from math import gcd, lcm
from typing import Any

from kvctl.lab.ranks.geometry import model_shape, resolve_shape, side_of
from kvctl.lab.ranks.plan import Plan, PlannedRank, PlannedShape, PlannedShare
from kvctl.lab.ranks.request import PIPELINES, STAGED_PATHS, PlanRequest, Role, choose
from kvctl.lab.ranks.sizing import MIB, Placement, gpu_budget, host_budget, place, rank_bytes, ring_bytes
from kvctl.lab.ranks.transfer_volume import OwedParts, TransferVolume
from kvctl.lab.ranks.workload import LoadNeeds, prefill_groups, resolve_load, segment_items
from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.parallel import head_range, local_shards
from kvctl_agent.layout.plan import stripe_of, transfer_slices
from kvctl_agent.layout.plan_inputs import MAX_SPLIT, PlanInputs, transfer_page
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.sizes import check_size
from kvctl_agent.paths.contiguous_runs import whole_pages

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
    chunk_tokens = request.chunk_tokens or _default("chunk_tokens")
    _check_groups(request, shape, chunk_tokens)
    inputs = _instance_inputs(request, model_shape(shape, request.page_tokens("prefill")), chunk_tokens)
    volume = TransferVolume(inputs, shape, request.kv_layouts)
    paths = _paths(request, volume)
    pipelines = _pipelines(request.pipelines)
    if placement.every:
        budget = gpu_budget(request, volume, placement, max(load.tokens.longest for load in request.loads))
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
    if request.decode.cp > 1:
        config["cp_interleave"] = request.cp_interleave
    if request.direct_sms is not None:
        config["direct_sms"] = request.direct_sms
    if request.rate:
        config["bootstrap_timeout_s"] = config["waiting_timeout_s"] = _ARRIVAL_TIMEOUT_S
    batch_rooms = max(need.batch_rooms for need in needs)
    groups = prefill_groups(volume)
    instances = range(len(inputs))
    ranks = [
        *(rank for instance in instances for rank in _ranks("prefill", instance, volume, needs, placement)),
        *_ranks("decode", -1, volume, needs, placement),
    ]
    notes = [note for need in needs for note in need.notes] + _pipeline_notes(pipelines, needs)
    return Plan(
        shape=shape,
        page_size=request.page_tokens("prefill"),
        decode_page_size=request.page_tokens("decode"),
        transfer_page=inputs[0].page_size,
        cp_interleave=request.cp_interleave if request.decode.cp > 1 else None,
        kv_layouts=list(request.kv_layouts),
        page_order=request.page_order,
        chunk_tokens=chunk_tokens,
        transport=request.transport,
        device=request.device,
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
    items, page_size = segment_items(volume, needs, instance, role), volume.page_size(role)
    before = sum(each.prefill.size for each in volume.inputs[: max(0, instance)])
    for unique in range(side.size):
        at = side.coord(unique)
        shards = local_shards(inputs.shape, page_size, side, at)
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
            state_slots={
                each.segment.name: own_items[each.segment.index] for each in shards if each.segment.table != 0
            },
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
                yield _share(volume, instance, owed, device)


def _share(volume: TransferVolume, instance: int, owed: OwedParts, device: str) -> PlannedShare:
    share, inputs = owed.share, volume.inputs[instance]
    segment = inputs.segments[share.segment]
    first = head_range(segment.heads, inputs.decode.tp, inputs.decode.coord(share.reader).tp).lo + share.dst_head
    pages, runs = sum(owed.parts), volume.runs(instance, share)
    return PlannedShare(
        instance=instance,
        writer=share.writer,
        reader=share.reader,
        segment=segment.name,
        heads=[first, first + share.heads],
        layers=[share.layer_lo, share.layer_hi],
        bytes=owed.payload_bytes,
        parts=len(owed.parts),
        pages=pages,
        transfer_page=volume.page_tokens(segment),
        splits=[share.src_split, share.dst_split],
        stripe=None if segment.state else _stripe(inputs, share.reader),
        descriptors={
            "bulk": share.num_layers * len(runs) * pages if share.whole_rows and whole_pages(runs) else None,
            "slice": share.num_layers * sum(plane.per_page for plane in runs) * pages,
            "staged": len(owed.parts),
            # The direct path has no descriptors; these are kernel launches.
            "direct": len(owed.parts) if device == "cuda" else None,
        },
    )


def _stripe(inputs: PlanInputs, reader: int) -> list[int] | None:
    """Returns the tokens of a prompt that a decode cp rank has, as in `PlannedShare.stripe`."""
    run, ranks, rank = stripe_of(inputs, reader)
    tokens = run * inputs.page_size
    return [rank * tokens, (rank + 1) * tokens, ranks * tokens] if ranks > 1 else None


def _default(key: str) -> int:
    """Returns the default of one of the agents' configuration keys."""
    value = KEYS_BY_NAME[key].default
    assert isinstance(value, int)
    return value


def _pipeline_notes(pipelines: Sequence[str], needs: Sequence[LoadNeeds]) -> list[str]:
    """Returns a note if layer groups were requested but every prompt is shorter than `pipeline_min_tokens`."""
    threshold = _default("pipeline_min_tokens")
    longest = max(need.longest[0] for need in needs)
    if longest >= threshold or not {"on", "auto"} & set(pipelines):
        return []
    return [
        f"pipeline: every prompt is shorter than pipeline_min_tokens = {threshold} and takes the plain path; give "
        f"longer --tokens, or layers per group as a number"
    ]


# ---- checks and defaults --------------------------------------------------------------------------------------------


def _check_numbers(request: PlanRequest) -> None:
    """Checks the numbers and names of a request that can be checked without the layout.

    Raises:
        ConfigError, LayoutError: a value is not allowed; the message names the option and the allowed values.
    """
    for load in request.loads:
        check_size("--concurrency", load.concurrency)
        for tokens in load.tokens.values or (load.tokens.low, load.tokens.high):
            check_size("--tokens", tokens)
        if load.tokens.low > load.tokens.high:
            raise ConfigError(f"--tokens {load.tokens.text}: the range ends before it begins")
    for field in fields(request):
        _check_option(field, getattr(request, field.name))
    if request.rooms is not None:
        check_size("--rooms", request.rooms)
    if not 0 <= request.prefix_hit < 1:
        raise ConfigError(f"--prefix-hit {request.prefix_hit}: it must be at least 0 and below 1")
    if not 0 <= request.rate < float("inf"):
        raise ConfigError(f"--rate {request.rate}: it must be 0 or more")
    choose("--transport", request.transport, KEYS_BY_NAME["transport"].choices)
    choose("--cp-mode", request.cp_mode, KEYS_BY_NAME["cp_mode"].choices)
    _check_pages(request)


def _check_option(field: Field[Any], value: Any) -> None:
    """Checks the value of a field as far as `request.option` declares what is allowed.

    Raises:
        ConfigError, LayoutError: the value is not allowed.
    """
    declared = field.metadata
    if not declared or value is None:
        return
    name, least = f"--{declared.get('flag') or field.name.replace('_', '-')}", declared.get("least", 1)
    for each in value if isinstance(value, tuple) else [value]:
        if "choices" in declared:
            choose(name, each, declared["choices"])
        elif isinstance(each, int):
            check_size(name, each, least)
        elif isinstance(each, float) and not least <= each < float("inf"):
            raise ConfigError(f"{name} {each}: it must be {least} or more")


def _check_pages(request: PlanRequest) -> None:
    """Checks that pages of the two sides and the runs of decode cp ranks can be divided into transfer pages.

    Raises:
        LayoutError: they cannot; the message has sizes that can.
    """
    prefill, decode = request.page_tokens("prefill"), request.page_tokens("decode")
    small, large = sorted((prefill, decode))
    if large % small:
        option = "--prefill-page-size" if prefill == large else "--decode-page-size"
        raise LayoutError(
            f"--prefill-page-size {prefill} and --decode-page-size {decode}: the smaller page must divide the larger, "
            f"and {large} % {small} = {large % small}; give {option} {large // small * small}"
        )
    run = request.cp_interleave
    if request.decode.cp > 1 and (decode % run or max(prefill, run) % min(prefill, run)):
        raise LayoutError(
            f"--cp-interleave {run}: it must divide a decode page of {decode} tokens, and divide a prefill page of "
            f"{prefill} tokens or be a multiple of it; give --cp-interleave {gcd(run, small)}"
        )
    page = transfer_page(prefill, decode, run if request.decode.cp > 1 else 0)
    if large > MAX_SPLIT * page:
        option = "--prefill-page-size" if prefill == large else "--decode-page-size"
        raise LayoutError(
            f"{option} {large}: a page may have at most {MAX_SPLIT} transfer pages, which have {page} tokens here; "
            f"give {option} {MAX_SPLIT * page}"
        )


def _check_groups(request: PlanRequest, shape: PlannedShape, chunk_tokens: int) -> None:
    """Checks that chunks can be divided into the pages of each KV group, and that decode ranks do not share prompts.

    Raises:
        LayoutError: a group cannot be transferred; the message has the options with which it can.
    """
    prefill = request.page_tokens("prefill")
    chunk = chunk_pages(chunk_tokens, prefill) * prefill
    for group in shape["groups"]:
        option, page = f"--kv-group {group['name']}", group["page_size"]
        if request.decode.cp > 1:
            raise LayoutError(
                f"{option}: decode cp ranks cannot share its pages; give --decode-cp 1, not {request.decode.cp}"
            )
        if chunk % page:
            both = lcm(page, prefill)
            raise LayoutError(
                f"{option}: its pages of {page} tokens must divide a chunk of {chunk} tokens, and {chunk} % {page} = "
                f"{chunk % page}; give page={gcd(chunk, page)}, or --chunk-tokens {max(1, chunk // both) * both}"
            )


def _instance_inputs(request: PlanRequest, shape: ModelShape, chunk_tokens: int) -> tuple[PlanInputs, ...]:
    """Returns the layout inputs of each pair of a prefill instance and the decode instance.

    Raises:
        LayoutError: two instances cannot exchange KV; the message names the prefill instance if there are several.
    """
    if not request.prefill:
        raise LayoutError("there is no prefill instance")
    prefill, decode, run = request.page_tokens("prefill"), request.page_tokens("decode"), request.cp_interleave
    striped = request.decode.cp > 1
    page = transfer_page(prefill, decode, run if striped else 0)
    _check_scales(request, shape)
    inputs = []
    for instance, sizes in enumerate(request.prefill):
        try:
            inputs.append(
                PlanInputs(
                    shape=shape,
                    page_size=page,
                    chunk_pages=chunk_pages(chunk_tokens, prefill) * prefill // page,
                    prefill=side_of(sizes),
                    decode=side_of(request.decode),
                    cp_mode=request.cp_mode,
                    prefill_split=prefill // page,
                    decode_split=decode // page,
                    stripe_pages=run // page if striped else 1,
                )
            )
        except LayoutError as error:
            if len(request.prefill) == 1:
                raise
            raise LayoutError(f"prefill instance {instance}: {error}") from None
    return tuple(inputs)


def _check_scales(request: PlanRequest, shape: ModelShape) -> None:
    """Checks that pages with quantisation scales of their own need not be divided.

    Raises:
        LayoutError: they would be; the message has the options that avoid it.
    """
    prefill, decode = request.page_tokens("prefill"), request.page_tokens("decode")
    striped = request.decode.cp > 1 and request.cp_interleave != decode
    if (shape.k_scale_bytes or shape.v_scale_bytes) and (prefill != decode or striped):
        options = [f"--prefill-page-size {decode} --decode-page-size {decode}"] * (prefill != decode)
        options += [f"--cp-interleave {decode}"] * striped
        raise LayoutError(
            f"pages have quantisation scales of their own, so pages of {decode} tokens cannot be divided: give "
            f"{' '.join(options)}, or --scale-bytes 0,0"
        )


def _pipelines(pipelines: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the pipeline modes to compare, without duplicates; "off" if none is requested.

    Raises:
        ConfigError: a value is neither a mode nor a number of layers.
    """
    for pipeline in pipelines:
        if not (pipeline.isascii() and pipeline.isdecimal() and int(pipeline) > 0):
            choose("--pipeline", pipeline, (*PIPELINES, "a number of layers per group"))
    return tuple(dict.fromkeys(pipelines)) or ("off",)


def _paths(request: PlanRequest, volume: TransferVolume) -> tuple[str, ...]:
    """Returns the paths to compare: the requested paths or, if none is requested, all that the layouts allow.

    Raises:
        ConfigError: a path is unknown, or the direct path is requested without GPUs.
        LayoutError: the bulk path is requested between pools that hold different heads, or pages in another order.
    """
    every = [
        (number, share)
        for number, each in enumerate(volume.inputs)
        for dp in range(each.decode.dp)
        for share in transfer_slices(each, 0, dp)
    ]
    split = next((each for each in every if not each[1].whole_rows), None)
    unlike = next((each for each in every if not whole_pages(volume.runs(*each))), None)
    for path in request.paths:
        if path == DIRECT and request.device != "cuda":
            raise ConfigError("--path direct: a GPU's kernel writes into the decode rank's pool; give --device cuda")
        if path == BULK and split is not None:
            inputs, share = volume.inputs[split[0]], split[1]
            segment = inputs.segments[share.segment]
            raise LayoutError(
                f"--path bulk moves whole pages, so both pools must hold the same heads; here a prefill rank holds "
                f"{share.src_pool_heads} and a decode rank {share.dst_pool_heads} of {segment.heads} "
                f"(prefill tp {inputs.prefill.tp}, decode tp {inputs.decode.tp}): use slice, staged or auto"
            )
        if path == BULK and unlike is not None:
            raise LayoutError(
                f"--path bulk moves whole pages, so {volume.inputs[0].page_size} tokens must be one run of bytes in "
                f"both pools; here pages are {' and '.join(request.kv_layouts)}, of {volume.page_size('prefill')} and "
                f"{volume.page_size('decode')} tokens: use slice, staged or auto"
            )
    if request.paths:
        return tuple(dict.fromkeys(request.paths))
    direct = (DIRECT,) if request.device == "cuda" else ()
    return (SLICE if split or unlike else BULK, STAGED, *direct, "auto")
