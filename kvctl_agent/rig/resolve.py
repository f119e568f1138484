"""Reads a bench's request: defaults, names and legal combinations; a refusal carries its arithmetic or near matches."""

from __future__ import annotations

from difflib import get_close_matches

from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.contract.models import find_model
from kvctl_agent.contract.rig import DTYPE_BYTES, PAGE_ORDERS, PlannedShape, PlanRequest, Sizes
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.plan import PlanInputs, shares
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.side import Side
from kvctl_agent.layout.sizes import check_size

DEFAULT_MODEL = "llama-3.1-8b"


def resolve_shape(request: PlanRequest) -> PlannedShape:
    """The shape: a preset (`DEFAULT_MODEL` if none is named) with the given numbers in place of its own.

    Raises:
        ConfigError: no such model (with near matches) or element type.
        LayoutError: a size out of range.
    """
    preset = find_model(request.model or DEFAULT_MODEL)
    dtype = request.dtype or preset.dtype
    choose("--dtype", dtype, tuple(DTYPE_BYTES))
    layers = preset.num_layers if request.layers is None else check_size("--layers", request.layers)
    heads = preset.num_kv_heads if request.kv_heads is None else check_size("--kv-heads", request.kv_heads)
    head_dim = preset.head_dim if request.head_dim is None else check_size("--head-dim", request.head_dim)
    as_preset = (layers, heads, head_dim) == (preset.num_layers, preset.num_kv_heads, preset.head_dim)
    return PlannedShape(
        model=preset.name if as_preset else "",
        layers=layers,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        dtype_bytes=DTYPE_BYTES[dtype],
    )


def resolve_chunk_tokens(request: PlanRequest) -> int:
    """`--chunk-tokens`, or the agent's own default."""
    if request.chunk_tokens is not None:
        return check_size("--chunk-tokens", request.chunk_tokens)
    default = KEYS_BY_NAME["chunk_tokens"].default
    assert isinstance(default, int)
    return default


def plan_inputs(prefill: Sizes, decode: Sizes, shape: PlannedShape, page_size: int, chunk_tokens: int) -> PlanInputs:
    """The layout's inputs for these sizes.

    Raises:
        LayoutError: they cannot exchange KV.
    """
    return PlanInputs(
        shape=ModelShape(
            num_layers=shape["layers"],
            num_kv_heads=shape["kv_heads"],
            k_dim=shape["head_dim"],
            v_dim=shape["head_dim"],
            dtype_bytes=shape["dtype_bytes"],
        ),
        page_size=page_size,
        chunk_pages=chunk_pages(chunk_tokens, page_size),
        prefill=Side(prefill.dp, prefill.pp, prefill.cp, prefill.tp),
        decode=Side(decode.dp, decode.pp, decode.cp, decode.tp),
    )


def check_load(request: PlanRequest) -> None:
    """Refuse numbers and names that no layout needs to be known for.

    Raises:
        ConfigError, LayoutError: naming the option, its value and what is allowed.
    """
    for load in request.loads:
        check_size("--concurrency", load.concurrency)
        for tokens in load.tokens.values or (load.tokens.low, load.tokens.high):
            check_size("--tokens", tokens)
        if load.tokens.low > load.tokens.high:
            raise ConfigError(f"--tokens {load.tokens.text}: the range ends before it begins")
    for option, value in (("--rooms", request.rooms), ("--ring-mb", request.ring_mb), ("--workers", request.workers)):
        if value is not None:
            check_size(option, value)
    if not 0 <= request.prefix_hit < 1:
        raise ConfigError(f"--prefix-hit {request.prefix_hit}: it must be at least 0 and below 1")
    choose("--transport", request.transport, KEYS_BY_NAME["transport"].choices)
    choose("--page-order", request.page_order, PAGE_ORDERS)


def resolve_paths(paths: tuple[str, ...], inputs: PlanInputs) -> tuple[str, ...]:
    """The paths to run side by side: those asked for, or the sensible comparison for the two layouts.

    Raises:
        ConfigError: an unknown path.
        LayoutError: bulk between pools that hold different heads.
    """
    every = (share for dp in range(inputs.decode.dp) for share in shares(inputs, 0, dp))
    split = next((share for share in every if not share.whole_rows), None)
    for path in paths:
        choose("--path", path, KEYS_BY_NAME["path"].choices)
        if path == "bulk" and split is not None:
            raise LayoutError(
                f"--path bulk moves whole pages, so both pools must hold the same heads; here a prefill rank holds "
                f"{split.src_pool_heads} and a decode rank {split.dst_pool_heads} of {inputs.shape.num_kv_heads} "
                f"(prefill tp {inputs.prefill.tp}, decode tp {inputs.decode.tp}): use slice, staged or auto"
            )
    if paths:
        return tuple(dict.fromkeys(paths))
    return ("slice" if split else "bulk", "staged", "auto")


def choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the allowed ones.

    Raises:
        ConfigError: with the nearest allowed value.
    """
    if value not in allowed:
        near = get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{option} {value!r:.40} is unknown; {hint}allowed: {', '.join(allowed)}")
