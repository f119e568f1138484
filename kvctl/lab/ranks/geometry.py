"""Resolves the model shape of a fleet and converts it to the types of `kvctl_agent.layout`.

The planner and every rank build their `ModelShape` from the same `PlannedShape`, so their shapes cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvctl.lab.models import ModelPreset, find_model
from kvctl.lab.ranks.plan import PlannedDraft, PlannedGroup, PlannedShape, PlannedState
from kvctl.lab.ranks.request import (
    DTYPE_BYTES,
    DTYPE_SCALE_BYTES,
    KINDS,
    STATE_KINDS,
    Group,
    PlanRequest,
    Sizes,
    State,
    choose,
)
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import KVGroup, ModelShape, StateShape
from kvctl_agent.layout.sizes import check_size

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_LATENT = "deepseek-r1"


def side_of(sizes: Sizes) -> ParallelConfig:
    """Converts the parallel sizes of an instance to the layout's type."""
    return ParallelConfig(sizes.dp, sizes.pp, sizes.cp, sizes.tp, sizes.layers)


def model_shape(planned: PlannedShape, page_size: int) -> ModelShape:
    """Converts a planned shape to the layout's type; raises LayoutError if the sizes are not supported."""

    def kv(sizes: PlannedShape | PlannedDraft | PlannedGroup, layers: int) -> ModelShape:
        return ModelShape(
            num_layers=layers,
            num_kv_heads=sizes["kv_heads"],
            k_dim=sizes["head_dim"],
            v_dim=sizes["v_head_dim"],
            dtype_bytes=planned["dtype_bytes"],
            kind=planned["kind"],
            k_scale_bytes=planned["k_scale_bytes"],
            v_scale_bytes=planned["v_scale_bytes"],
        )

    return replace(
        kv(planned, planned["layers"]),
        draft=None if planned["draft"] is None else kv(planned["draft"], planned["draft"]["layers"]),
        groups=tuple(
            KVGroup(group["name"], kv(group, len(group["layers"])), tuple(group["layers"]), group["page_size"])
            for group in planned["groups"]
        ),
        states=tuple(
            StateShape(
                name=state["name"],
                layers=tuple(state["layers"]),
                rows=state["rows"] if state["kind"] == "rows" else state["rows"] * page_size,
                heads=state["heads"],
                head_bytes=state["head_bytes"],
            )
            for state in planned["states"]
        ),
    )


def group_pages(group: PlannedGroup, tokens: int, prefix_tokens: int = 0) -> range:
    """Returns the positions in a prompt of a KV group's pages: those in the window and behind a cached prefix."""
    end = -(-tokens // group["page_size"])
    before_window = max(0, tokens - group["window"]) if group["window"] else 0
    return range(min(max(before_window, prefix_tokens) // group["page_size"], end), end)


def state_items(state: PlannedState, tokens: int, page_size: int) -> int:
    """Returns the number of items of a state component in a room of `tokens`, whether or not a prefix is cached."""
    if state["kind"] == "rows":
        return 1
    pages = -(-tokens // page_size)
    if state["kind"] == "pages":
        return pages
    return pages - max(0, tokens - state["window"]) // page_size


def resolve_shape(request: PlanRequest) -> PlannedShape:
    """Resolves the model shape: a preset, by default `DEFAULT_MODEL`, in which the request's sizes replace its own.

    Raises:
        ConfigError: the model, the element type or the kind is unknown; the message suggests the nearest names.
        LayoutError: a size is out of range.
    """
    preset = find_model(request.model or (DEFAULT_LATENT if request.kind == "mla" else DEFAULT_MODEL))
    shape = _shape(request, preset)
    unchanged = PlanRequest(request.prefill, request.decode, (), 0, 0, model=preset.name, dtype=request.dtype)
    if shape == _shape(unchanged, preset):
        shape["model"] = preset.name
    return shape


def _shape(request: PlanRequest, preset: ModelPreset) -> PlannedShape:
    dtype = request.dtype or preset.dtype
    kind = request.kind or preset.kind
    choose("--kind", kind, KINDS)
    latent = kind == "mla"
    as_kind = preset if kind == preset.kind else find_model(DEFAULT_LATENT if latent else DEFAULT_MODEL)
    layers, heads = request.layers or preset.num_layers, request.kv_heads or as_kind.num_kv_heads
    k_dim = request.head_dim or as_kind.head_dim
    v_dim = 0 if latent else request.v_head_dim or as_kind.v_head_dim or k_dim
    k_scale_bytes, v_scale_bytes = (
        DTYPE_SCALE_BYTES.get(dtype, 0) if each is None else each for each in request.scale_bytes
    )
    states = _within(preset.states, layers) if request.states is None else request.states
    return PlannedShape(
        model="",
        kind=kind,
        layers=layers,
        kv_heads=heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        dtype=dtype,
        dtype_bytes=DTYPE_BYTES[dtype],
        k_scale_bytes=k_scale_bytes,
        v_scale_bytes=0 if latent else v_scale_bytes,
        draft=_draft(request, heads, k_dim, v_dim),
        groups=[_group(group, layers, heads, k_dim, v_dim) for group in request.groups],
        states=[_state(state, layers) for state in states],
    )


def _draft(request: PlanRequest, heads: int, k_dim: int, v_dim: int) -> PlannedDraft | None:
    if not request.draft_layers:
        return None
    return PlannedDraft(
        layers=request.draft_layers,
        kv_heads=request.draft_heads or heads,
        head_dim=request.draft_dim or k_dim,
        v_head_dim=request.draft_dim or v_dim if v_dim else 0,
    )


def _group(group: Group, layers: int, heads: int, k_dim: int, v_dim: int) -> PlannedGroup:
    option = f"--kv-group {group.name}"
    count = check_size(f"{option}: layers", group.layers)
    if not v_dim and group.heads not in (None, 1):
        raise LayoutError(f"{option}: a latent has 1 head, not {group.heads}; leave out heads={group.heads}")
    dim = _size(f"{option}: dim", group.head_dim, k_dim)
    return PlannedGroup(
        name=group.name,
        layers=[at * layers // count for at in range(count)],
        page_size=check_size(f"{option}: page", group.page_size),
        window=check_size(f"{option}: window", group.window, minimum=0),
        kv_heads=_size(f"{option}: heads", group.heads, heads),
        head_dim=dim,
        v_head_dim=v_dim if group.head_dim is None or not v_dim else dim,
    )


def _within(states: Sequence[State], layers: int) -> tuple[State, ...]:
    """Removes from a preset's state components the layers that a model of fewer layers does not have."""
    cut = [replace(state, layers=tuple(layer for layer in state.layers if layer < layers)) for state in states]
    return tuple(short for state, short in zip(states, cut, strict=True) if short.layers or not state.layers)


def _state(state: State, layers: int) -> PlannedState:
    choose(f"kind of state {state.name}", state.kind, STATE_KINDS)
    if state.kind == "window":
        check_size(f"window of state {state.name}", state.window)
    return PlannedState(
        name=state.name,
        layers=list(state.layers or range(layers)),
        rows=check_size(f"rows of state {state.name}", state.rows),
        heads=check_size(f"heads of state {state.name}", state.heads),
        head_bytes=check_size(f"bytes per head of state {state.name}", state.head_bytes),
        kind=state.kind,
        window=state.window,
    )


def _size(option: str, value: int | None, default: int, minimum: int = 1) -> int:
    return default if value is None else check_size(option, value, minimum)
