"""What the commands print, byte for byte. `UPDATE_GOLDEN=1` writes the files anew; read the difference, then."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {
    "status": ("status",),
    "rooms": ("rooms",),
    "history": ("rooms", "history"),
    "slow": ("rooms", "slow"),
    "room": ("rooms", "show", "18446744073709551615"),
    "staging": ("staging",),
    "staging-map": ("staging", "map"),
    "layers": ("layers",),
    "peers": ("peers",),
    "metrics": ("metrics",),
    "events": ("events",),
    "config": ("config", "show"),
}
# Measured anew each time: the bound of a clock.
_MEASURED = re.compile(r" +\d[\d.]* [µm]s$", re.MULTILINE)


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_tables(name: str, width: int, fleet: Any, kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    outcome = kvctl(*COMMANDS[name], "-o", "table")
    assert (outcome.code, outcome.err) == (0, "")
    text = outcome.out
    if name == "room" and width == 120:
        head, middle, rest = text.partition("CLOCK ±\n")
        ranks, gap, tail = rest.partition("\n\n")
        text = head + middle + _MEASURED.sub("  (measured)", ranks) + gap + tail
    check(f"{name}-{width}.txt", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_tsv(name: str, fleet: Any, kvctl: Any) -> None:
    outcome = kvctl(*COMMANDS[name])
    assert (outcome.code, outcome.err) == (0, "")
    check(f"{name}.tsv", outcome.out)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("rooms-wide.txt", ("rooms", "-o", "wide")),
        ("rooms.csv", ("rooms", "-o", "csv")),
        ("rooms.jsonl", ("rooms", "-o", "jsonl", "-l", "role=decode")),
        ("rooms.json", ("rooms", "-o", "json", "-e", "decode-0")),
        ("metrics.prom", ("metrics", "-o", "prom")),
        ("status-columns.json", ("status", "-o", "json", "--columns", "agent,p50,ring")),
        ("status-colour.txt", ("status", "-o", "table", "--color", "always")),
    ],
)
def test_other_formats(name: str, args: tuple[str, ...], fleet: Any, kvctl: Any) -> None:
    outcome = kvctl(*args)
    assert outcome.code == 0
    check(name, re.sub(r'"generated_at_ns": \d+', '"generated_at_ns": 0', outcome.out))
