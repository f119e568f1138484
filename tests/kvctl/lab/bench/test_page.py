"""The page of a bench's result."""

from __future__ import annotations

from xml.etree import ElementTree

from kvctl.lab.bench.page import page
from kvctl.render.report import Grid, Text
from kvctl.render.view import Column, View


def test_a_page_has_the_tables_and_escapes_what_others_have_written() -> None:
    hostile = '<script>alert("x")</script>\u202e\x00'
    view = View("bench", (Column("path"), Column("model")))
    made = page(
        [Text([[("head", "")]]), Grid(view, [{"path": "staged", "model": hostile}])],
        {"lanes": [hostile, "b"]},
        hostile,
        "now",
    )
    assert "<script" not in made
    body = ElementTree.fromstring(made[made.index("<body>") : made.index("</html>")])
    (tables,) = body.findall("pre")
    assert "PATH" in (tables.text or "")
    assert "staged" in (tables.text or "")
    assert [each.text for each in body.iter("dt")] == ["lanes"]
