"""Turns a trace or a set of sessions into requests that a plan can take, and says afterwards what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvctl.lab.bench.prefix_cache import route
from kvctl.lab.bench.prompts import Traffic
from kvctl.lab.ranks.plan import Plan, PlannedShape
from kvctl.lab.ranks.request import Load, PlanRequest, Request, Tokens


@dataclass(frozen=True, slots=True)
class Source:
    """Real traffic: what it is, for the saved result, and its prompts.

    Attributes:
        facts: where it came from, how it was scaled, lines that were skipped.
        cache_tokens: what the prefix cache of each decode dp group holds; None: half of what its memory holds.
    """

    facts: Mapping[str, Any]
    traffic: Traffic
    cache_tokens: int | None

    @property
    def longest(self) -> Tokens:
        """The length that a plan must at least have room for."""
        return Tokens(values=(max(prompt.tokens for prompt in self.traffic.prompts),))


def with_requests(request: PlanRequest, source: Source, shape: PlannedShape, decodes: bool) -> PlanRequest:
    """The request with the source's prompts in place of drawn ones, each with what the decode side has cached of it.

    Args:
        shape: as planned, which decides what a cache holds.
        decodes: whether time passes in decoding; else outputs count for the caches alone.
    """
    capacity = source.cache_tokens
    if capacity is None:
        capacity = request.memory_bytes // 2 // request.decode.dp // token_bytes(shape)
    routed = route(source.traffic, request.decode.dp, request.page_size, capacity)
    requests = tuple(
        Request(
            arrival_ms=prompt.arrival_ms,
            tokens=prompt.tokens,
            prefix_tokens=where.prefix_tokens,
            output_tokens=prompt.output_tokens if decodes else 0,
            session=prompt.session,
            decode_dp=where.decode_dp,
        )
        for prompt, where in zip(source.traffic.prompts, routed, strict=True)
    )
    return replace(request, requests=requests, rooms=None, loads=tuple(_bare(load) for load in request.loads))


def token_bytes(shape: PlannedShape) -> int:
    """K and V of one token over the whole model."""
    return max(
        1, shape["layers"] * shape["kv_heads"] * (shape["head_dim"] + shape["v_head_dim"]) * shape["dtype_bytes"]
    )


def hits(plan: Plan) -> list[dict[str, Any]]:
    """Every request of a plan as it is run, in order."""
    names = ("tokens", "prefix_tokens", "output_tokens", "arrival_ms", "decode_dp", "session")
    rooms: Sequence[Mapping[str, Any]] = plan["loads"][0]["rooms"]
    return [{name: room[name] for name in names} for room in rooms]


def _bare(load: Load) -> Load:
    return replace(load, rooms=None)
