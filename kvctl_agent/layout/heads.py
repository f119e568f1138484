"""Which KV heads a tensor-parallel rank holds, and the hash that spreads replicated work."""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.errors import LayoutError

_MASK = 2**64 - 1


class HeadRange(NamedTuple):
    """Global heads [lo, hi) of one rank."""

    lo: int
    hi: int


def head_range(num_heads: int, tp: int, rank: int) -> HeadRange:
    """The heads that `rank` of `tp` ranks holds.

    With tp <= heads a rank holds a block of heads / tp. With tp > heads it holds one head, and tp / heads neighbouring
    ranks hold the same one.

    Raises:
        LayoutError: neither number divides the other (with the arithmetic), or the rank is outside [0, tp).
    """
    if not 0 <= rank < tp:
        raise LayoutError(f"tp rank {rank} is outside [0, {tp})")
    if num_heads % tp == 0:
        each = num_heads // tp
        return HeadRange(rank * each, (rank + 1) * each)
    if tp % num_heads == 0:
        head = rank * num_heads // tp
        return HeadRange(head, head + 1)
    divisors = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
    raise LayoutError(
        f"{num_heads} KV heads cannot be laid out over tp {tp}: {num_heads} % {tp} = {num_heads % tp} and "
        f"{tp} % {num_heads} = {tp % num_heads}; choose a tp of {divisors} or a multiple of {num_heads}"
    )


def replicas(num_heads: int, tp: int) -> int:
    """How many ranks of `tp` hold the same head (1 unless tp > heads)."""
    return max(1, tp // num_heads)


def mix64(x: int) -> int:
    """Splitmix64's finaliser: a bijection of 64-bit numbers that makes neighbouring rooms look unrelated.

    Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), variant 13.
    """
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
