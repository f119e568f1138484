"""The table: cursor, formatting of visible rows only, stale rows."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.tui.snapshot import text
from tests.kvctl.tui.screens import beat, on_screen, press


@on_screen("rooms")
async def test_the_cursor_stays_on_its_row_when_rows_above_it_go(pilot: Any, specimen) -> None:
    table = pilot.app.panel.main
    await press(pilot, *["down"] * 30)
    before = (table.row["agent"], table.row["room"])
    specimen.silent = {"decode-0"}
    pilot.app.store.agents.clear()  # as if it had been away for long
    await beat(pilot)
    assert (table.row["agent"], table.row["room"]) == before
    assert table.cursor < 30


@on_screen("rooms")
async def test_the_cursor_stays_near_when_its_own_row_goes(pilot: Any, specimen) -> None:
    table = pilot.app.panel.main
    await press(pilot, "end")
    assert table.cursor == 95
    specimen.rooms = 6
    await beat(pilot)
    assert table.cursor == len(table.listing.rows) - 1 == 47


@on_screen("history")
async def test_the_latest_ended_room_is_followed_until_the_cursor_leaves_it(pilot: Any) -> None:
    table = pilot.app.panel.main
    for _ in range(2):
        before = table.row["room"]
        await beat(pilot)
        assert (table.cursor, table.row["room"]) == (0, str(int(before) + 1))
    await press(pilot, "down")
    row = (table.row["agent"], table.row["room"])
    await beat(pilot)
    assert (table.row["agent"], table.row["room"]) == row
    assert table.cursor > 1


@on_screen("events")
async def test_events_are_followed_until_the_cursor_leaves_the_end(pilot: Any) -> None:
    table = pilot.app.panel.main
    await beat(pilot)
    assert table.cursor == len(table.listing.rows) - 1
    await press(pilot, "up")
    row = table.row
    await beat(pilot)
    assert (table.row["agent"], table.row["sequence"]) == (row["agent"], row["sequence"])
    assert table.cursor < len(table.listing.rows) - 2
    await press(pilot, "end")
    await beat(pilot)
    assert table.cursor == len(table.listing.rows) - 1


def test_only_rows_on_screen_are_formatted(large, build, drive, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvctl.render.view import Column

    formatted = 0
    human = Column.human

    def counted(self: Column, row: Any) -> str:
        nonlocal formatted
        formatted += 1
        return human(self, row)

    async def script(pilot: Any) -> None:
        nonlocal formatted
        assert len(pilot.app.panel.main.listing.rows) == 64 * 31
        monkeypatch.setattr(Column, "human", counted)
        formatted = 0
        await beat(pilot)
        assert 0 < formatted < 40 * 32 * 3

    drive(build(large, "rooms"), script)


@on_screen("rooms")
async def test_columns_do_not_shrink_again(pilot: Any, specimen) -> None:
    table = pilot.app.panel.main
    before = dict(table._natural)
    specimen.rooms = 1
    await beat(pilot)
    assert all(table._natural[column] >= size for column, size in before.items())


@on_screen("rooms")
async def test_rows_of_silent_agents_say_for_how_long(pilot: Any, specimen) -> None:
    specimen.silent = {"decode-1"}
    for _ in range(4):
        await beat(pilot)
    lines = [line for line in text(pilot.app).splitlines() if "decode-1" in line]
    assert "decode-1 silent for 4 s: no answer within 2 s" in lines[0]
    assert all(line.startswith("○ ") and "decode-1 4 s" in line for line in lines[1:])
    specimen.silent = set()
    await beat(pilot)
    assert "silent" not in text(pilot.app)


@on_screen("rooms")
async def test_a_click_chooses_and_a_double_click_opens(pilot: Any) -> None:
    await pilot.click("#rooms-table", offset=(10, 5))
    await pilot.pause()
    assert pilot.app.panel.main.cursor == 3
    await pilot.click("#rooms-table", offset=(10, 5), times=2)
    await pilot.pause()
    assert pilot.app.panel_name == "room"


@on_screen("rooms")
async def test_a_page_of_keys_never_leaves_the_table(pilot: Any) -> None:
    table = pilot.app.panel.main
    await press(pilot, "pagedown", "pagedown", "pagedown", "pagedown", "pagedown")
    assert table.cursor == 95
    await press(pilot, "pageup")
    assert table.cursor < 70
    await press(pilot, "home", "up", "k")
    assert table.cursor == 0
