"""Parses the values of options that only `kvctl bench` has: sweeps and comparisons.

Every function raises ValueError for a malformed value, with an example of a correct one.
"""

from __future__ import annotations

from kvctl.lab.ranks.request import BUSY_ENGINES, CP_MODES, Load, Tokens, parse_choices, positive
from kvctl_agent.contract.config import KEYS_BY_NAME

TRANSPORTS = KEYS_BY_NAME["transport"].choices
AXES = ("concurrency", "tokens")
_MAX_POINTS = 64


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Parses a sweep into its axis and values: `concurrency=1,4,16`, or `tokens=256..16384`, doubling at each step."""
    axis, separator, values = text.partition("=")
    if not separator or axis not in AXES:
        raise ValueError(f"{text!r}: write {' or '.join(f'{axis}=1,4,16' for axis in AXES)}, or =1..1024")
    first, ranged, last = values.partition("..")
    if not ranged:
        points = [positive(word, text) for word in values.split(",")]
    else:
        low, high = positive(first, text), positive(last, text)
        if high < low:
            raise ValueError(f"{text!r}: the end of the range is below its start")
        points = []
        while low < high:
            points.append(low)
            low *= 2
        points.append(high)
    if len(points) > _MAX_POINTS:
        raise ValueError(f"{text!r}: {len(points)} points, at most {_MAX_POINTS}")
    return axis, list(dict.fromkeys(points))


def sweep_loads(concurrency: int, tokens: Tokens, sweeps: list[tuple[str, list[int]]]) -> tuple[Load, ...]:
    """Returns a load for every combination of swept values; an axis without a sweep keeps the value of its option.

    Args:
        concurrency, tokens: Values of the options.
        sweeps: Axis and values of each sweep, from `parse_sweep`.
    """
    axes = dict(sweeps)
    if len(axes) < len(sweeps):
        raise ValueError("each axis can be swept once")
    lengths = [Tokens(values=(value,)) for value in axes["tokens"]] if "tokens" in axes else [tokens]
    return tuple(Load(at, length) for length in lengths for at in axes.get("concurrency", [concurrency]))


def parse_cp_modes(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of CP modes (`CP_MODES`)."""
    return parse_choices(text, CP_MODES, lambda word: word in CP_MODES)


def parse_busy_engines(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of `BUSY_ENGINES`."""
    return parse_choices(text, BUSY_ENGINES, lambda word: word in BUSY_ENGINES)
