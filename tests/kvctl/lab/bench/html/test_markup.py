"""Text is always escaped, and the result is well-formed; formatting of numbers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.bench.html.markup import Markup, escape, joined, number, significant, tag

# XML readers turn carriage returns into newlines.
anything = st.text(alphabet=st.characters(exclude_categories=(), exclude_characters="\r"))


class TestTag:
    def test_text_is_escaped_and_markup_is_not(self) -> None:
        assert tag("p", "a < b & c", tag("b", "bold")) == "<p>a &lt; b &amp; c<b>bold</b></p>"

    def test_attributes_are_escaped(self) -> None:
        assert tag("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'

    def test_names_of_attributes_follow_python_s_rules_only_here(self) -> None:
        assert tag("g", class_="a", name_="b") == '<g class="a" name="b"></g>'

    def test_what_is_none_is_left_out(self) -> None:
        assert tag("g", None, "x", id=None) == "<g>x</g>"

    def test_joined_markup_is_markup(self) -> None:
        assert joined(Markup("<b></b>"), "<") == "<b></b>&lt;"

    @given(anything, anything)
    def test_any_text_comes_back_but_for_what_xml_cannot_hold(self, text: str, attribute: str) -> None:
        read = ET.fromstring(tag("p", text, title=attribute))
        for was, now in zip(text, read.text or "", strict=True):
            assert now in {was, "\ufffd"}
        for was, now in zip(attribute, read.attrib["title"], strict=True):
            assert now in {was, "\ufffd"} or (was in "\n\t" and now == " ")
        escape(text).encode("utf-8")


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, "-"), (0, "0"), (0.0042, "0.0042"), (0.343, "0.34"), (12.34, "12.3"), (1234, "1,234")],
    )
    def test_three_digits_that_mean_something(self, value: float | None, text: str) -> None:
        assert significant(value) == text

    @pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, [1]])
    def test_what_is_no_number_is_unknown(self, value: object) -> None:
        assert number(value) is None
