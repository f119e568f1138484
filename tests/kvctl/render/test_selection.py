"""Selection and order of rows and columns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvctl.render.layers import LAYERS
from kvctl.render.rooms import ROOMS, SLOW
from kvctl.render.selection import (
    ExpressionError,
    contains,
    data_columns,
    is_comparison,
    parse_filter,
    select,
    table_columns,
)
from kvctl.render.staging import STAGING

ROWS = [
    {"room": "9", "agent": "b", "latency_ns": 5},
    {"room": "10", "agent": "a", "latency_ns": None},
    {"room": "18446744073709551615", "agent": "a", "latency_ns": 7},
]


def rooms(sort_by: str | None, view: object = ROOMS) -> list[str]:
    return [row["room"] for row in select(view, sort_by=sort_by).rows(ROWS)]  # type: ignore[arg-type]


def test_room_numbers_sort_as_numbers() -> None:
    assert rooms("room") == ["9", "10", "18446744073709551615"]
    assert rooms("-room") == ["18446744073709551615", "10", "9"]


def test_the_unknown_comes_last_either_way() -> None:
    assert rooms("latency")[-1] == rooms("-latency")[-1] == "10"


def test_later_columns_break_ties() -> None:
    assert rooms("agent,-room") == ["18446744073709551615", "10", "9"]


def test_layer_groups_sort_by_both_ends() -> None:
    rows = [{"agent": "a", "layers": layers} for layers in ([0, 80], [8, 16], [0, 8], [16, 80])]
    kept = select(LAYERS).rows(rows)
    assert [row["layers"] for row in kept] == [[0, 8], [0, 80], [8, 16], [16, 80]]


def test_a_view_brings_its_own_order() -> None:
    assert rooms(None, SLOW) == ["18446744073709551615", "9", "10"]


def test_filters_must_all_hold() -> None:
    kept = select(ROOMS, filters=["agent=a", "latency>1ns"]).rows(ROWS)
    assert [row["room"] for row in kept] == ["18446744073709551615"]


def test_named_columns_come_in_the_named_order() -> None:
    selection = select(ROOMS, columns="state, age_ns ,room")
    assert [column.name for column in table_columns(ROOMS, selection, wide=False)] == ["state", "age", "room"]
    assert data_columns(ROOMS, selection) == selection.columns


def test_programs_get_every_column_and_narrow_tables_do_not() -> None:
    selection = select(ROOMS)
    assert data_columns(ROOMS, selection) == ROOMS.columns == table_columns(ROOMS, selection, wide=True)
    assert len(table_columns(ROOMS, selection, wide=False)) < len(ROOMS.columns)


@pytest.mark.parametrize("options", [{"columns": "nope"}, {"sort_by": "-nope"}, {"filters": ["nope=1"]}])
def test_unknown_columns_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ExpressionError, match="no column 'nope'"):
        select(ROOMS, **options)  # type: ignore[arg-type]


def passes(expression: str, row: Any, view: Any = ROOMS) -> bool:
    return parse_filter(view, expression).matches(row)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("age>5s", True),
        ("age>6s", False),
        ("age>=6000ms", True),
        ("age_ns>5000000000", True),
        (" age  <  1m ", True),
        ("bytes>=16MiB", True),
        ("bytes<16MB", False),
        ("bytes==16777216B", True),
        ("state=Transferring", True),
        ("state=transferring", True),
        ("state!=Failed", True),
        ("agent~code", True),
        ("agent!~code", False),
        ("peers=prefill-0", True),
        ("peers=prefill", False),
        ("paths=staged", True),
        ("paths=staged=2", True),
        ("paths=staged=3", False),
        ("parked=0", True),
        ("landed>32", True),
        ("room=18446744073709551615", True),
        ("room>9", True),
        ("progress=32/64", True),
        ("latency>0s", False),
        ("latency=-", True),
        ("latency!=-", False),
        ("latency!=5s", True),
        ("age=-", False),
        ("AGE_NS>5000000000", True),
        ("FOR<3s", True),
        ("for_ns<3000000000", True),
        ("Waits For=prefill-1", True),
        ("waits-for=prefill-1", True),
        ("coverage.landed=48", True),
        ("CELLS=32/64", True),
    ],
)
def test_a_filter_means_what_it_says(canned: Any, expression: str, expected: bool) -> None:
    assert passes(expression, canned.room_row("decode-0")) is expected


def test_ratios_compare_as_shares_and_as_percent(canned: Any) -> None:
    for expression in ("used>0.3", "used>30%", "used<=37.5%"):
        assert passes(expression, canned.staging("decode-0"), STAGING)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("age", "not COLUMN OPERATOR VALUE"),
        ("age>", "not COLUMN OPERATOR VALUE"),
        (">5s", "not COLUMN OPERATOR VALUE"),
        ("age>5", "age needs a unit: age>5s, or age_ns>5"),
        ("bytes>64", "bytes needs a unit: bytes>64MiB"),
        ("age>fast", "not a duration"),
        ("bytes>1 parsec", "not a size"),
        ("parked>few", "not a number"),
        ("agee>5s", "did you mean age"),
        ("__class__=x", "no column '__class__'"),
        ("opned>5s", "did you mean opened_at"),
        ("waits fr=x", "did you mean missing"),
        ("latncy_ns>5", "did you mean latency"),
    ],
)
def test_what_is_wrong_is_said(expression: str, words: str) -> None:
    with pytest.raises(ExpressionError, match=words):
        parse_filter(ROOMS, expression)


ROW = {
    "room": "1",
    "age_ns": 5,
    "state": "Failed",
    "coverage": {"planned": 1},
    "role": "decode",
    "peers": [],
    "bytes": 1,
}


@given(st.text(max_size=40))
@example("age>" + "9" * 400 + "s")
@example("age>1e999s")
@example("parked>nan")
@example("parked>1_0")
def test_any_text_is_a_filter_or_a_clear_error(text: str) -> None:
    try:
        wanted = parse_filter(ROOMS, text)
    except ExpressionError:
        return
    assert wanted.matches({**ROW, "coverage": {"planned": 1, "scattered": 0}}) in {True, False}


@given(
    st.sampled_from([column.name for column in ROOMS.columns]),
    st.sampled_from(["=", "==", "!=", "<", "<=", ">", ">=", "~", "!~"]),
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=12),
)
def test_well_formed_filters_never_crash_on_a_row(column: str, operator: str, value: str) -> None:
    test_any_text_is_a_filter_or_a_clear_error.hypothesis.inner_test(f"{column}{operator}{value}")  # type: ignore[attr-defined]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_order_is_that_of_the_numbers(value: int, bound: int) -> None:
    assert passes(f"age>{bound}ms", {"age_ns": value * 10**6}) == (value > bound)
    assert passes(f"age<={bound}ms", {"age_ns": value * 10**6}) == (value <= bound)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decode-0", True),
        ("DECODE-0", True),
        ("transferr", True),
        ("16 MiB", True),
        ("16777216", True),
        ("6 s", True),
        ("18446744073709551615", True),
        ("decode-1", False),
        ("", True),
    ],
)
def test_a_text_is_found_as_people_and_as_programs_read_it(canned: Any, text: str, expected: bool) -> None:
    assert contains(ROOMS, canned.room_row("decode-0"), text) is expected


@pytest.mark.parametrize(
    "text", ["age>5s", " age  <", "a=b", "text~lost", "state!=Failed", "agent!~x", "age>=", "GB/S>1", "5s>age"]
)
def test_text_with_an_operator_behind_it_is_a_comparison(text: str) -> None:
    assert is_comparison(text)


@pytest.mark.parametrize("text", ["", "decode-0", "no grant from decode-0 for 300 s", "tcp://a:1", "!", ">5s", " =x"])
def test_other_text_is_not(text: str) -> None:
    assert not is_comparison(text)


@given(st.text())
def test_what_is_a_filter_is_a_comparison(text: str) -> None:
    try:
        parse_filter(ROOMS, text)
    except ExpressionError:
        return
    assert is_comparison(text)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("layers=4-7", True),
        ("layers=4-8", False),
        ("layers~4-7", True),
        ("layers>3", True),
        ("layers>4-6", True),
        ("layers<8", True),
        ("layers>=8-15", False),
        ("layers=-", False),
    ],
)
def test_ranges_of_layers_are_typed_as_tables_print_them(expression: str, expected: bool) -> None:
    assert passes(expression, {"layers": [4, 8]}, LAYERS) is expected
    assert passes("layers=4", {"layers": [4, 5]}, LAYERS)
