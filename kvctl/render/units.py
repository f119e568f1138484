"""Formats durations, sizes and times of day for people, and parses them; None is formatted as `-`."""

from __future__ import annotations

import re
import time

UNKNOWN = "-"

_TIME_UNITS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_SIZE_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
# Enough digits for any real quantity; more would overflow when converted to an integer.
_NUMBER = r"\d{1,18}(?:\.\d{1,18})?"
_DURATION = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h|d)")
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]+)")


def duration(value: float | None) -> str:
    """Formats a duration in ns: `812 ns`, `12.3 µs`, `1.24 ms`, `12.3 s`, `2m03s`, `5h07m`, `3d04h`."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0 s"
    sign, size = ("-", -value) if value < 0 else ("", value)
    for limit, divisor, unit in ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (60e9, 1e9, "s")):
        # Use the first unit whose limit exceeds the value rounded to three digits: 999,999 ns is 1 ms, not 1,000 µs.
        if size < limit * 0.9995:
            return f"{sign}{three_digits(size / divisor)} {unit}"
    seconds = round(size / 1e9)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours < 1:
        return f"{sign}{minutes}m{seconds % 60:02d}s"
    if days < 1:
        return f"{sign}{hours}h{minutes % 60:02d}m"
    return f"{sign}{days}d{hours % 24:02d}h"


def offset(value: float | None) -> str:
    """Formats the offset of a clock in ns with its sign: `+3.1 ms`, `-12 µs`."""
    return f"{'+' * (value is not None and value > 0)}{duration(value)}"


def milliseconds(value: float | None) -> str:
    """Formats nanoseconds as milliseconds with fixed decimals, `14.500`, so that columns of times align."""
    return UNKNOWN if value is None else f"{value / 1e6:.3f}"


def size(value: float | None) -> str:
    """Formats a number of bytes: `512 B`, `1.5 KiB`, `64 MiB`, `2.25 GiB`."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1023.5:
            return f"{three_digits(amount)} {unit}"
        amount /= 1024
    return f"{three_digits(amount)} TiB"


def three_digits(value: float | None) -> str:
    """Formats at most three significant digits without trailing zeros or exponents: `0.72`, `12.3`, `412`, `0.0004`."""
    if value is None:
        return UNKNOWN
    magnitude = abs(value)
    decimals = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2 if magnitude >= 0.005 else 4
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def count(value: float | None) -> str:
    """Formats a count with separators, `12,345`."""
    return UNKNOWN if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    """Formats a ratio as `40 %`."""
    return UNKNOWN if value is None else f"{three_digits(value * 100)} %"


def clock_seconds(value: int | None) -> str:
    """Formats a wall-clock time in ns as the local time of day, `14:03:59`."""
    return UNKNOWN if value is None else time.strftime("%H:%M:%S", time.localtime(value // 1_000_000_000))


def clock_time(value: int | None) -> str:
    """Formats a wall-clock time in ns as the local time of day with milliseconds, `14:03:59.120`."""
    return UNKNOWN if value is None else f"{clock_seconds(value)}.{value // 1_000_000 % 1000:03d}"


def parse_duration(text: str) -> int:
    """Converts `5s`, `200ms`, `1h30m` to nanoseconds; raises ValueError if the text is not a duration with a unit."""
    text = text.strip()
    pieces: list[tuple[str, str]] = _DURATION.findall(text)
    if not pieces or "".join(number + unit for number, unit in pieces) != text:
        raise ValueError(f"{text!r} is not a duration: write 500ms, 5s, 2m or 1h30m")
    return sum(round(float(number) * _TIME_UNITS[unit]) for number, unit in pieces)


def parse_seconds(text: str) -> int:
    """Converts a duration to nanoseconds like `parse_duration`; a bare number is in seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    text = text.strip()
    return round(float(text) * 1e9) if re.fullmatch(_NUMBER, text) else parse_duration(text)


def parse_size(text: str) -> int:
    """Converts `64MiB` (1024-based), `1GB` (1000-based), `512B` to bytes.

    Raises:
        ValueError: the text is not a size with a unit.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _SIZE_UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write 512B, 64MiB or 1GB")
    return round(float(found[1]) * factor)
