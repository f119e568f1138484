"""Requests as a trace, a set of sessions or a rate gives them, before any layout is known.

A prompt names its content by blocks of tokens: two prompts that begin with the same ids begin with the same tokens,
which is all that a prefix cache needs to know.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        tokens: length of the prompt.
        output_tokens: how many decode makes of it.
        arrival_ms: when it comes, from the first one on; None where it comes as soon as there is room for it.
        blocks: ids of the prompt's blocks from its beginning; the last one may be partly filled.
        kept: ids of the blocks that are cached once it is over, which may include what was answered.
        session: what it is a turn of, or -1: turns of one session come one after the other, to the same place.
    """

    tokens: int
    output_tokens: int = 0
    arrival_ms: float | None = None
    blocks: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    session: int = -1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts in the order in which they come; `block_tokens` is the length of a block, not always whole."""

    prompts: tuple[Prompt, ...]
    block_tokens: Fraction


def poisson(prompts: Sequence[Prompt], rate_per_s: float, seed: int) -> tuple[Prompt, ...]:
    """The prompts with arrivals of a Poisson process; the same seed gives the same ones."""
    source = random.Random(seed)
    at_ms = 0.0
    arriving = []
    for prompt in prompts:
        arriving.append(replace(prompt, arrival_ms=at_ms))
        at_ms += source.expovariate(rate_per_s) * 1e3
    return tuple(arriving)


def sessions(count: int, turns: int, new_tokens: Sequence[int], output_tokens: int, block_tokens: int) -> Traffic:
    """Conversations that grow: each turn's prompt is everything said before and some new tokens.

    All first turns come before any second one.

    Args:
        new_tokens: what turns add, in turn over the requests in their order.
        output_tokens: what is answered to each turn, and so part of the next one's prompt.
        block_tokens: the unit of reuse: a page.
    """
    said = [0] * count
    prompts: list[Prompt] = []
    for _ in range(turns):
        for session in range(count):
            added = new_tokens[len(prompts) % len(new_tokens)]
            tokens = said[session] + added
            said[session] = tokens + output_tokens
            prompts.append(
                Prompt(
                    tokens=tokens,
                    output_tokens=output_tokens,
                    blocks=_blocks(session, count, -(-tokens // block_tokens)),
                    kept=_blocks(session, count, said[session] // block_tokens),
                    session=session,
                )
            )
    return Traffic(tuple(prompts), Fraction(block_tokens))


def _blocks(session: int, sessions: int, count: int) -> tuple[int, ...]:
    """Ids of a session's first blocks: no two sessions share any."""
    return tuple(range(session, session + count * sessions, sessions))
