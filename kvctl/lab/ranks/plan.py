"""Data types of a fleet's plan: model shape, ranks, transfer slices and loads. `resolve` computes the plan."""

from __future__ import annotations

from typing import TypedDict

from kvctl.lab.ranks.request import Role, StateKind


class PlannedDraft(TypedDict):
    """KV geometry of a draft model (speculative decoding)."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


class PlannedState(TypedDict):
    """One component of per-request state, as in `request.State` with defaults filled in."""

    name: str
    layers: list[int]
    rows: int
    heads: int
    head_bytes: int
    kind: StateKind
    window: int


class PlannedGroup(TypedDict):
    """A KV group, as in `request.Group` with defaults filled in."""

    name: str
    layers: list[int]  # for each layer, the KV layer beside which it runs
    page_size: int
    window: int  # 0: all tokens
    kv_heads: int
    head_dim: int
    v_head_dim: int


class PlannedShape(TypedDict):
    """KV geometry of the model, with defaults filled in."""

    model: str  # "" if given by numbers
    kind: str
    layers: int
    kv_heads: int
    head_dim: int  # of K, or of the latent
    v_head_dim: int  # 0 for a latent
    dtype: str
    dtype_bytes: int
    k_scale_bytes: int
    v_scale_bytes: int
    draft: PlannedDraft | None
    groups: list[PlannedGroup]
    states: list[PlannedState]


class PlannedRank(TypedDict):
    """Position, pool size and device of one rank process."""

    role: Role
    instance: int  # prefill instance; -1 for decode
    unique: int  # number within its instance
    dp: int
    pp: int
    cp: int
    tp: int
    heads: list[int]  # global [lo, hi)
    layers: list[int]  # global [lo, hi)
    pool_pages: int
    state_slots: dict[str, int]  # pages of each KV group, items of each state component
    pool_bytes: int
    device: int  # GPU number; -1: host memory


class PlannedShare(TypedDict):
    """Bytes of one segment that one writer (a prefill rank) sends to one decode rank for a room of the first load.

    A segment is the KV cache of the model, that of its draft model, a KV group, or a state component.
    """

    instance: int
    writer: int
    reader: int
    segment: str  # "kv", "draft", a KV group or a state component
    heads: list[int]  # global [lo, hi)
    layers: list[int]  # [lo, hi); global for KV, draft and groups
    bytes: int
    parts: int
    pages: int  # transfer pages, pages of a KV group, or items of state
    transfer_page: int  # tokens of each of the pages; 0 for state
    splits: list[int]  # transfer pages in a page of the writer and of the decode rank
    stripe: list[int] | None  # tokens [lo, hi) of each run of n tokens: [lo, hi, n]; None: all tokens
    descriptors: dict[str, int | None]  # by path; None if the path is not legal


class PlannedRoom(TypedDict):
    """One request of a load; `bytes` is its payload over all ranks."""

    tokens: int
    prefix_tokens: int
    instance: int
    decode_dp: int
    bytes: int
    arrival_ms: float | None  # after the first room of its batch; None: closed loop
    output_tokens: int


class PlannedLoad(TypedDict):
    """One point of a sweep: its rooms, their division into batches, and the limits on rooms in flight."""

    concurrency: int
    in_flight: int  # the part of the concurrency that fits in memory
    windows: list[int]  # maximum rooms in flight of each decode dp group
    tokens: str
    tokens_mean: float
    rooms: list[PlannedRoom]
    batches: list[list[int]]  # [first, end) of `rooms`


class Plan(TypedDict):
    """Everything that the ranks of a fleet and the driver of a bench or demo need to know."""

    shape: PlannedShape
    page_size: int  # of the prefill side
    decode_page_size: int
    transfer_page: int  # tokens of the longest run within one page of both sides and on one decode cp rank
    cp_interleave: int | None  # consecutive tokens of a prompt on one decode cp rank; None: a single cp rank
    kv_layouts: list[str]  # of the prefill and the decode side
    page_order: str
    chunk_tokens: int
    transport: str
    device: str  # one of `request.DEVICES`
    paths: list[str]
    pipelines: list[str]
    cp_mode: str
    ranks: list[PlannedRank]
    shares: list[PlannedShare]
    loads: list[PlannedLoad]
    ring_bytes: int  # of each decode rank
    room_stride: int  # difference between the first room numbers of two runs
    aux_slots: int
    config: dict[str, str | int | float | bool]  # the agents' configuration
    notes: list[str]  # limits that were applied, for the user
