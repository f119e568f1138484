"""Panel of one room: its outcome, its parts and ranks on one time axis, and the events that all its ranks recorded."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.client.room_timeline import RoomTimeline
from kvctl.render.report import Grid, Line, Text
from kvctl.render.rooms import TIMELINE, room_blocks
from kvctl.render.terminal import fit_widths, natural_widths, table_header, table_row
from kvctl.render.view import Row, View, Width
from kvctl.tui.feed import Question
from kvctl.tui.listings import TableQuery
from kvctl.tui.panels.panel import STATUS_CALL, Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Picture, Table

_CLOCK_ROUNDS = 3
_EMPTY_LINE: Line = []


class RoomPanel(Panel):
    """Panel that Enter opens for a row that belongs to a room; `room` is the room number."""

    DEFAULT_CSS = """
    RoomPanel #room-picture { max-height: 60%; }
    """
    MAIN_TABLE = "room-timeline"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.room = ""

    def compose(self) -> ComposeResult:
        yield Picture(id="room-picture")
        yield Table("timeline", id="room-timeline")

    def question(self, store: Store) -> Question:
        return Question("room", (STATUS_CALL, Call("room", {"room": self.room})), _CLOCK_ROUNDS, subject=self.room)

    def render_store(self, store: Store, query: TableQuery) -> None:
        room = store.room(self.room)
        picture = self.query_one("#room-picture", Picture)
        heading: tuple[Line, Line] = ([(f"room {self.room}", "")], [])
        timeline: list[Row] = []
        if room is not None:
            timeline = [{"room": room.room, "nonce": room.nonce, **event} for event in room.timeline]
            picture.show(lambda width: _draw_room(room, width), heading)
        else:
            text = "no agent knows this room (any more)" if store.subject == self.room else "asking …"
            picture.show(lambda width: [[(text, "yellow")]], heading)
        show(self.main, TIMELINE, timeline, store, query)


def _draw_room(room: RoomTimeline, width: int) -> Sequence[Line]:
    """Draws the details of a room except its timeline, which is shown as a table."""
    blocks = room_blocks(room, [], width)[:-1]
    texts = [line for block in blocks if isinstance(block, Text) for line in [*block.lines, _EMPTY_LINE]]
    return [
        *texts,
        *(line for block in blocks if isinstance(block, Grid) for line in _draw_grid(block.view, block.rows, width)),
    ]


def _draw_grid(view: View, rows: Sequence[Row], width: int) -> list[Line]:
    if not rows:
        return [[(view.empty, "dim")]]
    columns = [column for column in view.columns if column.width is not Width.WIDE]
    widths, _ = fit_widths(natural_widths(columns, rows), rows, width)
    return [table_header(widths), *(table_row(row, widths) for row in rows)]
