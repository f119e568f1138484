"""The textual app of `kvctl top`: navigation between panels, and an action for each key."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import ContentSwitcher

from kvctl.render.rooms import TIMELINE
from kvctl.render.selection import ExpressionError, find_column
from kvctl.render.view import Row
from kvctl.tui import frame, keys
from kvctl.tui.dialogs import Help, Prompt
from kvctl.tui.feed import Feed, Question, Reading
from kvctl.tui.listings import VIEW_OF, TableQuery
from kvctl.tui.palette import THEME
from kvctl.tui.panels.events import EventsPanel
from kvctl.tui.panels.layers import LayersPanel
from kvctl.tui.panels.overview import OverviewPanel
from kvctl.tui.panels.panel import Panel
from kvctl.tui.panels.peers import PeersPanel
from kvctl.tui.panels.record import RecordPanel
from kvctl.tui.panels.room import RoomPanel
from kvctl.tui.panels.rooms import FailedPanel, HistoryPanel, RoomsPanel
from kvctl.tui.panels.staging import StagingPanel
from kvctl.tui.store import Store
from kvctl.tui.widgets import Bar, Table

_PANELS: dict[str, type[Panel]] = {
    "overview": OverviewPanel,
    "rooms": RoomsPanel,
    "staging": StagingPanel,
    "layers": LayersPanel,
    "peers": PeersPanel,
    "events": EventsPanel,
    "failed": FailedPanel,
    "history": HistoryPanel,
    "room": RoomPanel,
    "record": RecordPanel,
}


class ReadingArrived(Message):
    """Message from the feed's thread: a new reading has arrived."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading


