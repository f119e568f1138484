"""Charts as they are drawn: data at the right place, texts as text, nothing from outside."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from kvctl.cli import cli
from kvctl.errors import CliError
from kvctl.lab.bench.html import charts
from kvctl.lab.bench.html.charts import Bar, Level, Piece, Point

Drawings = Callable[[str], list[Any]]


def line(series: str, *values: float, column: str = "") -> list[Point]:
    return [Point(series, 2.0**at, value, f"{series} {value:g}", "", column) for at, value in enumerate(values)]


class TestLines:
    def test_points_are_in_proportion(self, drawings: Drawings) -> None:
        chart = drawings(charts.line_chart("", line("staged", 10, 20, 40), "load", "GB/s"))[0]
        assert chart.axis("Y") == "Y-axis titled 'GB/s' for a linear scale with values from 0 to 40"
        (_, x1, y1), (_, x2, y2), (_, x4, y4) = chart.points()
        assert x2 - x1 == pytest.approx(x4 - x2)  # equal factors are equal distances
        assert y2 - y4 == pytest.approx(2 * (y1 - y2))
        assert (chart.ticks("X"), chart.legend()) == (["1", "2", "4"], [])

    def test_series_differ_in_colour_dashes_and_shape_as_in_the_legend(self, drawings: Drawings) -> None:
        chart = charts.line_chart("", [*line("staged", 1, 300), *line("slice", 20, 5)], "", "ms")
        assert drawings(chart)[0].legend() == ["staged", "slice"]
        lines = re.findall(r'stroke="(var\(--c\d\))" stroke-width="2" stroke-dasharray="([\d.,]+)"', chart)
        assert lines == [("var(--c0)", "1,0"), ("var(--c1)", "6,4")]
        assert len(set(re.findall(r'transform="translate[^"]+" d="([^"]+)" fill="var', chart))) >= 2

    def test_no_two_of_many_series_look_alike(self) -> None:
        chart = charts.line_chart("", [point for at in range(16) for point in line(f"path-{at}", 1, 2)], "", "")
        lines = re.findall(r'stroke="(var\(--c\d\))" stroke-width="2" stroke-dasharray="([\d.,]+)"', chart)
        assert len(set(lines)) == len(lines) == 16

    def test_levels_are_on_the_axis_with_their_names(self, drawings: Drawings) -> None:
        levels = [Level("one memcpy", 60), Level("one write", 80)]
        chart = charts.line_chart("", line("staged", 20, 40), "", "", levels)
        assert drawings(chart)[0].texts()[-2:] == ["one memcpy", "one write"]
        (_, _, low), (_, _, high) = drawings(chart)[0].points()
        place = r'translate\([\d.]+,([\d.]+)\)" x2="[^"]+" y2="0" stroke="[^"]+" stroke-dasharray'
        dashed = [float(at) for at in re.findall(place, chart)]
        assert [low - at for at in dashed] == pytest.approx([2 * (low - high), 3 * (low - high)], abs=1)


class TestBars:
    def test_pieces_have_the_length_of_their_values(self, drawings: Drawings) -> None:
        bars = [
            Bar("staged", [Piece("hidden", 0, 3, "hid"), Piece("exposed", 3, 4, "waited")], "75 %", "concurrency 4")
        ]
        colours = {"hidden": "hidden", "exposed": "wait"}
        chart = drawings(charts.bar_chart("", bars, "ms", colours, [Level("asked", 4)]))[0]
        hidden, waited = chart.bars()
        assert (hidden[0], hidden[3], waited[0], waited[3]) == ("hid", "var(--hidden)", "waited", "var(--wait)")
        assert hidden[1:3] == pytest.approx((0, 3 * waited[2]))
        assert waited[1] == pytest.approx(hidden[2])
        assert (chart.ticks("Y"), chart.legend()) == (["staged"], ["hidden", "exposed"])
        assert {"75 %", "asked"} <= set(chart.texts())


class TestDrawing:
    def test_texts_stay_text(self, drawings: Drawings) -> None:
        evil = "<script>a</script>\"'&\x1b[31m\u202e\ud800"
        shown = "<script>a</script>\"'&\ufffd[31m\ufffd\ufffd"
        bars = [Bar(evil, [Piece("a", 0, 1, evil)], evil, evil)]
        chart = charts.bar_chart(evil, bars, evil, {"a": "c0"}, [Level(evil, 1)])
        drawn = drawings(chart)[0]
        assert (drawn.name, set(drawn.texts()), drawn.tips()) == (shown, {shown}, [shown])
        chart = charts.line_chart(evil, [*line(evil, 1), *line("slice", 1)], evil, evil, [Level(evil, 1)])
        assert (drawings(chart)[0].legend(), drawings(chart)[0].texts()[-1]) == ([shown, "slice"], shown)
        assert not list(ET.fromstring(chart).iter("script"))

    def test_long_texts_are_cut_so_that_the_chart_keeps_its_place(self, drawings: Drawings) -> None:
        long = "name-" * 100
        bars = [Bar(long, [Piece("a", 0, 1, long)], long, long)]
        drawn = drawings(charts.bar_chart("", bars, "", {"a": "c0"}, [Level(long, 1)]))[0]
        assert drawn.tips() == [long]
        for text in (*drawn.texts(), *drawn.ticks("Y")):
            assert text.startswith("name-name-")
            assert text.endswith("…")
            assert len(text) < 80

    def test_the_library_may_load_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}
        monkeypatch.setattr(
            vl_convert, "vegalite_to_svg", lambda *_, **more: asked.update(more) or '<svg viewBox=""></svg>'
        )
        charts.draw("", {})
        assert asked == {"allowed_base_urls": []}

    def test_without_the_library_a_bench_does_not_begin(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "vl_convert", None)
        monkeypatch.setattr("kvctl.commands.bench.plan_fleets", None)
        with pytest.raises(CliError, match=r"--html needs vl-convert-python, .*'\.\[report\]'"):
            cli.main(["bench", "--html", str(tmp_path / "report.html")], standalone_mode=False)
