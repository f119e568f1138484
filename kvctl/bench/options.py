"""Reads the values of bench's options: lists, ranges, sweeps, percentages. Each refusal shows how to write it."""

from __future__ import annotations

from kvctl_agent.contract.rig import Load, Tokens

AXES = ("concurrency", "tokens")
_MOST_POINTS = 64


def parse_tokens(text: str) -> Tokens:
    """`1024`, `16,4096` (in turn) or `256..2048` (uniform).

    Raises:
        ValueError: it is none of these.
    """
    low, separator, high = text.partition("..")
    if separator:
        return Tokens(low=_positive(low, text), high=_positive(high, text))
    return Tokens(values=tuple(_positive(word, text) for word in text.split(",")))


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """`concurrency=1,4,16` or `tokens=256..16384` (powers of two from the first to the last).

    Raises:
        ValueError: an unknown axis, or values that are no list and no range.
    """
    axis, separator, values = text.partition("=")
    if not separator or axis not in AXES:
        raise ValueError(f"{text!r}: write {' or '.join(f'{axis}=1,4,16' for axis in AXES)}, or =1..1024")
    first, ranged, last = values.partition("..")
    if not ranged:
        points = [_positive(word, text) for word in values.split(",")]
    else:
        low, high = _positive(first, text), _positive(last, text)
        if high < low:
            raise ValueError(f"{text!r}: the range ends before it begins")
        points = []
        while low < high:
            points.append(low)
            low *= 2
        points.append(high)
    if len(points) > _MOST_POINTS:
        raise ValueError(f"{text!r}: {len(points)} points, at most {_MOST_POINTS}")
    return axis, list(dict.fromkeys(points))


def parse_percent(text: str) -> float:
    """`5%` or `5` as 0.05.

    Raises:
        ValueError: not a number from 0 to 100.
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ValueError(f"{text!r} is not a percentage: write 5%")
    return value / 100


def parse_names(text: str) -> tuple[str, ...]:
    """A comma list without empty words; "" is no name at all."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def sweep_loads(concurrency: int, tokens: Tokens, sweeps: list[tuple[str, list[int]]]) -> tuple[Load, ...]:
    """Every combination of the sweeps' points; an axis that is not swept keeps its option's value.

    Raises:
        ValueError: an axis is swept twice.
    """
    axes = dict(sweeps)
    if len(axes) < len(sweeps):
        raise ValueError("each axis can be swept once")
    lengths = [Tokens(values=(value,)) for value in axes["tokens"]] if "tokens" in axes else [tokens]
    return tuple(Load(at, length) for length in lengths for at in axes.get("concurrency", [concurrency]))


def _positive(word: str, whole: str) -> int:
    word = word.strip().replace("_", "")
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{whole!r}: {word!r} is not a whole number from 1 on")
    return int(word)
