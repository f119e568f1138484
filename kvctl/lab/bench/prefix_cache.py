"""Which part of each prompt the decode side has already: a prefix cache on every decode dp rank, worked out beforehand.

The same requests in the same order always hit the same pages, so that paths compared on one trace move the same bytes,
and the hits can be checked against the trace without running anything. A prompt's blocks count as cached from its
arrival on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvctl.lab.bench.prompts import Traffic


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a prompt is decoded, and how many of its first tokens are there already."""

    decode_dp: int
    prefix_tokens: int


class PrefixCache:
    """The blocks that one decode dp rank keeps, least recently used ones leaving first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks are here without a gap."""
        return next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def keep(self, blocks: Sequence[int]) -> None:
        """Take in a prompt's blocks; among them the last one leaves first, as it is useless without the others."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def route(traffic: Traffic, decode_dp: int, page_size: int, capacity_tokens: int) -> list[Routed]:
    """Choose a decode dp rank for every prompt, in their order, and say what it has cached of it.

    A prompt goes where the bytes moved so far, with its own, would be fewest: a long enough hit draws it to its prefix,
    and no rank is left idle because another one knows the system prompt. A session stays where its first turn went.

    Args:
        capacity_tokens: what each rank's cache holds.
    """
    capacity_blocks = int(capacity_tokens / traffic.block_tokens)
    caches = [PrefixCache(capacity_blocks) for _ in range(decode_dp)]
    moved = [0] * decode_dp
    homes: dict[int, int] = {}
    routed = []
    for prompt in traffic.prompts:
        hits = [
            hit_tokens(cache.leading(prompt.blocks), traffic.block_tokens, prompt.tokens, page_size) for cache in caches
        ]
        dp = homes.get(prompt.session, min(range(decode_dp), key=lambda at: moved[at] + prompt.tokens - hits[at]))
        if prompt.session >= 0:
            homes[prompt.session] = dp
        moved[dp] += prompt.tokens - hits[dp]
        caches[dp].keep(prompt.kept)
        routed.append(Routed(dp, hits[dp]))
    return routed


def hit_tokens(blocks: int, block_tokens: Fraction, tokens: int, page_size: int) -> int:
    """Tokens of a hit of so many leading blocks: whole pages, and never the page that the prompt ends in."""
    pages = min(int(blocks * block_tokens), tokens) // page_size
    return min(pages, (tokens - 1) // page_size) * page_size
