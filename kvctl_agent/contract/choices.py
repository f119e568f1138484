"""Names that configuration and output share: transfer paths, context-parallel modes, pipelining modes and reasons."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, get_args

HOST = -1
"""Device number of host memory, in all layers of the agent and on the wire."""

PATHS = BULK, SLICE, STAGED, DIRECT = "bulk", "slice", "staged", "direct"
CP_MODES = RANK0, ALL, ALL_CHUNK, ROOM_HASH = "rank0", "all", "all-chunk", "room-hash"

PipelineMode = Literal["off", "on", "auto"]
PIPELINE_MODES: tuple[PipelineMode, ...] = get_args(PipelineMode)

FEW_LAYERS = 4
"""A rank with at most this many layers does not pipeline: grouping them gains nothing."""

REASONS = MappingProxyType(
    {
        "formula": "groups sized by the formula",
        "override": "groups of pipeline_group_size layers",
        "measured": "groups sized by the compute and transfer times of recent forwards",
        "off": "pipeline is off",
        "few-tokens": "fewer tokens per request than pipeline_min_tokens, on average",
        "few-layers": f"this rank has {FEW_LAYERS} layers or fewer",
        "empty-batch": "the batch has no request",
        "no-split-forward": "the engine cannot run the forward in layer groups",
        "multimodal": "the batch has multimodal inputs",
        "attention-dp": "the prefill instance runs attention data parallel",
        "expert-balancing": "expert load balancing is on",
        "draft": "a draft or speculative worker runs the forward",
        "input-embeddings": "a request has embeddings instead of tokens",
        "prefill-only": "a request is prefill-only",
        "one-group": "a single group would hold every layer",
    }
)
"""Reasons of a pipelining decision with their explanations; the reasons for pipelining come first."""

PIPELINED: frozenset[str] = frozenset({"formula", "override", "measured"})
"""Reasons for pipelining; all others are reasons against it."""
