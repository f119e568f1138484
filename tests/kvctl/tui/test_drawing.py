"""Layout of lines, sparklines, peers and SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from kvctl.render import units
from kvctl.render.report import Line
from kvctl.tui.drawing import beside, chart, cut, inline_chart, length, padded, rule, sparkline, spread, wrapped
from kvctl.tui.palette import BACKGROUND, BAR, COLOURS, CURSOR, FOREGROUND
from kvctl.tui.panels.layers import over_agents
from kvctl.tui.panels.peers import worst_first
from kvctl.tui.snapshot import picture

TEXT = st.text(st.characters(categories=("L", "N", "P", "Zs")), max_size=30)
LINE = st.lists(st.tuples(TEXT, st.sampled_from(("", "bold red", "dim"))), max_size=6)
VALUES = st.lists(st.none() | st.floats(0, 1e12), max_size=300)


def words(line: Line) -> str:
    return "".join(text for text, _ in line)


@given(LINE, st.integers(1, 60))
def test_lines_are_cut_and_padded_to_the_cell(line: Line, width: int) -> None:
    assert length(cut(line, width)) <= width
    assert length(padded(line, width)) == width
    if length(line) <= width:
        assert words(cut(line, width)) == words(line)


@given(LINE, LINE, st.integers(1, 100))
def test_two_ends_never_overlap(left: Line, right: Line, width: int) -> None:
    assert length(spread(left, right, width)) <= width
    assert length(rule(left, right, width)) <= width


@given(st.lists(LINE, max_size=4), st.lists(LINE, max_size=4), st.integers(5, 40))
def test_pictures_beside_each_other_begin_in_one_column(
    left: Sequence[Line], right: Sequence[Line], width: int
) -> None:
    drawn = beside(left, right, width)
    assert len(drawn) == max(len(left), len(right))
    for number, line in enumerate(drawn[: len(right)]):
        assert length(line) == width + 3 + length(right[number])


def test_a_wrapped_line_breaks_where_there_is_a_gap() -> None:
    line = [("rooms    ", "dim"), ("4", "bold"), (" Bootstrapping   ", ""), ("12", "bold"), (" WaitingForInput", "")]
    assert [words(each) for each in wrapped(line, 30, 9)] == ["rooms    4 Bootstrapping", "         12 WaitingForInput"]
    assert [words(each) for each in wrapped(line, 80, 9)] == [words(line)]
    ranks = [("decode   ", "dim"), ("2 of 2 ranks answered", ""), (", nixl over shm, pools on cpu", "")]
    assert [words(each) for each in wrapped(ranks, 50, 9)] == ["decode   2 of 2 ranks answered, nixl over shm, po…"]
    assert [words(each) for each in wrapped(ranks, 50, 9, inside=True)] == [
        "decode   2 of 2 ranks answered, nixl over shm,",
        "         pools on cpu",
    ]


@given(VALUES, st.integers(0, 80), st.integers(1, 4))
def test_sparklines_have_their_size_and_show_the_newest(values: list[float | None], width: int, height: int) -> None:
    rows = sparkline(values, width, height)
    assert [len(row) for row in rows] == [width] * height
    if width and values:
        newest = values[-1]
        assert (rows[-1][-1] == " ") == (newest is None or newest <= 0 or max(v or 0 for v in values[-width:]) <= 0)


def test_a_sparkline_keeps_proportions_over_its_rows() -> None:
    assert sparkline([0, 1, 2, 4, None, 8], 8, 2) == ["       █", "   ▂▄█ █"]


@given(VALUES, st.integers(30, 90))
def test_charts_fit(values: list[float | None], width: int) -> None:
    human = lambda value: units.UNKNOWN if value is None else units.three_digits(value)[:9]  # noqa: E731
    assert all(length(line) <= width for line in chart("GB/s", values, human, width, 3, "green")[1:])
    assert length(inline_chart("GB/s", values, human, width, "green")) == width


def test_medians_over_agents_have_writers_before_readers(specimen: Any) -> None:
    rows = [row for name in specimen.names for row in specimen._layers(name, 0)]
    assert [row["agent"] for row in over_agents(rows)] == ["writers"] * 4 + ["readers"] * 4
    assert over_agents([]) == []


@given(st.lists(st.lists(st.tuples(TEXT, st.booleans()), max_size=5), min_size=1, max_size=6))
def test_pictures_are_well_formed_whatever_is_in_them(lines: list[list[tuple[str, bool]]]) -> None:
    style = [Style(color="#ff0000", bgcolor="#0000ff", reverse=turned) for turned in (False, True)]
    root = ET.fromstring(picture([[Segment(t, style[r]) for t, r in line] for line in lines], 200))
    drawn = "".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))
    typed = "".join(text for line in lines for text, _ in line)
    assert "".join(drawn.split()) == "".join(typed.split())


def test_a_run_stands_where_it_stands() -> None:
    root = ET.fromstring(picture([[Segment("ab  cd"), Segment("██", Style(bold=True))]], 20))
    texts = [(each.text, each.get("x")) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == [("ab\xa0\xa0cd", "0"), ("██", "73.2")]
    assert root.get("viewBox") == "0 0 272 52.4"


def test_peers_come_worst_first(specimen: Any) -> None:
    rows = [row for name in specimen.names for row in specimen._peers(name, 0)]
    rows[7]["errors_total"] = 3
    for most in (2, 5, 32, 99):
        found = [row["state"] for row in worst_first(rows, most)]
        assert found == (["refused"] * 2 + ["suspect"] * 2 + ["ready"] * 28)[:most]
    assert worst_first(rows, 5)[4] is rows[7]
    assert len({id(row) for row in worst_first(rows)}) == len(rows) == 32


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_can_be_read_on_every_background() -> None:
    for ground in (BACKGROUND, BAR, CURSOR):
        for name, colour in {**COLOURS, "rule": FOREGROUND}.items():
            bright, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
            least = 4.5 if ground != CURSOR else 3.0
            assert (bright + 0.05) / (dark + 0.05) >= least, f"{name} on {ground}"


def test_cells_are_counted_as_terminals_count_them() -> None:
    assert length([("層", "")]) == cell_len("層") == 2
