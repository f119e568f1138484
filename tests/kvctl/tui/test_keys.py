"""Each key on the screens where it is available."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvctl.tui import VIEWS
from kvctl.tui.dialogs import Help, Prompt
from kvctl.tui.widgets import Bar, Table
from tests.kvctl.tui.screens import beat, on_screen, press


def said(pilot: Any) -> list[str]:
    """Returns the notifications on screen."""
    return [note.message for note in pilot.app._notifications]


def bar(pilot: Any, name: str) -> str:
    return "\n".join(
        "".join(text for text, _ in left + right) for left, right in pilot.app.query_one(f"#{name}", Bar)._lines
    )


def row(pilot: Any) -> Any:
    return pilot.app.panel.table.row


@on_screen("peers")
async def test_numbers_choose_a_view_and_only_its_data_is_asked(pilot: Any) -> None:
    for key, view in enumerate(VIEWS, 1):
        await press(pilot, str(key))
        assert pilot.app.panel_name == view
        asked = [call.command for call in pilot.app.feed.wanted[-1].calls]
        assert asked == (["status"] if view == "overview" else ["status", view])
        assert pilot.app.panel.main.listing.rows


@on_screen("rooms")
async def test_a_filter_holds_until_escape(pilot: Any) -> None:
    await press(pilot, "slash")
    await press(pilot, *"agent=decode-2 ", "&", *" state=Bootstrapping", "enter")
    rows = pilot.app.panel.main.listing.rows
    assert {(each["agent"], each["state"]) for each in rows} == {("decode-2", "Bootstrapping")}
    await beat(pilot)
    assert len(pilot.app.panel.main.listing.rows) == len(rows)
    await press(pilot, "escape")
    assert len(pilot.app.panel.main.listing.rows) == 96


@on_screen("rooms")
async def test_a_text_is_looked_for_in_all_columns(pilot: Any) -> None:
    await press(pilot, "slash", *"CODE-2", "enter")
    rows = pilot.app.panel.main.listing.rows
    assert 0 < len(rows) < 96
    assert {each["agent"] for each in rows} == {"decode-2"}
    await press(pilot, "slash", *" & agent=decode-2 & bootstr", "enter")
    rows = pilot.app.panel.main.listing.rows
    assert {(each["agent"], each["state"]) for each in rows} == {("decode-2", "Bootstrapping")}
    await press(pilot, "escape")
    assert len(pilot.app.panel.main.listing.rows) == 96


@on_screen("rooms")
async def test_a_filter_that_is_none_says_why_and_does_not_close(pilot: Any) -> None:
    await press(pilot, "slash", *"aeg>5s", "enter")
    assert isinstance(pilot.app.screen, Prompt)
    assert "did you mean age?" in str(pilot.app.screen.query("Static").first().render())
    await press(pilot, "escape")
    assert len(pilot.app.panel.main.listing.rows) == 96


@on_screen("events")
async def test_a_number_in_the_filter_opens_that_room(pilot: Any) -> None:
    await press(pilot, "slash", *"4711", "enter")
    assert pilot.app.panel_name == "room"
    assert len(pilot.app.panel.main.listing.rows) == 69


@on_screen("rooms")
async def test_enter_goes_into_the_room_and_escape_comes_back_to_the_row(pilot: Any) -> None:
    await press(pilot, "down", "down")
    before = row(pilot)
    await press(pilot, "enter")
    assert (pilot.app.panel_name, pilot.app.panel.room) == ("room", before["room"])
    assert f"room {before['room']}" in bar(pilot, "tabs")
    assert pilot.app.feed.wanted[-1].calls[1].args == {"room": before["room"]}
    await press(pilot, "escape")
    assert pilot.app.panel_name == "rooms"
    assert row(pilot)["agent"] == before["agent"]


@pytest.mark.parametrize(("view", "first"), [("staging", "tab"), ("events", "up")])
@on_screen()
async def test_what_is_about_a_room_leads_to_it(pilot: Any, view: str, first: str) -> None:
    await press(pilot, first)
    while row(pilot)["room"] is None:
        await press(pilot, "up")
    room = row(pilot)["room"]
    await press(pilot, "enter")
    assert (pilot.app.panel_name, pilot.app.panel.room) == ("room", room)


@on_screen("rooms")
async def test_a_room_that_nobody_knows_says_so(pilot: Any) -> None:
    await press(pilot, "slash", *"99", "enter")
    picture = pilot.app.query_one("#room-picture")
    assert "no agent knows this room" in str(picture._draw(80))


@on_screen("peers")
async def test_a_pair_shows_what_both_ends_say(pilot: Any) -> None:
    assert [each["state"] for each in pilot.app.panel.main.listing.rows[:5]] == ["refused"] * 2 + ["suspect"] * 2 + [
        "ready"
    ]
    await press(pilot, "down", "down", "enter")
    assert pilot.app.panel_name == "record"
    lines = ["".join(text for text, _ in line) for line in pilot.app.panel._lines(100)]
    assert sum("suspect" in line for line in lines) == 2
    assert "decode-2 prefill-1" in bar(pilot, "tabs")


def test_a_finding_opens_with_its_remedy_and_is_copied_whole(specimen, ill, build, drive) -> None:
    async def script(pilot: Any) -> None:
        pilot.app.query_one("#overview-health", Table).focus()
        await press(pilot, "enter", "y")
        assert "kvctl staging release decode-1:7" in pilot.app.clipboard

    drive(build(specimen, findings=ill), script)


@on_screen()
async def test_a_record_follows_its_row(pilot: Any) -> None:
    await press(pilot, "enter")
    before = pilot.app.panel.clipboard()[0]
    await beat(pilot)
    assert pilot.app.panel.clipboard()[0] != before
    assert "1,008" in pilot.app.panel.clipboard()[0] or "done" in before


@on_screen()
async def test_space_holds_the_screen_and_says_how_old_it_is(pilot: Any) -> None:
    await press(pilot, "space")
    shown = pilot.app.store.now_ns
    assert "paused: the data is 0 s old" in bar(pilot, "banner")
    pilot.app.feed.paused = False  # a reading that was under way when the pause began
    wanted = pilot.app.feed.wanted
    wanted.append(wanted[-1].__class__("health", wanted[-1].calls))
    await beat(pilot)
    assert pilot.app.store.now_ns == shown
    wanted.pop()
    await press(pilot, "space")
    assert pilot.app.store.now_ns > shown
    assert bar(pilot, "banner") == ""


@on_screen()
async def test_a_view_opened_while_paused_is_read_once(pilot: Any) -> None:
    await press(pilot, "space", "5")
    assert pilot.app.panel.main.listing.rows
    assert "paused" in bar(pilot, "banner")


@on_screen("rooms")
async def test_sort_chooses_a_column_and_turns_it(pilot: Any) -> None:
    await press(pilot, "s", *"roam", "enter")
    assert "did you mean room" in str(pilot.app.screen.query("Static").first().render())
    await press(pilot, "escape", "s", *"room", "enter")
    assert pilot.app.panel.main.listing.rows[0]["room"] == "4711"
    await press(pilot, "s", "enter")
    assert pilot.app.panel.main.listing.rows[0]["room"] == "4722"
    await press(pilot, "s", "escape")
    assert pilot.app.panel.main.listing.rows[0]["room"] == "4722"


@on_screen("failed")
async def test_from_a_failed_room_into_the_room(pilot: Any) -> None:
    assert [row["room"] for row in pilot.app.panel.main.listing.rows] == [str(4600 + place) for place in range(9)]
    await press(pilot, "slash", *"code=KV_PEER_LOST", "enter")
    assert len(pilot.app.panel.main.listing.rows) == 6
    await press(pilot, "enter")
    assert pilot.app.panel_name == "room"
    assert pilot.app.panel.room == "4601"


@on_screen("rooms")
async def test_copy_takes_the_row_with_its_header(pilot: Any) -> None:
    await press(pilot, "y")
    header, values = pilot.app.clipboard.splitlines()
    assert header.split("\t")[:3] == ["room", "agent", "role"]
    assert values.split("\t")[:3] == ["4711", "decode-0", "decode"]
    assert said(pilot) == ["copied one row of rooms with its header"]


@on_screen(recorded=True)
async def test_brackets_seek_in_a_recording_and_space_plays_on(pilot: Any) -> None:
    assert "fleet.kvrec: snapshot 4 of 40, playing" in bar(pilot, "banner")
    await press(pilot, "right_square_bracket")
    assert "snapshot 5 of 40, paused" in bar(pilot, "banner")
    later = len(pilot.app.store.trends.p50)
    await press(pilot, "left_square_bracket", "left_square_bracket")
    assert "snapshot 3 of 40, paused" in bar(pilot, "banner")
    assert len(pilot.app.store.trends.p50) < later
    await press(pilot, "space")
    assert not pilot.app.feed.paused
    assert "playing" in bar(pilot, "banner")
    await press(pilot, "space")
    assert pilot.app.feed.paused


@on_screen()
async def test_a_living_fleet_cannot_be_sought_in(pilot: Any) -> None:
    await press(pilot, "left_square_bracket")
    assert "seeking needs a recording" in said(pilot)[0]
    assert not pilot.app.feed.paused


@on_screen()
async def test_help_lists_every_key_that_works(pilot: Any) -> None:
    await press(pilot, "question_mark")
    assert isinstance(pilot.app.screen, Help)
    text = "\n".join("".join(part for part, _ in line) for line in pilot.app.screen._draw(90))
    for label in ("1 - 8", "/", "Enter", "Esc", "Space", "s ", "y ", "?", "q "):
        assert f"\n{label}" in f"\n{text}"
    assert "previous snapshot" not in text
    await press(pilot, "escape")
    assert not isinstance(pilot.app.screen, Help)


def test_quit_stops_the_feed(specimen, build, drive) -> None:
    app = build(specimen)

    async def script(pilot: Any) -> None:
        await press(pilot, "q")

    drive(app, script)
    assert app.feed.stopped
    assert app.return_code == 0


@on_screen("rooms")
async def test_readings_come_in_while_a_dialog_is_open(pilot: Any) -> None:
    for key in ("slash", "s", "question_mark"):
        await press(pilot, key)
        before = pilot.app.store.now_ns
        await beat(pilot)
        assert pilot.app.store.now_ns > before
        assert len(pilot.app.screen_stack) == 2
        await press(pilot, "escape")


@on_screen()
async def test_a_reading_that_comes_while_it_ends_is_let_go(pilot: Any) -> None:
    pilot.app.exit()
    for _ in range(20):
        pilot.app.feed.beat()
        await asyncio.sleep(0)
