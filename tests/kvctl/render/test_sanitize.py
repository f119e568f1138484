"""Unprintable characters of any text are replaced or escaped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.render.sanitize import escaped, json_escaped, one_line, printable, printable_lines

ANY_TEXT = st.text(max_size=40)  # lone surrogates, too


@pytest.mark.parametrize(
    "character", [*"\x1b\x07\x08\r\x7f\x85\x9b", "\u200b", "\u202e", "\u2066", "\ufeff", "\U000e0041"]
)
def test_what_a_terminal_obeys_or_hides_is_seen(character: str) -> None:
    assert printable(f"a{character}b") == printable_lines(f"a{character}b") == "a\ufffdb"
    assert escaped(f"a{character}b").isprintable()


def test_ordinary_text_stays() -> None:
    assert printable("Grüße → 30 µs ▶ 日本") == "Grüße → 30 µs ▶ 日本"
    assert printable_lines("a\tb\nc") == "a\tb\nc"
    assert one_line(" a\tb \n c") == "a b c"
    assert escaped("a\tb\\") == "a\\tb\\\\"


def test_only_colours_of_our_own_pass() -> None:
    assert printable_lines("\x1b[1;31mred\x1b[0m\x1b]0;t\x07", styled=True) == "\x1b[1;31mred\x1b[0m\ufffd]0;t\ufffd"
    assert "\x1b" not in printable_lines("\x1b[31mred")


@given(ANY_TEXT)
def test_results_are_printable(text: str) -> None:
    assert printable(text).isprintable()
    assert one_line(text).isprintable()
    assert escaped(text).isprintable()
    assert all(line.isprintable() for line in printable_lines(text.replace("\t", "")).split("\n"))


@given(st.recursive(st.text(st.characters(exclude_categories=["Cs"])), lambda inner: st.lists(inner, max_size=3)))
def test_json_means_the_same(data: Any) -> None:
    document = json_escaped(json.dumps(data, ensure_ascii=False))
    assert json.loads(document) == data
    assert document.isprintable()