class TopApp(App[None]):
    """The textual app of `kvctl top`.

    Args:
        feed: source of readings; started and stopped by the app.
        clock: monotonic clock in nanoseconds, for the duration of a pause.
    """

    TITLE = "kvctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; color: $foreground; layout: vertical; }
    ModalScreen { background: transparent; }
    ContentSwitcher { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.key, key.action, key.name, show=False) for key in keys.KEYS if key.key != "enter"),
        Binding("ctrl+c", "exit(130)", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        mode: frame.Mode,
        view: str = "overview",
        clock: Callable[[], int] = time.monotonic_ns,
        query: TableQuery | None = None,
    ) -> None:
        super().__init__()
        self.store = Store()
        self.feed = feed
        self._mode = mode
        self._clock = clock
        self._view = view
        self._opened: list[tuple[str, str]] = []  # panels opened on top of the view, with their titles
        self._queries: dict[str, TableQuery] = {view: query or TableQuery()}
        self._paused_at: int | None = None
        self._question: Question | None = None
        self.register_theme(THEME)
        self.theme = THEME.name

    def compose(self) -> ComposeResult:
        yield Bar(id="top", style="bar")
        yield Bar(id="tabs")
        yield Bar(id="banner")
        with ContentSwitcher(initial=self._view, id="panels"):
            for name, panel in _PANELS.items():
                yield panel(id=name)
        yield Bar(id="footer", style="bar")

    def on_mount(self) -> None:
        self.feed.start(self._deliver)
        self.set_interval(1, self._tick)
        self.call_after_refresh(self._enter_panel)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGHUP, signal.SIGTERM):
                loop.add_signal_handler(number, self.action_exit, 128 + number)

    def on_unmount(self) -> None:
        self.feed.stop()

    # ---- state of the screen ------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the view can be shown completely: health, and rates, which are differences between two readings.

        A recording is complete at its end, which it may have reached at once: then there are no rates.
        """
        store, position = self.store, self.store.position
        if position is None:
            return store.findings is not None and bool(store.trends.finished)
        at_end = position.index == position.count - 1
        return at_end and store.findings is not None and store.examined_at_ns == store.now_ns

    @property
    def panel_name(self) -> str:
        """Name of the panel on screen, a key of `_PANELS`."""
        return self._opened[-1][0] if self._opened else self._view

    @property
    def panel(self) -> Panel:
        return self.query_one(f"#{self.panel_name}", Panel)

    @property
    def table_query(self) -> TableQuery:
        """Filters and order of the panel on screen."""
        return self._queries.get(self.panel_name, TableQuery())

    @property
    def _has_widgets(self) -> bool:
        """Whether the widgets exist; False while the app exits, when messages may still arrive."""
        return bool(self.query("#footer"))

    def set_query(self, query: TableQuery) -> None:
        """Changes filters and order of the panel on screen."""
        self._queries[self.panel_name] = query
        self._show()

    # ---- readings and drawing -----------------------------------------------------------------------------------

    def _deliver(self, reading: Reading) -> None:
        """Passes a reading from the feed's thread to the app's thread."""
        self.post_message(ReadingArrived(reading))

    def on_reading_arrived(self, message: ReadingArrived) -> None:
        if not self._has_widgets:
            return
        # While paused, only readings for the panel on screen are shown: it may have been opened during the pause.
        if self._paused_at is None or message.reading.question.view == self.panel_name:
            self.store.take(message.reading)
            self._ask()
            self._show()
        self.feed.acknowledge()

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def on_table_moved(self) -> None:
        if self.panel_name in {"overview", "staging"}:  # their pictures depend on the row under the cursor
            self._show()

    def _tick(self) -> None:
        if self._paused_at is not None and self._has_widgets:
            self._show_frame()

    def _enter_panel(self) -> None:
        """Shows the current panel and requests its data."""
        if not self._has_widgets:
            return
        self.query_one("#panels", ContentSwitcher).current = self.panel_name
        self.panel.enter()
        self._question = None
        self._ask()
        self._show()

    def _ask(self) -> None:
        """Sends the panel's question (the calls for its data) to the feed if it has changed."""
        question = self.panel.question(self.store)
        if question != self._question:
            self._question = question
            self.feed.ask(question)

    def _show(self) -> None:
        size = self.query_one("#panels").size if self._has_widgets else None
        if not size:
            return
        panel = self.panel
        panel.size_changed(size.width, size.height)
        panel.render_store(self.store, self.table_query)
        self._show_frame()

    def _show_frame(self) -> None:
        mode = replace(self._mode, paused_ns=None if self._paused_at is None else self._clock() - self._paused_at)
        self.query_one("#top", Bar).show(frame.top(self.store, mode))
        self.query_one("#tabs", Bar).show(frame.tabs(self._view, [title for _, title in self._opened]))
        self.query_one("#banner", Bar).show(*frame.banner(self.store, mode))
        names = [(key.label, key.name) for key in keys.available(recorded=self.feed.recorded) if key.footer]
        self.query_one("#footer", Bar).show(frame.footer(names, self.size.width))

    # ---- navigation ---------------------------------------------------------------------------------------------

    def on_table_opened(self, message: Table.Opened) -> None:
        view = message.table.view
        if view is None:
            return
        if self.panel.open_row(message.table, message.row):
            self._show()
            return
        room = None if view is TIMELINE else message.row.get("room")
        if room is not None:
            self.open_room(str(room))
        else:
            title = " ".join(view.key(message.row))
            self._open_record(message.table, self.panel.record(message.row), title)

    def on_panel_filtered(self, message: Panel.Filtered) -> None:
        self.set_query(TableQuery(filters=message.filters))

    def open_room(self, room: str) -> None:
        """Opens the panel of the room with this number."""
        self.query_one("#room", RoomPanel).room = room
        self._open("room", f"room {room}")

    def _open_record(self, table: Table, rows: Sequence[Row], title: str) -> None:
        self.query_one("#record", RecordPanel).open(title, self.panel, table, rows)
        self._open("record", title)

    def _open(self, panel: str, title: str) -> None:
        self._opened = [each for each in self._opened if each[0] != panel]
        self._opened.append((panel, title))
        self._enter_panel()

    def action_view(self, name: str) -> None:
        self._view, self._opened = name, []
        self._enter_panel()

    def action_close(self) -> None:
        """Closes the panel opened last; if none is open, removes the filter of the view."""
        if self._opened:
            self._opened.pop()
            self._enter_panel()
        elif self.table_query.filters:
            self.set_query(replace(self.table_query, filters=""))

    def action_exit(self, code: int) -> None:
        """Restores the terminal and exits with the given exit code."""
        self.exit(return_code=code)

    # ---- keys ---------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        playing = self.store.position is not None and self.store.position.playing
        if self._paused_at is None and (self.store.position is None or playing):
            self._paused_at = self._clock()
        else:
            self._paused_at = None
        self.feed.pause(self._paused_at is not None)
        self._show_frame()

    def action_seek(self, step: int) -> None:
        if not self.feed.recorded:
            self.notify("seeking needs a recording: kvctl top --from FILE")
            return
        self._paused_at = None
        self.feed.seek(step)

    def action_filter(self) -> None:
        table = self.panel.main if self.panel.MAIN_TABLE else None
        if table is None or table.view is None:
            return
        view = VIEW_OF.get(self.panel_name, table.view)

        def check(text: str) -> str:
            if text.strip().isdecimal():
                return ""
            try:
                TableQuery(text).selection(view)
            except ExpressionError as error:
                return str(error)
            return ""

        def done(text: str | None) -> None:
            if text is not None and text.strip().isdecimal():
                self.open_room(str(int(text)))
            elif text is not None:
                self.set_query(replace(self.table_query, filters=text.strip()))

        hint = "text, or age>5s & state=Failed; a number opens that room"
        self.push_screen(Prompt(f"filter {table.label}", self.table_query.filters, check, hint), done)

    def action_sort(self) -> None:
        table = self.panel.table
        if table is None or table.view is None:
            return
        view = VIEW_OF.get(self.panel_name, table.view) if table is self.panel.main else table.view

        def check(text: str) -> str:
            try:
                find_column(view, text.strip())
            except ExpressionError as error:
                return str(error)
            return ""

        def done(column: str | None) -> None:
            if column is not None:
                self.set_query(self.table_query.sorted_by(view, column.strip()))

        current = (self.table_query.order or next(iter(view.sort), "")).removeprefix("-")
        self.push_screen(Prompt("sort by", current, check, "a column; the same again reverses", proposed=True), done)

    def action_copy(self) -> None:
        text, description = self.panel.clipboard()
        if not text:
            self.notify("no row to copy here")
            return
        self.copy_to_clipboard(text)
        self.notify(f"copied {description}", markup=False)

    def action_help(self) -> None:
        self.push_screen(Help(lambda width: keys.help_page(width, recorded=self.feed.recorded)))
