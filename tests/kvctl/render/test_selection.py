"""Order and choice of rows and columns."""

from __future__ import annotations

import pytest

from kvctl.render.layers import LAYERS
from kvctl.render.rooms import ROOMS, SLOW
from kvctl.render.selection import ExpressionError, data_columns, select, table_columns

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
