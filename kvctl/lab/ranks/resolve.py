"""Reads a bench's request: defaults, names and legal combinations; a refusal carries its arithmetic or near matches."""

from __future__ import annotations

from difflib import get_close_matches

from kvctl.lab.ranks.bench_messages import COMPUTES, DEVICES, PAGE_ORDERS, PIPELINES, PlanRequest, Request, Sizes
from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.layout.chunks import chunk_pages, page_count, prefix_pages
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import transfer_slices
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.sizes import check_size

STAGED_PATHS = (STAGED, "auto")
"""Paths on which parts may go through the decode rank's ring."""


def resolve_chunk_tokens(request: PlanRequest) -> int:
    """`--chunk-tokens`, or the agent's own default."""
    if request.chunk_tokens is not None:
        return check_size("--chunk-tokens", request.chunk_tokens)
    default = KEYS_BY_NAME["chunk_tokens"].default
    assert isinstance(default, int)
    return default


def instance_inputs(request: PlanRequest, shape: ModelShape, chunk_tokens: int) -> tuple[PlanInputs, ...]:
    """The layout's inputs of each prefill instance with the decode instance.

    Raises:
        LayoutError: two of them cannot exchange KV; says which prefill instance where there are several.
    """
    choose("--cp-mode", request.cp_mode, KEYS_BY_NAME["cp_mode"].choices)
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


def side_of(sizes: Sizes) -> ParallelConfig:
    """An instance's sizes as the layout knows them."""
    return ParallelConfig(sizes.dp, sizes.pp, sizes.cp, sizes.tp, sizes.layers)


def check_load(request: PlanRequest) -> None:
    """Refuse numbers and names that no layout needs to be known for.

    Raises:
        ConfigError, LayoutError: naming the option, its value and what is allowed.
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
        ("--workers", request.workers),
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
    for index, asked in enumerate(request.requests):
        _check_request(index, asked, request)


def resolve_pipelines(pipelines: tuple[str, ...]) -> tuple[str, ...]:
    """The ways of grouping layers to run side by side.

    Raises:
        ConfigError: one is neither a mode nor a number of layers.
    """
    for pipeline in pipelines:
        if not (pipeline.isascii() and pipeline.isdecimal() and int(pipeline) > 0):
            choose("--pipeline", pipeline, (*PIPELINES, "a number of layers per group"))
    return tuple(dict.fromkeys(pipelines)) or ("off",)


def resolve_paths(paths: tuple[str, ...], inputs: tuple[PlanInputs, ...], device: str) -> tuple[str, ...]:
    """The paths to run side by side: those asked for, or the sensible comparison for the layouts.

    Raises:
        ConfigError: an unknown path, or one that needs GPUs where pools are in host memory.
        LayoutError: bulk between pools that hold different heads.
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


def choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the allowed ones.

    Raises:
        ConfigError: with the nearest allowed value.
    """
    if value not in allowed:
        near = get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{option} {value!r:.40} is unknown; {hint}allowed: {', '.join(allowed)}")


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
