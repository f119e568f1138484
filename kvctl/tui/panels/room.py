"""One room: what became of it, its ranks, the life of each part on one axis, and every event of both ends."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.client.room_timeline import RoomTimeline
from kvctl.render.report import Grid, Line, Text
from kvctl.render.rooms import room_blocks
from kvctl.render.terminal import fitted, natural, table_header, table_row
from kvctl.render.view import Row, View, Width
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import TIMELINE_SHEET, TableQuery
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table

_CLOCK_ROUNDS = 3
_GAP: Line = []


class RoomPanel(Panel):
    """The way down from any row that is about a room."""

    DEFAULT_CSS = """
    RoomPanel #room-picture { max-height: 60%; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.room = ""

    def compose(self) -> ComposeResult:
        yield Picture(id="room-picture")
        yield Table("timeline", id="room-timeline")

    @property
    def main(self) -> Table:
        return self.query_one("#room-timeline", Table)

    def question(self, store: Store) -> Question:
        return Question("room", (STATUS, Call("room", {"room": self.room})), _CLOCK_ROUNDS, subject=self.room)

    def render_store(self, store: Store, wish: TableQuery) -> None:
        joined = store.room(self.room)
        picture = self.query_one("#room-picture", Picture)
        heading: tuple[Line, Line] = ([(f"room {self.room}", "")], [])
        timeline: list[Row] = []
        if joined is not None:
            timeline = [{"room": joined.room, "nonce": joined.nonce, **event} for event in joined.timeline]
            picture.show(lambda width: _drawn(joined, width), heading)
        else:
            words = "no agent knows it: it was forgotten, or never was" if store.asked == self.room else "asking …"
            picture.show(lambda width: [[(words, "yellow")]], heading)
        show(self.main, TIMELINE_SHEET, timeline, store, wish)


def _drawn(room: RoomTimeline, width: int) -> Sequence[Line]:
    """What became of it, the life of its parts, its ranks; the timeline is a table of its own."""
    drawn = room_blocks(room, [], width)[:-1]
    texts = [line for block in drawn if isinstance(block, Text) for line in [*block.lines, _GAP]]
    return [
        *texts,
        *(line for block in drawn if isinstance(block, Grid) for line in grid(block.view, block.rows, width)),
    ]


def grid(view: View, rows: Sequence[Row], width: int) -> list[Line]:
    """The rows in columns that fit the width."""
    if not rows:
        return [[(view.empty, "dim")]]
    columns = [column for column in view.columns if column.width is not Width.WIDE]
    widths, _ = fitted(natural(columns, rows), rows, width)
    return [table_header(widths), *(table_row(row, widths) for row in rows)]
