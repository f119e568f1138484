"""What is looked at: readings go into the store, the panel on screen shows it, and keys lead from panel to panel."""

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

from kvctl.render.sanitize import printable, printable_lines
from kvctl.render.view import Row
from kvctl.tui import keys
from kvctl.tui.palette import PALETTES, theme_of
from kvctl.tui.panels.events import EventsPanel
from kvctl.tui.panels.layers import LayersPanel
from kvctl.tui.panels.overview import OverviewPanel
from kvctl.tui.panels.panel import Panel
from kvctl.tui.panels.peers import PeersPanel
from kvctl.tui.panels.record import RecordPanel
from kvctl.tui.panels.room import RoomPanel
from kvctl.tui.panels.rooms import FailedPanel, RoomsPanel
from kvctl.tui.panels.staging import StagingPanel
from kvctl.tui.pictures import frame
from kvctl.tui.readings import Feed, Question, Reading
from kvctl.tui.store import Store
from kvctl.tui.table_specs import TableQuery
from kvctl.tui.widgets.canvas import Bar
from kvctl.tui.widgets.table import Table

_PANELS: dict[str, type[Panel]] = {
    "overview": OverviewPanel,
    "rooms": RoomsPanel,
    "staging": StagingPanel,
    "layers": LayersPanel,
    "peers": PeersPanel,
    "events": EventsPanel,
    "failed": FailedPanel,
    "room": RoomPanel,
    "record": RecordPanel,
}
_READINGS = 3  # two of the view and one of health


