"""Modes of the layer-pipelined path, and why a forward is pipelined or not: counted by the agent, said by kvctl."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, get_args

PipelineMode = Literal["off", "on", "measured"]
PIPELINE_MODES: tuple[PipelineMode, ...] = get_args(PipelineMode)

FEW_LAYERS = 4
"""Up to so many layers there is nothing to gain from cutting them."""

REASONS = MappingProxyType(
    {
        "formula": "cut as the group-size formula says",
        "override": "cut into groups of pipeline_group_size layers",
        "measured": "cut as the compute and transfer times of recent forwards suggest",
        "off": "pipeline is off",
        "few-tokens": "fewer tokens per request than pipeline_min_tokens, on average",
        "few-layers": f"this rank has {FEW_LAYERS} layers or fewer",
        "empty-batch": "the batch has no request",
        "no-split-forward": "the engine cannot run the forward in layer groups",
        "multimodal": "the batch has multimodal inputs",
        "attention-dp": "the prefill instance runs attention data parallel",
        "expert-balancing": "expert load balancing is on",
        "draft": "a draft or speculative worker runs the forward",
        "input-embeddings": "a request gives embeddings in place of tokens",
        "prefill-only": "a request is prefill-only",
        "one-group": "a single group would hold every layer",
    }
)
"""Every reason of a decision, the ones for it first, with the words that explain it."""

PIPELINED: frozenset[str] = frozenset({"formula", "override", "measured"})
"""The reasons that come with layer groups; every other one is a reason against."""
