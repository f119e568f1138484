"""Text is always escaped, and the result is well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.bench.html.markup import Markup, escape, joined, tag

# XML readers turn carriage returns into newlines.
anything = st.text(alphabet=st.characters(exclude_categories=(), exclude_characters="\r"))


class TestTag:
    def test_text_is_escaped_and_markup_is_not(self) -> None:
        assert tag("p", "a < b & c", tag("b", "bold")) == "<p>a &lt; b &amp; c<b>bold</b></p>"

    def test_attributes_are_escaped(self) -> None:
        assert tag("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'

    def test_names_of_attributes_follow_python_s_rules_only_here(self) -> None:
        assert tag("g", class_="a", stroke_width=2) == '<g class="a" stroke-width="2"></g>'

    def test_numbers_are_as_fine_as_a_screen(self) -> None:
        assert tag("g", x=1 / 3, y=2.0, z=-0.001) == '<g x="0.33" y="2" z="-0"></g>'

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
