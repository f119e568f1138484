"""The page of a bench's result."""

from __future__ import annotations

import sys
from typing import Any
from xml.etree import ElementTree

import pytest
import vl_convert

from kvctl.lab.bench.html_report import html_report
from kvctl.render.report import Grid, Text
from kvctl.render.view import Column, View

HOSTILE = '<script>alert("x")</script>\u202e\x00'


@pytest.fixture(scope="session", autouse=True)
def chart_engine() -> None:
    """Starts the engine, which keeps threads and files open until the end, before a test that checks for leaks."""
    vl_convert.vegalite_to_svg({"data": {"values": []}, "mark": "point"})


def row(side: str, concurrency: int, tokens: int = 512, **figures: Any) -> dict[str, Any]:
    times = {"ttft_ms": {"p50": 9.0, "p99": 20.0}, "tpot_ms": {"mean": None}}
    return {"side": side, "concurrency": concurrency, "tokens": tokens, **times, **figures}


def body_of(*rows: dict[str, Any]) -> ElementTree.Element:
    view = View("bench", (Column("side"), Column("model")))
    blocks = [Text([[("head", "")]]), Grid(view, [{"side": "staged", "model": HOSTILE}])]
    made = html_report(blocks, rows, {"lanes": [HOSTILE, "b"]}, HOSTILE, "now")
    assert "<script" not in made
    return ElementTree.fromstring(made[made.index("<body>") : made.index("</html>")])


def drawn(body: ElementTree.Element) -> dict[str, list[str]]:
    """Returns the texts in each chart, by its title."""
    return {
        each.findtext("figcaption", ""): [text.text or "" for text in each.iter("{http://www.w3.org/2000/svg}text")]
        for each in body.iter("figure")
    }


def test_a_page_has_the_tables_and_escapes_what_others_have_written() -> None:
    body = body_of(row(HOSTILE, 1), row("b", 1))
    (tables,) = body.findall("pre")
    assert "SIDE" in (tables.text or "")
    assert "staged" in (tables.text or "")
    assert [each.text for each in body.iter("dt")] == ["lanes"]
    assert any("<script>" in text for text in drawn(body)["Time to first token"])


def test_figures_of_one_load_are_bars_with_their_values() -> None:
    stages = {name: {"p50": us} for name, us in (("gather", None), ("gate", 1500.0), ("post", 4e3), ("wire", 7e3))}
    found = drawn(body_of(row("a", 4, gb_per_s=1.25, stages_us=stages), row("b", 4, gb_per_s=0.5, stages_us=stages)))
    assert list(found) == ["Throughput of KV", "Time to first token", "Stages of a part, p50"]
    assert {"GB/s", "1.25", "0.5", "a", "b"} <= {*found["Throughput of KV"]}
    assert {"ms", "p50", "p99", "9", "20"} <= {*found["Time to first token"]}
    assert {"gate", "post", "wire", "1.5", "4"} <= {*found["Stages of a part, p50"]}


def test_a_swept_option_is_the_x_axis_and_another_one_has_rows_of_charts() -> None:
    rows = [row(side, load, tokens) for side in "ab" for load in (1, 4, 16) for tokens in (512, 2048)]
    (texts,) = drawn(body_of(*rows)).values()
    assert {"requests in flight", "1", "4", "16", "512 tokens of a prompt", "2048 tokens of a prompt"} <= {*texts}


def test_a_page_without_the_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    body = body_of(row("a", 1))
    assert not drawn(body)
    assert any("vl-convert-python" in (each.text or "") for each in body.findall("p"))
    assert "[report]" in "".join(body.itertext())
