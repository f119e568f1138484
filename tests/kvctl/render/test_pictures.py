"""Drawings and tables as text: they fit the terminal, show the data correctly and contain no control characters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.render.bars import segments, split, stage_intervals
from kvctl.render.events import EVENTS
from kvctl.render.findings import HEALTH
from kvctl.render.layers import busiest, draw_waterfall
from kvctl.render.report import Grid, Line
from kvctl.render.rooms import ROOMS
from kvctl.render.staging import draw_ring
from kvctl.render.terminal import fit_widths, natural_widths, render, table_row
from kvctl.render.view import Column


def text(line: Line) -> str:
    return "".join(piece for piece, _ in line)


def bar_of(answer: Any, width: int = 73) -> str:
    return text(draw_ring(answer, width)[1])[9:]


def test_a_tiny_allocation_is_still_seen_and_one_over_the_seam_is_seen_twice(canned: Any) -> None:
    answer = canned.staging("decode-0")
    ring = answer["ring"]
    small = {**ring["allocations"][0], "offset": 1 << 20, "end": (1 << 20) + 1, "state": "landed"}
    seam = {**small, "offset": 60 << 20, "end": 70 << 20, "state": "scattering"}
    ring["allocations"] = [small, seam]
    bar = bar_of(answer, 74)
    assert bar[1] == "▒"
    assert bar.startswith("█") is True
    assert bar.endswith("████")


def test_what_is_set_aside_holds_nothing_back_and_is_named(canned: Any) -> None:
    answer = canned.staging("decode-0")
    answer["ring"]["allocations"][0]["aside"] = True
    lines = [text(line) for line in draw_ring(answer, 80)]
    assert lines[4] == "aside 1 of unresponsive writers (prefill-0): 8 MiB"
    assert "room 8 from prefill-0, scattering" in lines[5]


def test_an_empty_ring_is_free_and_shows_one_marker(canned: Any) -> None:
    answer = canned.staging("decode-0")
    answer["ring"] |= {"allocations": [], "used_bytes": 0, "head_bytes": 8 << 20}
    lines = [text(line) for line in draw_ring(answer, 80)]
    assert set(lines[1][9:]) == {"·"}
    assert "* H and W" in lines[2]
    assert len(lines) == 4
    assert "moved" not in lines[3]  # unknown when


def test_more_than_the_ring_has_is_granted_ahead(canned: Any) -> None:
    answer = canned.staging("decode-0")
    answer["ring"]["used_bytes"] = answer["ring"]["size_bytes"] * 2
    assert "(200 %, the rest granted ahead)" in text(draw_ring(answer, 80)[0])


def test_a_state_of_a_newer_agent_is_shown_as_strange(canned: Any) -> None:
    answer = canned.staging("decode-0")
    answer["ring"]["allocations"][0]["state"] = "teleported"
    assert "?" in bar_of(answer)


class TestHiddenAndExposed:
    """Two layer groups: the first completely hidden, the second ready 9 ms later and a quarter hidden."""

    def test_the_share_stands_behind_the_bar(self, canned: Any) -> None:
        lines = [text(line) for line in draw_waterfall(canned.layers("prefill-0"), 80)]
        assert lines[1].endswith("■■■■■■■■  100 %")
        assert lines[2].endswith("■■□□□□□□   25 %")
        assert lines[-1] == "■ hidden behind the forward  □ exposed"

    @pytest.mark.parametrize("width", [60, 80, 140])
    def test_no_line_is_longer_than_the_terminal(self, canned: Any, width: int) -> None:
        rows = [row for name in canned.FLEET for row in canned.layers(name)]
        assert max(len(text(line).rstrip()) for line in draw_waterfall(rows, width)[:-2]) <= width

    def test_a_narrow_terminal_keeps_the_percentage(self, canned: Any) -> None:
        lines = [text(line) for line in draw_waterfall(canned.layers("prefill-0"), 60)]
        assert lines[2].endswith("  25 %")
        assert "□" not in "".join(lines)

    def test_of_very_many_groups_the_most_used_writers_are_drawn(self, canned: Any) -> None:
        row, reader = canned.layers("prefill-0")[0], canned.layers("decode-0")[0]
        rows = [{**row, "layers": [n, n + 1], "parts": n} for n in range(40)] + [{**reader, "parts": 999}] * 3
        lines = [text(line) for line in draw_waterfall(rows, 100)]
        drawn = [line.split()[1] for line in lines if line.startswith(("prefill", "decode"))]
        assert drawn == [str(n) for n in range(8, 40)]
        assert "11 more layer groups in the table only" in lines

    def test_a_terminal_shows_the_busiest_groups_of_each_agent(self, canned: Any) -> None:
        row = canned.layers("prefill-0")[0]
        names = [f"prefill-{number}" for number in range(4)]
        rows = [{**row, "agent": name, "layers": [n, n + 1], "parts": n % 7} for name in names for n in range(10)]
        assert [(each["agent"], each["parts"]) for each in busiest(rows)][:3] == [(names[0], n) for n in (4, 5, 6)]
        assert len(busiest(rows)) == 12
        assert len(busiest(rows[:10])) == 10
        assert len(busiest([{**row, "agent": f"prefill-{number}"} for number in range(64)])) == 64
        assert busiest([]) == []

    @pytest.mark.parametrize(
        ("share", "picture"),
        [(0, "□□□□□□□□"), (0.001, "■□□□□□□□"), (0.5, "■■■■□□□□"), (0.999, "■■■■■■■□"), (1, "■■■■■■■■")],
    )
    def test_nothing_and_all_look_like_nothing_else(self, share: float, picture: str) -> None:
        assert "".join(piece for piece, _ in split(share, 8)) == picture


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=8), st.floats(0, 1e9), st.integers(1, 200))
def test_bars_never_leave_their_width(pieces: list[tuple[float, float]], end: float, width: int) -> None:
    spans = segments([(start, stop, ("x", "")) for start, stop in pieces], end, width)
    assert sum(len(piece) for piece, _ in spans) == width


@given(st.integers(40, 200))
def test_tables_fit_and_numbers_are_never_cut(width: int) -> None:
    rows = [
        {"room": "18446744073709551615", "agent": "decode-0", "role": "decode", "state": "Transferring"}
        | {"age_ns": 123_456_789, "bytes": 16 << 20, "coverage": {"planned": 9, "scattered": 1, "sent": 1}}
    ]
    columns = [column for column in ROOMS.columns if column.width.value != "wide"]
    widths, hidden = fit_widths(natural_widths(columns, rows), rows, width)
    assert set(widths) | set(hidden) == set(columns)
    for column, cells in widths.items():
        if column.kind.value.numeric or column.name == "room":
            assert cells >= len(column.human(rows[0]))
    printed = render([Grid(ROOMS, rows)], [columns], width, colour=False).splitlines()
    assert "18446744073709551615" in printed[1]
    if width >= 72:
        assert all(len(line) <= width for line in printed[:2])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_sentence_continues_on_further_lines(width: int) -> None:
    cause = "decode-1 died: process 11114 has ended, last heard 18.3 s ago; prefill-0 and prefill-1 lost it"
    found = {"severity": "critical", "code": "KV_PEER_LOST", "subject": "decode-1", "since_ns": 18_300_000_000}
    rows = [{**found, "cause": cause, "evidence": {}}, {**found, "cause": "short", "evidence": {}}]
    lines = render([Grid(HEALTH, rows)], [HEALTH.columns[:5]], width, False).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line or "cut at" in line for line in lines)
    place = lines[0].index("CAUSE")
    last = next(number for number, line in enumerate(lines) if line[place:] == "short")
    assert " ".join(line[place:] for line in lines[1:last]) == cause
    assert not any(line[:place].strip() for line in lines[2:last])


def test_a_peer_cannot_drive_the_terminal() -> None:
    row = {"at_ns": 0, "agent": "a\x1b[2J", "kind": "k", "severity": "info", "text": "x\ny\x07", "sequence": 1}
    printed = render([Grid(EVENTS, [row])], [EVENTS.columns], None, colour=False)
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert len(printed.splitlines()) == 2


def test_nothing_to_show_says_so() -> None:
    assert render([Grid(ROOMS, [])], [ROOMS.columns], 80, colour=False) == "no active rooms\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("prefill-0", "pre…-0"),
        ("decode-11", "dec…11"),
        ("its process has ended", "its p…"),
        ("decode-0,decode-1", "decod…"),
        ("π-prefill-0", "π-pre…"),
        ("decode", "decode"),
    ],
)
def test_a_name_that_is_too_long_keeps_its_end(text: str, shown: str) -> None:
    column = Column("agent")
    assert "".join(piece for piece, _ in table_row({"agent": text}, {column: 6})).rstrip() == shown


def test_a_stage_lasts_from_the_one_before() -> None:
    moments = {"scatter": 9, "ready": 1, "wire": 5, "gather": 3}
    assert stage_intervals(moments) == [("gather", 1, 3), ("wire", 3, 5), ("scatter", 5, 9)]


def test_a_stage_ends_before_any_later_one() -> None:
    assert stage_intervals({"ready": 1, "post": 9, "wire": 4, "scatter": 8}) == [("post", 1, 4), ("scatter", 4, 8)]
    assert stage_intervals({"ready": 1}) == stage_intervals({}) == []
