"""Reads request traces in Mooncake's format: a JSON object per line, with the ids of the prompt's 512-token blocks.

Traces are untrusted input: every length is bounded, and a line that does not parse is reported with its number and
skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import orjson

from kvctl.lab.bench.traffic import Traffic
from kvctl.lab.ranks.request import Request

BLOCK_TOKENS = 512
"""Tokens per id of `hash_ids`; the last block of a prompt may have fewer."""

MAX_LINE_BYTES = 1 << 20
MAX_TOKENS = 16 << 20
MAX_SKIPPED = 10_000
_MAX_ID = (1 << 63) - 1
_SHOWN = 3


class TraceError(ValueError):
    """The trace cannot be used; the text names the file and, where possible, the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The first requests of a trace, as recorded.

    Attributes:
        requests: prompts in the order of their arrival.
        skipped: reason for each line that did not parse, by line number.
    """

    file: str
    requests: tuple[Request, ...]
    skipped: Mapping[int, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Messages about skipped lines: one for each of the first few, and one with the number of further lines."""
        lines = [f"{self.file} line {number} is skipped: {why}" for number, why in self.skipped.items()]
        more = len(lines) - _SHOWN
        return lines[:_SHOWN] + ([f"{self.file}: {more} more lines are skipped"] if more > 0 else [])


def read(path: Path, most: int) -> Trace:
    """Reads up to `most` requests of a trace file.

    Raises:
        TraceError: The file cannot be read, has no request, has a line longer than `MAX_LINE_BYTES`, or has more than
            `MAX_SKIPPED` lines that do not parse.
    """
    requests: list[Request] = []
    skipped: dict[int, str] = {}
    try:
        with path.open("rb") as file:
            number = 0
            while len(requests) < most and (line := file.readline(MAX_LINE_BYTES + 1)):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(
                        f"{path} line {number} has more than {MAX_LINE_BYTES} bytes, so this is not a trace"
                    )
                if not line.strip():
                    continue
                try:
                    requests.append(parse(line))
                except ValueError as error:
                    skipped[number] = str(error)
                    if len(skipped) > MAX_SKIPPED:
                        raise TraceError(
                            f"{path} has more than {MAX_SKIPPED} lines that do not parse, as line {number}: {error}"
                        ) from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not requests:
        first = next((f": line {number}: {why}" for number, why in skipped.items()), "")
        raise TraceError(f"{path} has no request{first}")
    return Trace(path.name, tuple(sorted(requests, key=lambda each: each.arrival_ms or 0.0)), skipped)


def parse(line: bytes) -> Request:
    """Parses a line `{"timestamp": ms, "input_length": …, "output_length": …, "hash_ids": […]}`; ignores other keys.

    Raises:
        ValueError: The line is not such an object, or a value is out of range.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"the line is {_kind(row)}, not an object")
    tokens = _whole(row, "input_length", 1, MAX_TOKENS)
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {_kind(ids)}, not a list")
    if len(ids) > -(-tokens // BLOCK_TOKENS):
        raise ValueError(f"hash_ids names {len(ids)} blocks of {BLOCK_TOKENS}, but the prompt has {tokens} tokens")
    for at, each in enumerate(ids):
        if type(each) is not int or not 0 <= each <= _MAX_ID:
            raise ValueError(f"hash_ids[{at}] is {_kind(each)}, not a whole number from 0 on")
    stamp = row.get("timestamp")
    if not isinstance(stamp, int | float) or isinstance(stamp, bool) or not 0 <= stamp < 1 << 53:
        raise ValueError(f"timestamp is {_kind(stamp)}, not milliseconds from 0 on")
    blocks = tuple(ids)
    output_tokens = _whole(row, "output_length", 0, MAX_TOKENS)
    return Request(float(stamp), tokens, output_tokens=output_tokens, blocks=blocks, kept=blocks)


def scaled(trace: Trace, tokens_scale: Fraction, speedup: float) -> Traffic:
    """Scales the lengths and arrival times of a trace; arrivals count from the first request.

    Args:
        tokens_scale: Factor of all lengths; no prompt becomes shorter than one token.
        speedup: Divisor of the arrival times; infinity removes them, which makes a closed loop.
    """
    first_ms = trace.requests[0].arrival_ms or 0.0
    return Traffic(
        tuple(
            replace(
                request,
                tokens=max(1, round(request.tokens * tokens_scale)),
                output_tokens=round(request.output_tokens * tokens_scale),
                arrival_ms=None if math.isinf(speedup) else ((request.arrival_ms or 0.0) - first_ms) / speedup,
            )
            for request in trace.requests
        ),
        BLOCK_TOKENS * tokens_scale,
    )


def _whole(row: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {_kind(value)}, not a whole number from {low} to {high}")
    return value


def _kind(value: Any) -> str:
    """Describes a value for an error message: numbers by at most 40 characters, anything else by its type."""
    return "missing" if value is None else f"{value!r:.40}" if isinstance(value, int | float) else type(value).__name__
