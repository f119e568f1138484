"""Scales a preset down to this machine: fewer layers, then fewer and narrower heads, then shorter prompts.

The tables compare paths, and that comparison remains valid with a smaller model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvctl.lab.models import MODELS
from kvctl.lab.ranks.request import DTYPE_BYTES, Load

DEFAULT_MODEL = "llama-3.1-8b"
MEMORY_PER_CORE_BYTES = 2 << 30
"""Bytes of pools and rings per core. Larger pools take longer to fill and to verify than to transfer."""

MOVED_PER_CORE_BYTES = 8 << 30
"""Bytes per core that are filled, transferred and verified in a minute or two."""

# Rings get a quarter of the memory; the rest, less a margin, is for pools.
_POOLS = 0.7


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a model that are scaled, and `tokens`, the divisor of all prompt lengths."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens: int = 1

    def token_bytes(self, dtype_bytes: int) -> int:
        """Returns the bytes of one token's K and V in all layers."""
        return self.layers * self.kv_heads * 2 * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits to which a preset is scaled.

    Attributes:
        memory_bytes: bytes that all pools and rings may take.
        moved_bytes: bytes that the whole bench may transfer.
        in_flight: rooms that must fit in memory at once; loads of higher concurrency run with fewer rooms in flight.
        copies: copies of a room in the pools: one on each side, more if every context-parallel rank has all of it.
    """

    memory_bytes: int
    moved_bytes: int
    in_flight: int
    copies: int = 2


def published(model: str | None, overrides: Mapping[str, int | None]) -> Geometry | None:
    """Returns the geometry of a model before scaling; None if the model is unknown or has no separate KV heads (MLA).

    Args:
        model: Name in `MODELS`; None for `DEFAULT_MODEL`.
        overrides: Values of the options `layers`, `kv_heads` and `head_dim`, which replace the model's.
    """
    preset = MODELS.get(model or DEFAULT_MODEL)
    if preset is None or preset.kind != "mha":
        return None
    return Geometry(
        overrides.get("layers") or preset.num_layers,
        overrides.get("kv_heads") or preset.num_kv_heads,
        overrides.get("head_dim") or preset.head_dim,
    )


def fit(
    requested: Geometry,
    least: Mapping[str, int],
    loads: Callable[[int], Sequence[Load]],
    cases: int,
    dtype: str | None,
    limits: Limits,
) -> Geometry:
    """Halves one size after another until the loads fit into the limits.

    Args:
        requested: The geometry before scaling.
        least: Minimum of each size; sizes without a minimum are not scaled.
        loads: Returns the loads with all prompt lengths divided by its argument, and with `rooms` set.
        cases: Number of times that each load runs.

    Returns:
        The first geometry that fits, or the smallest allowed geometry if none fits.
    """
    dtype_bytes = DTYPE_BYTES.get(dtype or "bf16", 2)
    last = requested
    for geometry in _candidates(requested, least, loads):
        last = geometry
        token_bytes = geometry.token_bytes(dtype_bytes)
        scaled = loads(geometry.tokens)
        resident = max(min(load.concurrency, load.rooms or 1, limits.in_flight) * _longest(load) for load in scaled)
        moved = sum((load.rooms or 1) * _longest(load) for load in scaled) * cases
        if (
            resident * token_bytes * limits.copies <= limits.memory_bytes * _POOLS
            and moved * token_bytes <= limits.moved_bytes
        ):
            break
    return last


def scaling_note(preset: str, requested: Geometry, scaled: Geometry) -> str:
    """Returns a note for the user on the sizes that were scaled; "" if none was."""
    names = {"layers": "layers", "kv_heads": "KV heads", "head_dim": "head dim"}
    words = [
        f"{getattr(scaled, name)} of {getattr(requested, name)} {text}"
        for name, text in names.items()
        if getattr(scaled, name) != getattr(requested, name)
    ]
    words += [f"1/{scaled.tokens} of the prompt lengths"] * (scaled.tokens > 1)
    if not words:
        return ""
    return f"{preset} is scaled to this machine: {', '.join(words)}; options on the command line replace the preset's"


def _candidates(
    requested: Geometry, least: Mapping[str, int], loads: Callable[[int], Sequence[Load]]
) -> Iterator[Geometry]:
    layers, heads, dim, tokens = requested.layers, requested.kv_heads, requested.head_dim, 1
    yield requested
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
