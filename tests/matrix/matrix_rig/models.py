"""The small models of the matrix, one for each kind of KV cache."""

from __future__ import annotations

from functools import cache

from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.plan import PlannedDraft, PlannedShape, PlannedState
from kvctl_agent.layout.parallel import head_range
from kvctl_agent.layout.shape import ModelShape, segments

LAYERS = 6


def _shape(
    heads: int,
    k_dim: int = 16,
    v_dim: int = 16,
    *,
    dtype: tuple[str, int] = ("bf16", 2),
    kind: str = "mha",
    scales: tuple[int, int] = (0, 0),
    draft: PlannedDraft | None = None,
    states: tuple[PlannedState, ...] = (),
) -> PlannedShape:
    return PlannedShape(
        model="",
        kind=kind,
        layers=LAYERS,
        kv_heads=heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        dtype=dtype[0],
        dtype_bytes=dtype[1],
        k_scale_bytes=scales[0],
        v_scale_bytes=scales[1],
        draft=draft,
        groups=[],
        states=list(states),
    )


def _state(name: str, layers: list[int], rows: int, heads: int, head_bytes: int, **more: object) -> PlannedState:
    state = {"name": name, "layers": layers, "rows": rows, "heads": heads, "head_bytes": head_bytes}
    return PlannedState(**{"kind": "rows", "window": 0, **state, **more})  # type: ignore[typeddict-item]


MODELS: dict[str, PlannedShape] = {
    "gqa8": _shape(8, 24, 24),
    "gqa2": _shape(2, 32, 32),
    "gqa12": _shape(12),
    "k-not-v": _shape(4, 24, 16),
    "latent": _shape(1, 36, 0, kind="mla"),
    "latent-fp8": _shape(1, 40, 0, kind="mla", dtype=("fp8", 1), scales=(8, 0)),
    "fp8": _shape(8, dtype=("fp8", 1), scales=(4, 8)),
    # Its draft has heads of another number and another size than the target.
    "draft": _shape(8, draft=PlannedDraft(layers=2, kv_heads=4, head_dim=8, v_head_dim=16)),
    # Beside the KV: rows that every rank holds whole, rows shared as heads are, the pages of a window, index pages.
    "state": _shape(
        4,
        states=(
            _state("conv", [0, 2, 4], 3, 1, 24),
            _state("ssm", [1, 1, 5], 2, 8, 16),
            _state("window", [3], 1, 4, 16, kind="window", window=70),
            _state("keys", [0, 5], 1, 1, 8, kind="pages"),
        ),
    ),
}


@cache
def shape_of(name: str, page_size: int) -> ModelShape:
    """The shape of a model for the layout."""
    return model_shape(MODELS[name], page_size)


@cache
def fits(name: str, tp: int) -> bool:
    """Whether every segment of a model can be divided over `tp` ranks."""
    heads = {segment.heads for segment in segments(shape_of(name, 1), 1)}
    return all(count % tp == 0 or tp % count == 0 for count in heads)


def same_heads(name: str, prefill_tp: int, decode_tp: int) -> bool:
    """Whether pages can be moved unchanged: the KV and draft pools of both roles hold the same number of heads."""
    return all(
        _held(segment.heads, prefill_tp) == _held(segment.heads, decode_tp)
        for segment in segments(shape_of(name, 1), 1)
        if not segment.state
    )


def _held(heads: int, tp: int) -> int:
    lo, hi = head_range(heads, tp, 0)
    return hi - lo