class Arrived(Message):
    """The feed has read something."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading


class Told(Message):
    """Something came of an order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Browser(App[None]):
    """The whole screen, and the ways about it.

    Args:
        feed: where readings come from; started and stopped by the app.
        mode: interval, replayed file, read-only.
        view: which of the views comes first.
        clock: ours, ns, for how long a pause has lasted.
        wish: filters and order of that view.
    """

    TITLE = "kvctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; color: $foreground; layout: vertical; }
    ModalScreen { background: transparent; }
    ContentSwitcher { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.key, key.action, key.does, show=False) for key in keys.KEYS if key.key != "enter"),
        Binding("ctrl+c", "leave(130)", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        mode: frame.Mode,
        view: str = "overview",
        clock: Callable[[], int] = time.monotonic_ns,
        wish: TableQuery | None = None,
    ) -> None:
        super().__init__()
        self.store = Store()
        self.feed = feed
        self._mode = mode
        self._clock = clock
        self._view = view
        self._path: list[tuple[str, str]] = []  # panels opened on top of the view, with what stands in the tabs
        self._wishes: dict[str, TableQuery] = {view: wish or TableQuery()}
        self._paused_at: int | None = None
        self._question: Question | None = None
        self.readings = 0
        for palette in PALETTES:
            self.register_theme(theme_of(palette))
        self.theme = PALETTES[0].name

    def compose(self) -> ComposeResult:
        yield Bar(id="top", style="bar")
        yield Bar(id="tabs")
        yield Bar(id="banner")
        with ContentSwitcher(initial=self._view, id="panels"):
            for name, kind in _PANELS.items():
                yield kind(id=name)
        yield Bar(id="footer", style="bar")

    def on_mount(self) -> None:
        self.feed.start(self._arrived)
        self.set_interval(1, self._tick)
        self.call_after_refresh(self._enter)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGHUP, signal.SIGTERM):
                loop.add_signal_handler(number, self.action_leave, 128 + number)

    def on_unmount(self) -> None:
        self.feed.stop()

    def _arrived(self, reading: Reading) -> None:
        """On the feed's thread."""
        self.post_message(Arrived(reading))

    def told(self, text: str) -> None:
        """On the feed's thread."""
        self.post_message(Told(text))

    @property
    def complete(self) -> bool:
        """Whether everything that the view shows has been read: rates are differences, so that takes two readings."""
        return self.readings >= _READINGS and self.store.judged is not None

    @property
    def name_on_screen(self) -> str:
        """The panel that is looked at."""
        return self._path[-1][0] if self._path else self._view

    @property
    def panel(self) -> Panel:
        return self.query_one(f"#{self.name_on_screen}", Panel)

    @property
    def wish(self) -> TableQuery:
        return self._wishes.get(self.name_on_screen, TableQuery())

    @property
    def _standing(self) -> bool:
        """The widgets are there; while the app ends, messages still come when they are not."""
        return bool(self.query("#footer"))

    def on_arrived(self, message: Arrived) -> None:
        if not self._standing:
            return
        # A reading that was under way when the pause began is not shown; what a new view asks is.
        if self._paused_at is None or message.reading.question.view == self.name_on_screen:
            self.store.take(message.reading)
            self.readings += 1
            self._ask()
            self._show()
        self.feed.taken()

    def on_told(self, message: Told) -> None:
        self.notify(printable_lines(message.text), markup=False)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def on_table_moved(self) -> None:
        if self.name_on_screen in {"overview", "staging"}:  # what is drawn there is of the row under the cursor
            self._show()

    def on_table_opened(self, message: Table.Opened) -> None:
        sheet = message.table.sheet
        if sheet is None:
            return
        room = sheet.room(message.row)
        if room is not None:
            self.open_room(room)
        else:
            key = sheet.key(message.row)
            title = " ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
            self._open_record(message.table, [message.row], title)

    def on_peers_panel_pair_opened(self, message: PeersPanel.PairOpened) -> None:
        table = self.query_one("#peers-table", Table)
        if message.rows:
            self._open_record(table, message.rows, " → ".join(message.pair))
        else:
            self.notify(printable(f"{' and '.join(message.pair)} have never met"), markup=False)

    def open_room(self, room: str) -> None:
        """Goes down into a room."""
        self.query_one("#room", RoomPanel).room = room
        self._go_down("room", f"room {room}")

    def _open_record(self, table: Table, rows: Sequence[Row], title: str) -> None:
        self.query_one("#record", RecordPanel).open(title, self.panel, table, rows)
        self._go_down("record", title)

    def _go_down(self, panel: str, title: str) -> None:
        self._path = [step for step in self._path if step[0] != panel]
        self._path.append((panel, title))
        self._enter()

    def _enter(self) -> None:
        """Another panel is on screen."""
        if not self._standing:
            return
        self.query_one("#panels", ContentSwitcher).current = self.name_on_screen
        self.panel.begin()
        self._question = None
        self._ask()
        self._show()

    def _ask(self) -> None:
        """Tells the feed what the panel needs, where that is something else than before."""
        question = self.panel.question(self.store)
        if question != self._question:
            self._question = question
            self.feed.want(question)

    def _show(self) -> None:
        size = self.query_one("#panels").size if self._standing else None
        if not size:
            return
        panel = self.panel
        panel.size_changed(size.width, size.height)
        panel.render_store(self.store, self.wish)
        self._frame()

    def _frame(self) -> None:
        mode = replace(self._mode, paused_ns=None if self._paused_at is None else self._clock() - self._paused_at)
        self.query_one("#top", Bar).show(frame.top(self.store, mode))
        self.query_one("#tabs", Bar).show(frame.tabs(self._view, [title for _, title in self._path]))
        self.query_one("#banner", Bar).show(*frame.banner(self.store, mode))
        shown = keys.available(self.name_on_screen, recorded=self.feed.recorded, writes=self.writes)
        said = [(key.label, key.does) for key in shown if key.footer]
        self.query_one("#footer", Bar).show(frame.footer(said, self.size.width))

    @property
    def writes(self) -> bool:
        """Whether keys that change something are there."""
        return not self._mode.readonly and not self.feed.recorded

    def _tick(self) -> None:
        if self._paused_at is not None and self._standing:
            self._frame()

    def action_leave(self, code: int) -> None:
        """Ends with an exit code; the terminal is put back first."""
        self.exit(return_code=code)

    def action_view(self, name: str) -> None:
        self._view, self._path = name, []
        self._enter()

    def action_out(self) -> None:
        """Out of what was opened; then without filter and faults."""
        if self._path:
            self._path.pop()
            self._enter()
        elif self.wish.filters or self.wish.faults_only:
            self.wish_for(replace(self.wish, filters="", faults_only=False))

    def action_pause(self) -> None:
        playing = self.store.place is not None and self.store.place.playing
        if self._paused_at is None and (self.store.place is None or playing):
            self._paused_at = self._clock()
        else:
            self._paused_at = None
        self.feed.pause(self._paused_at is not None)
        self._frame()

    def action_seek(self, step: int) -> None:
        if not self.feed.recorded:
            self.notify("nothing to seek in: these agents live (kvctl top --from FILE replays a recording)")
            return
        self._paused_at = None
        self.feed.seek(step)

    def wish_for(self, wish: TableQuery) -> None:
        """Other filters or another order for the panel on screen."""
        self._wishes[self.name_on_screen] = wish
        self._show()
