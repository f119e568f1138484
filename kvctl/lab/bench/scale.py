"""Makes a published load fit this machine: fewer layers, then fewer and narrower heads, then shorter prompts.

A table is about how paths compare, and that survives a smaller model; running out of memory, or of patience, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvctl.lab.models import MODELS
from kvctl.lab.ranks.request import DTYPE_BYTES, Load

DEFAULT_MODEL = "llama-3.1-8b"
MEMORY_PER_CORE_BYTES = 2 << 30
"""Pools beyond this take longer to fill and to check than to move."""

MOVED_PER_CORE_BYTES = 8 << 30
"""What a core moves, fills and checks in a minute or two."""

# Rings get a quarter of the memory, pools the rest.
_POOLS = 0.7


@dataclass(frozen=True, slots=True)
class Geometry:
    """What can be scaled. `tokens` divides every prompt length."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens: int = 1

    def token_bytes(self, dtype_bytes: int) -> int:
        """K and V of one token."""
        return self.layers * self.kv_heads * 2 * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine has: memory for all pools, bytes that may be moved in all.

    Of a load with more than `in_flight` rooms only so many must fit: the plan limits the others, and says so. Of each
    there are `copies` in the pools: one on either side, unless ranks replicate.
    """

    memory_bytes: int
    moved_bytes: int
    in_flight: int
    copies: int = 2


def published(model: str | None, given: Mapping[str, int | None]) -> Geometry | None:
    """The geometry that was asked for; None for a model that is not known, or has no heads to speak of."""
    preset = MODELS.get(model or DEFAULT_MODEL)
    if preset is None or preset.kind != "mha":
        return None
    return Geometry(
        given.get("layers") or preset.num_layers,
        given.get("kv_heads") or preset.num_kv_heads,
        given.get("head_dim") or preset.head_dim,
    )


def fit(
    wanted: Geometry,
    least: Mapping[str, int],
    loads: Callable[[int], Sequence[Load]],
    cases: int,
    dtype: str | None,
    limits: Limits,
) -> Geometry:
    """The first geometry that fits, halving one size after another; the smallest where none does.

    Args:
        least: what must be left of each size; one that is not named stays as it is.
        loads: the loads with their lengths divided by a number, `rooms` filled in.
        cases: how often each load is run.
    """
    dtype_bytes = DTYPE_BYTES.get(dtype or "bf16", 2)
    last = wanted
    for geometry in _ladder(wanted, least, loads):
        last = geometry
        token_bytes = geometry.token_bytes(dtype_bytes)
        scaled = loads(geometry.tokens)
        held = max(min(load.concurrency, load.rooms or 1, limits.in_flight) * _longest(load) for load in scaled)
        moved = sum((load.rooms or 1) * _longest(load) for load in scaled) * cases
        if (
            held * token_bytes * limits.copies <= limits.memory_bytes * _POOLS
            and moved * token_bytes <= limits.moved_bytes
        ):
            break
    return last


def remark(preset: str, wanted: Geometry, scaled: Geometry) -> str:
    """What people should know; "" where nothing was scaled."""
    names = {"layers": "layers", "kv_heads": "KV heads", "head_dim": "head dim"}
    words = [
        f"{getattr(scaled, name)} of {getattr(wanted, name)} {text}"
        for name, text in names.items()
        if getattr(scaled, name) != getattr(wanted, name)
    ]
    words += [f"1/{scaled.tokens} of the prompt lengths"] * (scaled.tokens > 1)
    if not words:
        return ""
    return f"{preset} is scaled to this machine: {', '.join(words)}; any option given replaces the preset's"


def _ladder(wanted: Geometry, least: Mapping[str, int], loads: Callable[[int], Sequence[Load]]) -> Iterator[Geometry]:
    layers, heads, dim, tokens = wanted.layers, wanted.kv_heads, wanted.head_dim, 1
    yield wanted
    while layers // 2 >= least.get("layers", layers):
        layers //= 2
        yield Geometry(layers, heads, dim)
    while heads % 2 == 0 and heads // 2 >= least.get("kv_heads", heads):
        heads //= 2
        yield Geometry(layers, heads, dim)
    while dim % 2 == 0 and dim // 2 >= least.get("head_dim", dim):
        dim //= 2
        yield Geometry(layers, heads, dim)
    shortest = min(_longest(load) for load in loads(1))
    while shortest // (2 * tokens) >= least.get("tokens", shortest):
        tokens *= 2
        yield Geometry(layers, heads, dim, tokens)


def _longest(load: Load) -> int:
    return max(load.tokens.values) if load.tokens.values else load.tokens.high
