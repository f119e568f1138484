"""Comparison of two agents: the settings in which they are incompatible, and other differences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvctl.render.view import Column, View, Width

INCOMPATIBLE = "incompatible"
DIFFERS = "differs"
SAME = "same"
# "page_size 64 ≠ 32": the prefill agent's value first.
_FACTOR = re.compile(r"(?P<factor>protocol version|\S+) (?P<prefill>\S.*?) ≠ (?P<decode>.+)", re.DOTALL)

DIFF = View(
    "peers.diff",
    (
        Column("factor"),
        Column("a"),
        Column("b"),
        Column("verdict", styles={INCOMPATIBLE: "bold red", DIFFERS: "yellow", SAME: "dim"}),
        Column("kind", width=Width.NORMAL),
        Column("text", width=Width.WIDE),
    ),
    empty="no difference",
)


def refusals(
    by_prefill: Mapping[str, Any] | None, by_decode: Mapping[str, Any] | None, swapped: bool
) -> list[dict[str, Any]]:
    """Returns the incompatible settings of a prefill and a decode agent.

    Args:
        by_prefill: the prefill agent's row about the decode agent.
        by_decode: the decode agent's row about the prefill agent. It mostly repeats what the prefill agent sent, so it
            counts only if the prefill agent reports nothing.
        swapped: `a` is the decode agent.
    """
    differences = list(by_prefill["differences"]) if by_prefill else []
    decode_first = bool(by_prefill) and not differences
    texts = differences or (list(by_decode["differences"]) if by_decode else [])
    rows = []
    for text in texts:
        found = _FACTOR.fullmatch(text)
        first, second = (found["prefill"], found["decode"]) if found else (None, None)
        if swapped != decode_first:
            first, second = second, first
        factor = found["factor"] if found else text
        rows.append({"factor": factor, "a": first, "b": second, "verdict": INCOMPATIBLE, "kind": "plan", "text": text})
    return rows


def comparisons(a: Mapping[str, Any], b: Mapping[str, Any], kind: str, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Returns one row per key with the values of both agents."""
    return [
        {
            "factor": key,
            "a": a.get(key),
            "b": b.get(key),
            "verdict": SAME if a.get(key) == b.get(key) else DIFFERS,
            "kind": kind,
            "text": None,
        }
        for key in keys
    ]


def build(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the versions and engine of an agent as a flat mapping."""
    transport, pool, sizes = status["transport"], status["pool"], status["sizes"]
    return {
        "version": status["version"],
        "role": status["role"],
        "device": status["device"],
        **{f"transport.{key}": _text(value) for key, value in transport.items()},
        **{f"sizes.{key}": value for key, value in sizes.items()},
        **{f"pool.{key}": value for key, value in pool.items()},
    }


def _text(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ",".join(value)
