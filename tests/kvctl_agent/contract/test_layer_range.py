"""Ranges of layers have one form, and a half-open range in a text is a mistake that this finds."""

from __future__ import annotations

import re
from pathlib import Path

import kvctl
import kvctl_agent
from kvctl_agent.contract.layer_range import layer_range

_RANGE_BY_HAND = re.compile(r"""(?:layers? |\bL)\{[^{}]*\}(?:-| to |, )\{[^{}]*\}""")


def test_both_ends_are_included() -> None:
    assert [layer_range(0, 4), layer_range(3, 4), layer_range(5, 5)] == ["0-3", "3", "[5, 5)"]


def test_no_text_writes_a_range_by_hand() -> None:
    for package in (kvctl, kvctl_agent):
        for path in Path(package.__file__).parent.rglob("*.py"):
            if path.name != "layers.py" or path.parent.name != "contract":
                assert not _RANGE_BY_HAND.search(path.read_text()), path
