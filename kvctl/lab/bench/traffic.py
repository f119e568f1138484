"""Traffic from a trace or from sessions, and the prefix that a decode rank's cache already has of each prompt.

A prompt's content is a list of block ids: prompts that begin with the same ids begin with the same tokens. Prefix hits
are computed before the bench runs, so that all compared paths move the same bytes, and so that the hits can be checked
without running anything. A prompt's blocks count as cached from its arrival on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from kvctl.lab.ranks.plan import Plan, PlannedShape
from kvctl.lab.ranks.request import PlanRequest, Request, Tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts in the order of their arrival, and the tokens of a block, which need not be whole in a scaled trace."""

    prompts: tuple[Request, ...]
    block_tokens: Fraction


@dataclass(frozen=True, slots=True)
class Source:
    """Traffic and its description.

    Attributes:
        facts: origin, scale and skipped lines, for the saved result.
        cache_tokens: capacity of each decode dp rank's prefix cache; None for an equal share of half of the memory.
    """

    facts: Mapping[str, Any]
    traffic: Traffic
    cache_tokens: int | None

    @property
    def longest(self) -> Tokens:
        """Length of the longest prompt, for which a plan needs memory."""
        return Tokens(values=(max(prompt.tokens for prompt in self.traffic.prompts),))


def sessions(count: int, turns: int, new_tokens: Sequence[int], output_tokens: int, block_tokens: int) -> Traffic:
    """Creates conversations in which each turn's prompt is the whole conversation so far and some new tokens.

    All first turns come before any second turn.

    Args:
        count: Number of sessions.
        turns: Turns of each session.
        new_tokens: Numbers of tokens that turns add, used cyclically over all requests.
        output_tokens: Length of each answer, which becomes part of the next prompt.
        block_tokens: Tokens of a block, the unit of reuse; the page size.
    """
    lengths = [0] * count
    prompts: list[Request] = []
    for _ in range(turns):
        for session in range(count):
            tokens = lengths[session] + new_tokens[len(prompts) % len(new_tokens)]
            lengths[session] = tokens + output_tokens
            prompts.append(
                Request(
                    arrival_ms=None,
                    tokens=tokens,
                    output_tokens=output_tokens,
                    blocks=_blocks(session, count, -(-tokens // block_tokens)),
                    kept=_blocks(session, count, lengths[session] // block_tokens),
                    session=session,
                )
            )
    return Traffic(tuple(prompts), Fraction(block_tokens))


class PrefixCache:
    """The blocks cached by one decode dp rank, with least-recently-used eviction."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, blocks: Sequence[int]) -> int:
        """Returns the length of the longest cached prefix of a prompt, in blocks."""
        return next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def keep(self, blocks: Sequence[int]) -> None:
        """Adds a prompt's blocks. The last block is evicted first, because it is useless without the ones before it."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def route(traffic: Traffic, decode_dp: int, page_size: int, capacity_tokens: int) -> list[tuple[int, int]]:
    """Assigns every prompt to a decode dp rank.

    A prompt is assigned to the rank for which the fewest tokens have been transferred so far, including the prompt's
    own. A long prefix hit therefore attracts a prompt, but no rank stays idle because another one has the system prompt
    cached. A session stays on the rank of its first turn.

    Args:
        decode_dp: Number of decode dp ranks.
        capacity_tokens: Capacity of each rank's prefix cache.

    Returns:
        The decode dp rank of each prompt, and the length of its prefix hit there in tokens.
    """
    capacity_blocks = int(capacity_tokens / traffic.block_tokens)
    caches = [PrefixCache(capacity_blocks) for _ in range(decode_dp)]
    moved = [0] * decode_dp
    session_ranks: dict[int, int] = {}
    routed = []
    for prompt in traffic.prompts:
        hits = [
            hit_tokens(cache.leading(prompt.blocks), traffic.block_tokens, prompt.tokens, page_size) for cache in caches
        ]
        cheapest = min(range(decode_dp), key=lambda at: moved[at] + prompt.tokens - hits[at])
        dp = session_ranks.get(prompt.session, cheapest)
        if prompt.session >= 0:
            session_ranks[prompt.session] = dp
        moved[dp] += prompt.tokens - hits[dp]
        caches[dp].keep(prompt.kept)
        routed.append((dp, hits[dp]))
    return routed


def hit_tokens(blocks: int, block_tokens: Fraction, tokens: int, page_size: int) -> int:
    """Returns the length of a prefix hit in tokens: whole pages only, and never the prompt's last page.

    Args:
        blocks: Number of the prompt's leading blocks that are cached.
        block_tokens: Tokens of a block.
        tokens: Length of the prompt.
    """
    pages = min(int(blocks * block_tokens), tokens) // page_size
    return min(pages, (tokens - 1) // page_size) * page_size


def with_requests(request: PlanRequest, source: Source, shape: PlannedShape) -> PlanRequest:
    """Returns the plan request with the source's prompts and their prefix hits instead of generated prompts.

    Without simulated decoding, the outputs of prompts matter for the prefix caches only.

    Args:
        shape: The planned shape, which determines how many tokens fit into a cache.
    """
    capacity = source.cache_tokens
    if capacity is None:
        capacity = request.memory_bytes // 2 // request.decode.dp // token_bytes(shape)
    routed = route(source.traffic, request.decode.dp, request.decode_run, capacity)
    requests = tuple(
        replace(
            prompt,
            prefix_tokens=prefix_tokens,
            output_tokens=prompt.output_tokens if request.decode_ms > 0 else 0,
            decode_dp=decode_dp,
        )
        for prompt, (decode_dp, prefix_tokens) in zip(source.traffic.prompts, routed, strict=True)
    )
    loads = tuple(replace(load, rooms=None) for load in request.loads)
    return replace(request, requests=requests, rooms=None, loads=loads)


def token_bytes(shape: PlannedShape) -> int:
    """Returns the bytes of one token's K and V in all layers."""
    return max(
        1, shape["layers"] * shape["kv_heads"] * (shape["head_dim"] + shape["v_head_dim"]) * shape["dtype_bytes"]
    )


def planned_requests(plan: Plan) -> list[dict[str, Any]]:
    """Returns the lengths, arrival and placement of every request of a plan, for the saved result."""
    names = ("tokens", "prefix_tokens", "output_tokens", "arrival_ms", "decode_dp", "session")
    rooms: Sequence[Mapping[str, Any]] = plan["loads"][0]["rooms"]
    return [{name: room[name] for name in names} for room in rooms]


def _blocks(session: int, sessions: int, count: int) -> tuple[int, ...]:
    """Returns the ids of the first `count` blocks of a session; no two sessions share an id."""
    return tuple(range(session, session + count * sessions, sessions))
