"""KV heads of a tensor-parallel (tp) rank, and the hash that spreads rooms over replicated heads."""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.errors import LayoutError

_MASK = 2**64 - 1


class HeadRange(NamedTuple):
    """Heads [lo, hi) of one rank, numbered over the whole model."""

    lo: int
    hi: int


def head_range(num_heads: int, tp: int, rank: int) -> HeadRange:
    """Return the heads that one tensor-parallel rank holds.

    With tp <= num_heads a rank holds a block of num_heads / tp heads. With tp > num_heads it holds one head, and
    tp / num_heads neighbouring ranks hold the same head.

    Raises:
        LayoutError: neither `num_heads` nor `tp` divides the other, or `rank` is outside [0, tp).
    """
    if not 0 <= rank < tp:
        raise LayoutError(f"tp rank {rank} is outside [0, {tp})")
    if num_heads % tp == 0:
        block = num_heads // tp
        return HeadRange(rank * block, (rank + 1) * block)
    if tp % num_heads == 0:
        head = rank * num_heads // tp
        return HeadRange(head, head + 1)
    divisors = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
    raise LayoutError(
        f"{num_heads} KV heads cannot be laid out over tp {tp}: {num_heads} % {tp} = {num_heads % tp} and "
        f"{tp} % {num_heads} = {tp % num_heads}; choose a tp of {divisors} or a multiple of {num_heads}"
    )


def replicas(num_heads: int, tp: int) -> int:
    """Return the number of tp ranks that hold the same head; 1 unless tp > num_heads."""
    return max(1, tp // num_heads)


def mix64(x: int) -> int:
    """Hash a 64-bit number with splitmix64's finaliser, a bijection that maps consecutive rooms to unrelated numbers.

    Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), variant 13.
    """
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
